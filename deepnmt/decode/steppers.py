"""The interface between search and model: the next-token logits of every hypothesis, position by position.

`B` sentences, `K` hypotheses of each, `S` source length, `D` width, `V` vocabulary. Rows [B·K] are ordered by sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Literal, Protocol

import torch
from torch import Tensor

from deepnmt.model.cache import Cache, indices
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import PAD


class Stepper(Protocol):
    """The state of B·K growing hypotheses."""

    def step(self, tokens: Tensor) -> Tensor:
        """Appends tokens [B·K] to the hypotheses; returns the logits [B·K, V] of the next tokens.

        The first tokens of a sentence's hypotheses must be equal. The logits are valid until the next step; the caller
        may overwrite them.
        """

    def reorder(self, rows: Tensor) -> None:
        """Makes row r a copy of row rows[r], for rows [B·K] of the same sentence."""

    def select(self, sentences: Sequence[int]) -> None:
        """Keeps only these sentences, with all their hypotheses, in this order."""


Mean = Literal["arithmetic", "geometric"]  # of the probabilities of several models

MakeStepper = Callable[[Transformer, Tensor, Tensor, int, int], Stepper]


class CachedStepper:
    """Computes one position a step; caches the keys and values of earlier ones.

    Args:
        model: in eval mode.
        src: source ids [B, S], each ending with eos, padded.
        src_lengths: [B], eos included.
        beams: K.
        max_steps: of the longest hypothesis.
    """

    def __init__(self, model: Transformer, src: Tensor, src_lengths: Tensor, beams: int, max_steps: int) -> None:
        self._model = model
        self._beams = beams
        self._cache = model.start_cache(model.encode(src, src_lengths), src_lengths, beams, max_steps)

    def step(self, tokens: Tensor) -> Tensor:
        if self._cache.position == 0:  # all hypotheses of a sentence are still equal
            hidden = self._model.step(tokens[:: self._beams], self._cache)
            return self._model.logits(hidden).repeat_interleave(self._beams, 0)
        return self._model.logits(self._model.step(tokens, self._cache))

    def reorder(self, rows: Tensor) -> None:
        self._cache.reorder(rows)

    def select(self, sentences: Sequence[int]) -> None:
        self._cache.select(sentences)


class PromptStepper:
    """The same for a decoder by itself, which reads eos and the source's pieces before its hypotheses.

    Sentences of equal length share a cache, so that nothing is padded and every kind of positions is right. Takes the
    arguments of `CachedStepper`; few lengths are fast.
    """

    def __init__(self, model: Transformer, src: Tensor, src_lengths: Tensor, beams: int, max_steps: int) -> None:
        self._model, self._beams = model, beams
        self._groups: list[tuple[list[int], Cache, int]] = []  # the sentences' rows, and the steps there is room for
        lengths, limit = src_lengths.tolist(), model.decoder.input.positions.size(0)
        for length, rows in groupby(range(len(lengths)), key=lengths.__getitem__):
            sentences = list(rows)
            end = min(limit, length + max_steps)
            cache = model.start_alone(len(sentences), end, beams)
            prompts = src[sentences, :length].roll(1, 1)  # the eos behind a source is what comes before it
            for tokens in prompts.unbind(1):
                model.step(tokens, cache)
            self._groups.append((sentences, cache, end))
        self._first = True

    def step(self, tokens: Tensor) -> Tensor:
        vocab, table = self._model.target_vocab, self._model.output_weight
        by_sentence = tokens.view(-1, self._beams)
        dtype = table.dtype if self._model.bands is None else torch.float32  # as `logits` gives them
        logits = table.new_zeros(len(by_sentence), self._beams, vocab, dtype=dtype)
        for sentences, cache, end in self._groups:
            if cache.position == end:  # these are at their limits, and the search looks at them no more
                continue
            rows = indices(sentences, tokens.device)
            given = by_sentence[rows]
            if self._first:  # all hypotheses of a sentence are still equal
                logits[rows] = self._model.logits(self._model.step(given[:, 0], cache))[:, None]
            else:
                own = self._model.logits(self._model.step(given.flatten(), cache))
                logits[rows] = own.view(len(sentences), self._beams, vocab)
        self._first = False
        return logits.flatten(0, 1)

    def reorder(self, rows: Tensor) -> None:
        parents = rows.view(-1, self._beams) % self._beams
        for sentences, cache, _ in self._groups:
            first = torch.arange(0, len(sentences) * self._beams, self._beams, device=rows.device)[:, None]
            cache.reorder((first + parents[indices(sentences, rows.device)]).flatten())

    def select(self, sentences: Sequence[int]) -> None:
        groups = []
        for rows, cache, end in self._groups:
            place_of = {row: place for place, row in enumerate(rows)}
            places, stay = [], []
            for number, sentence in enumerate(sentences):
                if sentence in place_of:
                    places.append(place_of[sentence])
                    stay.append(number)
            if stay:
                cache.select(places)
                groups.append((stay, cache, end))
        self._groups = groups


def stepper_of(model: Transformer, src: Tensor, src_lengths: Tensor, beams: int, max_steps: int) -> Stepper:
    """The stepper of a model with an encoder, or of a decoder by itself; see `CachedStepper`."""
    kind: MakeStepper = CachedStepper if "encoder" in model.sides else PromptStepper
    return kind(model, src, src_lengths, beams, max_steps)


class Ensemble:
    """Several models that extend the same hypotheses, each with a cache: `mean_logits` of their logits.

    Takes the arguments of `CachedStepper`; `others` are further models, `mean` is that of `mean_logits`.
    """

    def __init__(
        self, model: Transformer, src: Tensor, src_lengths: Tensor, beams: int, max_steps: int,
        others: Sequence[Transformer], mean: Mean,
    ) -> None:
        self._members = [stepper_of(each, src, src_lengths, beams, max_steps) for each in (model, *others)]
        self._mean = mean

    def step(self, tokens: Tensor) -> Tensor:
        return mean_logits([member.step(tokens) for member in self._members], self._mean)

    def reorder(self, rows: Tensor) -> None:
        for member in self._members:
            member.reorder(rows)

    def select(self, sentences: Sequence[int]) -> None:
        for member in self._members:
            member.select(sentences)


def mean_logits(logits: Sequence[Tensor], mean: Mean) -> Tensor:
    """Logits [R, V] whose softmax is the mean of several models' probabilities.

    They are the first model's plus a term that is exactly 0 where all models agree. So an ensemble of a model with
    itself is that model, to the last bit.

    Args:
        logits: [R, V] of each model, at least one.
        mean: arithmetic: of the probabilities; geometric: of the logits, so of the log-probabilities.
    """
    first = logits[0]
    if len(logits) == 1:
        return first
    first = first.float()
    offsets = [torch.zeros_like(first)]  # log-probabilities less those of the first model
    for other in logits[1:]:
        offset = other.float() - first
        if mean == "arithmetic":
            offset -= other.float().logsumexp(1, keepdim=True) - first.logsumexp(1, keepdim=True)
        offsets.append(offset)
    if mean == "geometric":
        shift = torch.stack(offsets).mean(0)
    else:
        highest = torch.stack(offsets).amax(0)
        shift = highest + torch.stack([(offset - highest).exp() for offset in offsets]).mean(0).log()
    shift[:, PAD] = 0.0  # -inf less -inf
    return first + shift
