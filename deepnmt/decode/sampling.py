"""Sampling of the next token, from all tokens or the likeliest (top-k, top-p, epsilon)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepnmt.decode.search import ChooseToken


def make_sampler(
    uniforms: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, epsilon: float = 0.0
) -> ChooseToken:
    """Samples from p = softmax(logits / temperature), by inverting its cumulative distribution.

    A token is left out if any of the limits on p leaves it out; the likeliest never is.

    Args:
        uniforms: fp32 numbers in [0, 1), one for each sentence, sample and step [B, K, M]. They are the only
            randomness, so a sentence's samples do not depend on its batch.
        temperature: below 1 makes likely tokens more likely.
        top_k: only the k likeliest (Fan et al. 2018, Hierarchical Neural Story Generation); 0: all.
        top_p: only the likeliest that together have this probability (Holtzman et al. 2020, The Curious Case of Neural
            Text Degeneration).
        epsilon: only those of at least this probability (Hewitt et al. 2022, Truncation Sampling as Language Model
            Desmoothing).
    """

    def sample(logits: Tensor, sentences: Tensor, step: int) -> Tensor:
        # In float64 an fp32 number below 1 times the total is below the total, so the index is always in range.
        p = (logits.double() / temperature).softmax(1)
        least = p.amax(1, keepdim=True).clamp_max(epsilon)
        if top_k or top_p < 1.0:
            likeliest, tokens = p.sort(dim=1, descending=True, stable=True)
            likeliest[:, top_k or p.size(1):] = 0.0
            likeliest[likeliest.cumsum(1) - likeliest >= top_p] = 0.0
            p = torch.zeros_like(p).scatter_(1, tokens, likeliest)
        if epsilon:
            p[p < least] = 0.0
        mass = p.cumsum(1)
        points = uniforms[sentences, :, step].double().view(-1, 1) * mass[:, -1:]
        # A row whose tokens are all barred gets the last, which has no probability either.
        return torch.searchsorted(mass, points, right=True).squeeze(1).clamp_max(p.size(1) - 1)

    return sample
