"""The training text of prepared data in shards: folders of some million pairs, each with a manifest of its own.

A text in shards is read as it is needed. What a process keeps of a shard that it does not read is a row of the
manifest of the whole, `Entry`. The folder of a shard, such as `train.news.00012`, has the arrays
of a whole text (see `arrays.py`), so that what reads and writes those does so with these.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from deepnmt import folders
from deepnmt.data.arrays import (
    KIND,
    OFFSET,
    TOKENS,
    Indices,
    Lengths,
    Tokens,
    array_of,
    check_sides,
    padded_with_eos,
    variant_stem,
)
from deepnmt.folders import DamagedFolder, Kind

TRAIN = "train"  # the only split that is in shards
FORMAT = "deepnmt-shard"
SHARD = Kind("shard of prepared data", (FORMAT,), "delete the folder that it is in and run deepnmt prepare again",
             KIND.unwritable)


class Entry(BaseModel, strict=True, frozen=True, extra="forbid"):
    """A shard in the manifest of the whole.

    Attributes:
        pairs, src_tokens, trg_tokens: how many it has.
        key: a hash of all that its arrays follow from: text, vocabularies and settings.
        content: a hash of its arrays.
    """

    pairs: int
    src_tokens: int
    trg_tokens: int
    key: str
    content: str


def shard_name(corpus: str, number: int) -> str:
    """The name of the folder of a corpus's shard."""
    return f"{TRAIN}.{corpus}.{number:05d}" if corpus else f"{TRAIN}.{number:05d}"


class Column(NamedTuple):
    """Memory-mapped tokens of a shard's sentences; sentence i is tokens[offsets[i]:offsets[i+1]]."""

    tokens: Tokens
    offsets: Indices


class Shard:
    """The folder of one shard, opened: its manifest and the sizes of its files are checked.

    Raises:
        DamagedFolder: it is missing or damaged, or not the one that the manifest of the whole names.
    """

    def __init__(self, folder: Path, entry: Entry, sizes: Mapping[str, int] | None = None) -> None:
        """`sizes`: of the vocabularies; given, every byte is read and compared with its hash, and tokens with these."""
        self.folder, self.entry = folder, entry
        manifest = folders.read_manifest(folder, SHARD)
        if content_of(manifest) != entry.content:
            raise DamagedFolder(folder, "it is another shard than the manifest of the whole names", SHARD)
        self._files: Mapping[str, Any] = manifest["files"]
        if sizes is None:
            folders.check_sizes(folder, manifest, self._files, SHARD)
            return
        folders.check_files(folder, manifest, None, (), SHARD)
        check_sides(folder, self._files, sizes, SHARD)

    def column(self, name: str) -> Column:
        """One of its columns, such as `train.src`. Raises `DamagedFolder`."""
        suffix = next((suffix for suffix in TOKENS if f"{name}.{suffix}" in self._files), None)
        if suffix is None or f"{name}.offsets" not in self._files:
            raise DamagedFolder(self.folder, f"{folders.MANIFEST} names no {name}.tokens and {name}.offsets", SHARD)
        column = Column(array_of(self.folder / f"{name}.{suffix}", TOKENS[suffix]),
                        array_of(self.folder / f"{name}.offsets", OFFSET))
        if len(column.offsets) != self.entry.pairs + 1:
            raise DamagedFolder(self.folder, f"{name} has {len(column.offsets) - 1} sentences instead of "
                                             f"{self.entry.pairs}", SHARD)
        return column


def content_of(manifest: Mapping[str, Any]) -> str:
    """The hash of a shard's arrays, by its manifest."""
    return folders.hash_of({name: entry["sha256"] for name, entry in manifest["files"].items()})


class Piece(NamedTuple):
    """The sentences `start` to `stop` of a shard."""

    shard: Shard
    start: int
    stop: int


class WindowSide:
    """One side of a window: the sentences of its pieces, one after the other.

    Attributes:
        lengths: int32 [N], pieces + eos.
    """

    def __init__(self, pieces: Sequence[Piece], name: str) -> None:
        self._tokens: list[Tokens] = []
        starts: list[Indices] = []
        lengths: list[Lengths] = []
        self._ends: list[int] = []
        end = 0
        for shard, start, stop in pieces:
            column = shard.column(name)
            offsets = np.array(column.offsets[start:stop + 1])
            sizes = np.diff(offsets)
            if offsets[0] < 0 or offsets[-1] > len(column.tokens) or bool((sizes < 0).any()):
                raise DamagedFolder(shard.folder, f"{name}.offsets does not divide {name}.tokens into sentences", SHARD)
            _read_ahead(column.tokens, int(offsets[0]), int(offsets[-1]))
            end += stop - start
            self._tokens.append(column.tokens)
            self._ends.append(end)
            starts.append(offsets[:-1])
            lengths.append((sizes + 1).astype(np.int32))
        self._starts = np.concatenate(starts)
        self.lengths: Lengths = np.concatenate(lengths)

    def __getitem__(self, row: int) -> Tokens:
        """The pieces of a sentence, without bos and eos."""
        start = int(self._starts[row])
        return self._tokens[bisect_right(self._ends, row)][start:start + int(self.lengths[row]) - 1]

    def with_eos(self, indices: Indices) -> tuple[Indices, Indices]:
        """The sentences `indices` [B] as pieces + eos, padded to the longest: ids [B, L] and lengths [B]."""
        return padded_with_eos([self[row] for row in indices.tolist()])


class Window:
    """Some sentences of a text in shards, numbered from 0, as a `Split` has them.

    Attributes:
        sources, targets: the two sides, in pieces.
        src_lengths, trg_lengths: int32 [N], pieces + eos.
    """

    def __init__(self, pieces: Sequence[Piece], variant: int | None = None) -> None:
        """`variant`: the sampled segmentation; None: the plain one."""
        self._pieces = pieces
        self._columns: dict[str, WindowSide] = {}
        stem = TRAIN if variant is None else variant_stem(TRAIN, variant)
        self.sources, self.targets = (WindowSide(pieces, f"{stem}.{side}") for side in ("src", "trg"))
        self.src_lengths, self.trg_lengths = self.sources.lengths, self.targets.lengths

    def __len__(self) -> int:
        return len(self.src_lengths)

    def column(self, name: str) -> WindowSide:
        """Another column of the same sentences, such as what a visitor has written beside them."""
        if name not in self._columns:
            self._columns[name] = WindowSide(self._pieces, f"{TRAIN}.{name}")
        return self._columns[name]


def _read_ahead(tokens: npt.NDArray[Any], start: int, stop: int) -> None:
    """Has the system read this part of a mapped array at once, and not in pages here and there when they are used."""
    if isinstance(tokens.base, mmap.mmap) and hasattr(mmap, "MADV_WILLNEED"):
        first = start * tokens.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError, ValueError):  # a file system that cannot
            tokens.base.madvise(mmap.MADV_WILLNEED, first, max(1, stop * tokens.itemsize - first))


class ShardedText:
    """The training text in shards.

    Attributes:
        variants: the number of sampled segmentations.
        verify: whether a shard is compared with its hashes when it is opened for the first time.
    """

    name = TRAIN

    def __init__(self, folder: Path, shards: Mapping[str, Sequence[Entry]], variants: int, sizes: Mapping[str, int]
                 ) -> None:
        """
        Args:
            shards: of each corpus, in its order.
            sizes: of the vocabularies, by side.
        """
        self.folder, self.variants, self.verify, self._vocabularies = folder, variants, False, dict(sizes)
        self._shards = {corpus: list(entries) for corpus, entries in shards.items()}
        self._verified: set[str] = set()

    def __len__(self) -> int:
        return sum(entry.pairs for entries in self._shards.values() for entry in entries)

    @property
    def sizes(self) -> dict[str, list[int]]:
        """The pairs of each shard of each corpus."""
        return {corpus: [entry.pairs for entry in entries] for corpus, entries in self._shards.items()}

    def open(self, corpus: str, number: int) -> Shard:
        """Opens a shard. Raises `DamagedFolder`."""
        name = shard_name(corpus, number)
        first = self.verify and name not in self._verified
        shard = Shard(self.folder / name, self._shards[corpus][number], self._vocabularies if first else None)
        if first:
            self._verified.add(name)
        return shard

    def check(self) -> None:
        """Reads every byte of every shard. Raises `DamagedFolder`."""
        for corpus, entries in self._shards.items():
            for number, entry in enumerate(entries):
                Shard(self.folder / shard_name(corpus, number), entry, self._vocabularies)

    @property
    def source_per_target(self) -> float:
        """Source tokens for each target token, including eos."""
        src = trg = 0
        for entries in self._shards.values():
            for entry in entries:
                src += entry.src_tokens + entry.pairs
                trg += entry.trg_tokens + entry.pairs
        return src / trg

    @cached_property
    def whole(self) -> Window:
        """All sentences at once, which takes 24 bytes a pair: for those who look at a whole text."""
        pieces: list[Piece] = []
        for corpus, entries in self._shards.items():
            for number, entry in enumerate(entries):
                if entry.pairs:
                    pieces.append(Piece(self.open(corpus, number), 0, entry.pairs))
        return Window(pieces)

    def column(self, name: str) -> WindowSide:
        """Another column, see `whole`."""
        return self.whole.column(name)

    @property
    def targets(self) -> WindowSide:
        """All targets, see `whole`."""
        return self.whole.targets

    @property
    def trg_lengths(self) -> Lengths:
        """Of all targets, see `whole`."""
        return self.whole.trg_lengths
