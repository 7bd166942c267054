"""Numbers the search is made of: length penalties, and the log-probabilities of the best next tokens.

`R` rows (hypotheses), `V` vocabulary, `C` candidates kept of each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BOS, EOS, PAD = 1, 2, 3  # ids in every vocabulary
NEVER = (BOS, PAD)  # tokens no hypothesis contains

BLOCK = 16  # logits a block of `best_entries` holds: the fastest of 8 … 64 on a CPU at V = 8,000


@dataclass(frozen=True)
class LengthPenalty:
    """What a sum of log-probabilities is divided by. The length n counts the tokens with eos, without bos.

    none: 1. average: n^alpha. gnmt: ((5 + n) / 6)^alpha (Wu et al. 2016, Google's Neural Machine Translation System,
    equation 14).
    """

    name: Literal["none", "average", "gnmt"]
    alpha: float

    def divisor(self, length: int) -> float:
        """The divisor at `length` >= 1. It never falls with the length, which the search's bound relies on."""
        if self.name == "none":
            return 1.0
        return float(length if self.name == "average" else (5 + length) / 6) ** self.alpha


def best_entries(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row of logits [R, V] and their columns, both [R, count], largest first.

    The same as `logits.topk(count)`, several times as fast on a CPU: only the `count` blocks with the largest maxima
    can hold one of the largest values.
    """
    rows, vocab = logits.shape
    blocks = vocab // BLOCK
    if blocks < 4 * count:
        return logits.topk(count)
    whole = blocks * BLOCK  # block b is the columns b, b + blocks, b + 2·blocks …
    maxima = logits[:, :whole].view(rows, BLOCK, blocks).amax(1)
    chosen = maxima.topk(count).indices
    steps = torch.arange(0, whole, blocks, device=logits.device)
    columns = (chosen[:, None, :] + steps[None, :, None]).flatten(1)
    rest = torch.arange(whole, vocab, device=logits.device).expand(rows, -1)
    columns = torch.cat([columns, rest], dim=1)
    values, places = logits.gather(1, columns).topk(count)
    return values, columns.gather(1, places)


def extensions(logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """How each hypothesis may go on.

    Args:
        logits: [R, V] of any float type; overwritten in the columns of bos, eos and pad.
        count: C, at most V.

    Returns:
        The log-probabilities [R, C] of the best tokens other than bos, eos and pad, those tokens [R, C], and the
        log-probability [R] of eos. Log-probabilities are fp32 and those of the model's whole softmax.
    """
    logits = logits.float()
    norm = logits.logsumexp(1)
    ends = logits[:, EOS] - norm
    logits[:, [EOS, *NEVER]] = -torch.inf
    values, tokens = best_entries(logits, count)
    return values - norm[:, None], tokens, ends
