"""A trained language model, and what it makes of text: losses, log-probabilities, continuations.

`B` sequences, `T` tokens of the longest, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepnmt.checkpoint.checkpoint import SRC_VOCAB, Which, load_weights_into, open_model, require_shapes
from deepnmt.config import Recipe
from deepnmt.data.arrays import Indices
from deepnmt.data.vocab import Vocabulary
from deepnmt.decode.sampling import make_sampler
from deepnmt.model.cache import indices
from deepnmt.model.objective import objective_of
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import BOS, EOS, PAD, UNK


@dataclass(frozen=True)
class Loaded:
    """The model in evaluation mode, its vocabulary, the run's recipe, and where it was read."""

    model: Transformer
    vocab: Vocabulary
    recipe: Recipe
    update: int
    checkpoint: Path


def load(folder: Path, device: torch.device, which: Which = "auto") -> Loaded:
    """Loads the language model of a checkpoint or a run.

    Raises:
        UserError: there is none, it is damaged, or it is of another task.
    """
    checkpoint, recipe = open_model(folder, which, "language_model")
    vocab = Vocabulary.load(checkpoint / SRC_VOCAB)
    require_shapes(checkpoint, recipe.model, vocab.size, vocab.size)
    model, state = load_weights_into(lambda after_build: Transformer(
        recipe.model, vocab.size, vocab.size, recipe.seed, objective_of(recipe, vocab.size), after_build), checkpoint)
    return Loaded(model.to(device), vocab, recipe, state.update, checkpoint)


@torch.no_grad()
def token_scores(model: Transformer, inputs: Tensor, targets: Tensor) -> Tensor:
    """The log-probabilities of targets [B, T] after inputs [B, T], the tokens before them: fp32 [B, T], 0 at pad."""
    hidden = model.decode(inputs, None, None)
    counted = targets != PAD
    scores = torch.zeros(targets.shape, device=targets.device)
    rows, wanted = hidden[counted], targets[counted]
    parts = []
    size = max(1, 2**22 // len(model.output_weight))  # of the table of all tokens' log-probabilities at once
    for part, ids in zip(rows.split(size), wanted.split(size), strict=True):
        parts.append(model.log_probabilities(part).gather(1, ids[:, None]).squeeze(1))
    scores[counted] = torch.cat(parts) if parts else scores.new_zeros(0)
    return scores


def windows(documents: Indices, window: int, context: int) -> Iterator[tuple[int, int, int]]:
    """How a text is scored with at least `context` tokens before each, where the document has as many.

    Args:
        documents: where documents begin, and the last one ends.
        window: tokens that the model reads at once; above `context`.

    Yields:
        (first, counted, end): the model reads the tokens from first on to end, and those from `counted` on are scored.
    """
    step = window - context
    for begin, end in zip(documents[:-1].tolist(), documents[1:].tolist(), strict=True):
        for counted in range(begin, end, step):
            yield max(begin, counted - context), counted, min(counted + step, end)


def score_stream(
    model: Transformer, tokens: npt.NDArray[Any], documents: Indices, window: int, context: int, budget: int,
    device: torch.device, share: slice = slice(None),
) -> npt.NDArray[np.float64]:
    """The log-probabilities of a text's tokens; see `windows`.

    Args:
        budget: tokens of a batch.
        share: which of the batches are computed; the tokens of others have 0.
    """
    scores = np.zeros(len(tokens))
    begins = set(documents[:-1].tolist())
    rows = max(1, budget // window)
    every = list(windows(documents, window, context))
    for number in range(0, len(every), rows)[share]:
        some = every[number : number + rows]
        longest = max(end - first for first, _, end in some)
        inputs = np.full((len(some), longest), PAD, dtype=np.int64)
        targets = inputs.copy()
        for row, (first, counted, end) in enumerate(some):
            inputs[row, : end - first] = tokens[np.maximum(np.arange(first, end) - 1, 0)]
            if first in begins:
                inputs[row, 0] = EOS
            targets[row, counted - first : end - first] = tokens[counted:end]
        logs = token_scores(model, torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
        values = logs.cpu().numpy()
        for row, (first, counted, end) in enumerate(some):
            scores[counted:end] = values[row, counted - first : end - first]
    return scores


@torch.no_grad()
def continue_text(
    model: Transformer, prompt: Sequence[int], count: int, length: int, seed: int, temperature: float = 1.0,
    top_k: int = 0, top_p: float = 1.0,
) -> list[list[int]]:
    """`count` sampled continuations of a prompt's tokens, each of at most `length` tokens.

    Args:
        seed: the same gives the same continuations.
        temperature, top_k, top_p: see `decode.sampling.make_sampler`.

    Raises:
        ValueError: prompt and continuation exceed `model.max_length`.
    """
    device = model.output_weight.device
    cache = model.start_alone(count, len(prompt) + length)
    uniforms = torch.rand(count, 1, length, generator=torch.Generator().manual_seed(seed)).to(device)
    sample = make_sampler(uniforms, temperature, top_k, top_p)
    rows = torch.arange(count, device=device)
    for token in (EOS, *prompt):
        hidden = model.step(torch.full((count,), token, device=device), cache)
    never = indices([BOS, PAD, UNK], device)
    drawn: list[Tensor] = []
    for step in range(length):
        logits = model.log_probabilities(hidden).index_fill_(1, never, -torch.inf)
        drawn.append(sample(logits, rows, step))
        if step + 1 < length:
            hidden = model.step(drawn[-1], cache)
    if not drawn:
        return [[] for _ in range(count)]
    return torch.stack(drawn, 1).tolist()
