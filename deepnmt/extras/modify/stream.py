"""The training text as it is read with `data.modify`.

All that happens to a sentence pair follows from its number in the text, or in its window, the epoch and the seed. So it
is the same on every rank, in every layout and after a resume, whatever micro-batch the pair is in.

A window of up to `EXACT` pairs is modified when it is planned. Of a larger one each process modifies what it reads: a
micro-batch is planned with lengths that most sentences will not exceed. A pair that does is drawn again, and is as it
is stored if that is of no use. How much longer pairs become is measured on some of the window.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from deepnmt.config import Modify, Recipe
from deepnmt.data.arrays import Indices, Lengths, Tokens, padded_with_eos
from deepnmt.data.batching import Rows, Sentences, Stream, Text
from deepnmt.data.prepared import REMEDY, PreparedData
from deepnmt.data.subword_variants import SAMPLERS
from deepnmt.errors import UserError
from deepnmt.extras.modify.modifiers import CASES, MODIFIERS, Pair
from deepnmt.extras.modify.words import Words

LINKS = "links"  # the column that has words of source and target in turn
EXACT = 50_000  # pairs that are modified in some seconds
MEASURED = 600  # pairs of a window, for each case, whose growth is measured
# How many of a side fit into the planned length: more where another draw is as long, fewer where all lengths count.
CASE_FITS, FITS = 0.99, 0.95
DRAWS = 4


def around(kind: Callable[..., Stream], recipe: Recipe, data: PreparedData) -> Callable[..., Stream]:
    """The stream of a recipe's training text: of modified text with `data.modify`. Raises `UserError` if `terms` has no
    word alignments."""
    if recipe.data.modify == Modify():
        return kind
    if recipe.data.modify.terms and "alignments" not in data.manifest["splits"]["train"]:
        raise UserError(f"data.modify.terms is {recipe.data.modify.terms:g}, but prepared data {data.folder} has no "
                        f"word alignments of the training text; {REMEDY}")
    return partial(_modified, kind, Modifier(recipe, data))


def _modified(kind: Callable[..., Stream], modifier: Modifier, text: Text, *rest: Any, **more: Any) -> Stream:
    return kind(ModifiedText(text, modifier), *rest, **more)


class Modified(NamedTuple):
    """A sentence pair after its modification: the pieces of both sides, and the links of its words, two numbers each.
    """

    source: Tokens
    target: Tokens
    links: Indices


class Modifier:
    """Does what `data.modify` says."""

    def __init__(self, recipe: Recipe, data: PreparedData) -> None:
        settings = recipe.data.modify
        self._sides: list[Words] = []
        self._begins: list[Sequence[bool]] = []  # of each side, whether a piece begins a word
        for vocab in data.vocabs():
            sampler = SAMPLERS[recipe.vocab.kind](vocab, recipe.data.subword_alpha) if settings.subwords else None
            self._sides.append(Words(vocab, sampler))
            self._begins.append(vocab.begins_word)
        self.seed = recipe.seed
        self.most = recipe.data.filters.max_tokens
        self.subwords = settings.subwords
        self._rates: dict[str, float] = {}
        for name in MODIFIERS:
            rate = getattr(settings, name)
            if rate:
                self._rates[name] = rate
        self.terms = bool(settings.terms)
        self.linked = "alignments" in data.manifest["splits"]["train"]
        self.rests = not self._rates and not self.subwords  # but for the case of some pairs
        shares = [getattr(settings, name) for name in CASES]
        self._bounds = np.cumsum(shares) * 2.0**64  # in the order of CASES

    def cases(self, keys: np.typing.NDArray[np.uint64]) -> Indices:
        """Which of `CASES` pairs have, by their keys; `len(CASES)`: none."""
        return np.searchsorted(self._bounds, keys.astype(np.float64), side="right")

    def __call__(self, ids: tuple[list[int], list[int]], case: int, links: Sequence[tuple[int, int]],
                 generator: random.Random) -> Modified | None:
        """A pair by its stored pieces and its links; None if it is as it was."""
        tags, source = self._sides[0].read(ids[0])
        _, target = self._sides[1].read(ids[1])
        pair = Pair(source.copy(), target.copy())
        first = len(tags)  # a tag is a word of the source
        if self.terms:
            pair.links = _single([(s - first, t) for s, t in links if s >= first])
        for name, rate in self._rates.items():
            MODIFIERS[name](pair, rate, generator)
        if case < len(CASES):
            list(CASES.values())[case](pair)
        new_source, new_target = ids
        if self.subwords or pair.source != source:
            new_source = tags + self._sides[0].write(pair.source, generator)
        if self.subwords or pair.target != target:
            new_target = self._sides[1].write(pair.target, generator)
        if new_source is ids[0] and new_target is ids[1]:
            return None
        moved: list[int] = []
        if links:
            moved = self._moved(links, pair, first, (new_source, new_target))
        return Modified(np.array(new_source, dtype=np.uint32), np.array(new_target, dtype=np.uint32),
                        np.array(moved, dtype=np.int64))

    def _moved(self, links: Sequence[tuple[int, int]], pair: Pair, first: int, new: tuple[list[int], list[int]]
               ) -> list[int]:
        """Where the linked words are now; none if the pieces begin other words than these."""
        words = first + len(pair.source), len(pair.target)
        for ids, begins, count in zip(new, self._begins, words, strict=True):
            begun = sum(begins[number] for number in ids[1:])
            if ids:
                begun += 1  # the first piece begins a word in any case
            if begun != count:
                return []
        places = {tag: tag for tag in range(first)}
        for place, origin in enumerate(pair.origins):
            if origin >= 0:
                places[origin + first] = place + first
        moved = []
        for source, target in links:
            if source in places:
                moved += [places[source], target]
        return moved


def _single(links: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The links of words that have no other."""
    sources, targets = [s for s, _ in links], [t for _, t in links]
    return [(s, t) for s, t in links if sources.count(s) == targets.count(t) == 1]


class ModifiedText:
    """A training text whose windows are modified."""

    planned = True

    def __init__(self, text: Text, modifier: Modifier) -> None:
        self._text, self._modifier, self.name = text, modifier, text.name

    def windows(self, epoch: int) -> int:
        """How many an epoch has."""
        return self._text.windows(epoch)

    def __len__(self) -> int:
        return len(self._text)

    def window(self, epoch: int, number: int) -> ModifiedWindow:
        """The sentences of a window, modified."""
        return ModifiedWindow(self._text.window(epoch, number), self._modifier, epoch, number)


class ModifiedWindow:
    """Sentences that are modified when they are read.

    Attributes:
        sources, targets: the two sides.
        src_lengths, trg_lengths: int32 [N], pieces + eos, the most that a sentence may have.
        fill: how much of that sentences have, about.
        stored: the sentences as they were prepared.
    """

    def __init__(self, stored: Sentences, modifier: Modifier, epoch: int, window: int) -> None:
        self.stored, self._modifier = stored, modifier
        count = len(stored.src_lengths)
        self._keys = np.random.PCG64(np.random.SeedSequence((modifier.seed, epoch, window, 9))).random_raw(count)
        self._cases = modifier.cases(self._keys)
        self._cached: dict[int, Modified | None] = {}
        self._linked: Rows | None = stored.column(LINKS) if modifier.linked else None
        self.fill = 1.0
        if count <= EXACT:
            self.src_lengths, self.trg_lengths = self._exact()
        else:
            self.src_lengths, self.trg_lengths = self._planned()
        self.sources = ModifiedSide(self, 0)
        self.targets = ModifiedSide(self, 1)

    def column(self, name: str) -> Rows:
        """Another column of the same sentences; links are those of the modified ones."""
        column = self.stored.column(name)
        return ModifiedLinks(self, column) if name == LINKS else column

    def pair(self, row: int) -> Modified | None:
        """A sentence pair; None if it is as it is stored."""
        if row not in self._cached:
            if len(self._cached) >= EXACT:
                self._cached.clear()
            self._cached[row] = None
            for pair in self.draws(row):
                if pair is None or self._fits(row, pair):
                    self._cached[row] = pair
                    break
        return self._cached[row]

    def draws(self, row: int) -> Iterator[Modified | None]:
        """What a pair may become, however long that is; the first that fits is taken."""
        if self._cases[row] == len(CASES) and self._modifier.rests:
            yield None
            return
        ids = self.stored.sources[row].tolist(), self.stored.targets[row].tolist()
        links: list[tuple[int, int]] = []
        if self._linked is not None:
            links = [(int(source), int(target)) for source, target in self._linked[row].reshape(-1, 2)]
        generator = random.Random(int(self._keys[row]))
        for _ in range(DRAWS):
            yield self._modifier(ids, int(self._cases[row]), links, generator)

    def _fits(self, row: int, pair: Modified) -> bool:
        return len(pair.source) < self.src_lengths[row] and len(pair.target) < self.trg_lengths[row]

    def _exact(self) -> tuple[Lengths, Lengths]:
        """The lengths after all is modified."""
        source, target = self.stored.src_lengths.copy(), self.stored.trg_lengths.copy()
        self.src_lengths = np.maximum(source, self._modifier.most + 1)
        self.trg_lengths = np.maximum(target, self._modifier.most + 1)
        for row in range(len(source)):
            pair = self.pair(row)
            if pair is not None:
                source[row] = len(pair.source) + 1
                target[row] = len(pair.target) + 1
        return source, target

    def _planned(self) -> tuple[Lengths, Lengths]:
        """The lengths to plan with: of length L and some case, m·L + c·√L, for the variance of a sum grows like L."""
        stored = self.stored.src_lengths, self.stored.trg_lengths
        planned = stored[0].astype(np.float64), stored[1].astype(np.float64)
        expected = float(stored[0].sum(dtype=np.int64) + stored[1].sum(dtype=np.int64))
        for case in range(len(CASES) + 1):
            rows = np.flatnonzero(self._cases == case)
            some = rows[:: max(1, len(rows) // MEASURED)]
            pairs = [next(self.draws(int(row))) for row in some]
            if not any(pairs):
                continue
            fitting = CASE_FITS if case < len(CASES) else FITS
            for side in (0, 1):
                old = stored[side][some].astype(np.float64)
                new = old.copy()
                for place, pair in enumerate(pairs):
                    if pair is not None:
                        new[place] = len(pair[side]) + 1
                mean = new.sum() / old.sum()
                spread = np.quantile((new - mean * old) / np.sqrt(old), fitting)
                lengths = stored[side][rows]
                planned[side][rows] = np.ceil(mean * lengths + spread * np.sqrt(lengths))
                expected += float(mean * lengths.sum(dtype=np.int64) - lengths.sum(dtype=np.int64))
        most = self._modifier.most + 1
        source = np.maximum(stored[0], np.minimum(planned[0], most)).astype(np.int32)
        target = np.maximum(stored[1], np.minimum(planned[1], most)).astype(np.int32)
        self.fill = min(1.0, expected / int(source.sum(dtype=np.int64) + target.sum(dtype=np.int64)))
        return source, target


class ModifiedSide:
    """One side of a modified window."""

    def __init__(self, window: ModifiedWindow, side: int) -> None:
        self._window, self._side = window, side
        self._stored = (window.stored.sources, window.stored.targets)[side]

    def __getitem__(self, row: int) -> Any:
        """The pieces of a sentence, without bos and eos."""
        pair = self._window.pair(row)
        return self._stored[row] if pair is None else pair[self._side]

    def with_eos(self, indices: Indices) -> tuple[Indices, Indices]:
        """The sentences `indices` [B] as pieces + eos, padded to the longest: ids [B, L] and lengths [B]."""
        return padded_with_eos([self[row] for row in indices.tolist()])


class ModifiedLinks:
    """The links of the words of modified sentences."""

    def __init__(self, window: ModifiedWindow, stored: Rows) -> None:
        self._window, self._stored = window, stored

    def __getitem__(self, row: int) -> Any:
        """Words of source and target in turn."""
        pair = self._window.pair(row)
        return self._stored[row] if pair is None else pair.links

    def with_eos(self, indices: Indices) -> tuple[Indices, Indices]:
        """As stored; nobody reads links so."""
        return self._stored.with_eos(indices)
