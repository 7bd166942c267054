"""The token arrays of prepared data: how they are written and read.

For a side of a split, e.g. `train.src`:

    train.src.tokens        uint16, little-endian: the pieces of all sentences, without bos and eos
    train.src.tokens32      the same in uint32, for a vocabulary of more than 65,536 pieces
    train.src.offsets       int64, little-endian [N+1]: sentence i is tokens[offsets[i]:offsets[i+1]]
    train.v03.src.tokens    the same for sampled segmentation 3 of the training text
    valid.src.txt           the text itself, one sentence a line; not for the training text
    train.NAME.tokens       an annotation of the text, see `annotations.py`
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepnmt.folders import MANIFEST, DamagedFolder, Kind
from deepnmt.tokens import EOS, PAD

FORMAT = "deepnmt-data"
TOKENS: dict[str, np.dtype[Any]] = {"tokens": np.dtype("<u2"), "tokens32": np.dtype("<u4")}  # suffix to type
OFFSET = np.dtype("<i8")
KIND = Kind("prepared data", (FORMAT,), "delete the folder and run deepnmt prepare again",
            "free space there, or set data.folder to another folder")

Lengths = npt.NDArray[np.int32]
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Indices = npt.NDArray[np.int64]


class SideWriter:
    """Appends sentences to the two arrays of one side.

    Files are open only during `add`, because there may be many variants.
    """

    def __init__(self, folder: Path, stem: str, vocab: int = 0) -> None:
        """`vocab`: the size of the vocabulary."""
        suffix = "tokens" if vocab <= 1 << 16 else "tokens32"
        self._kind = TOKENS[suffix]
        self._tokens, self._offsets = folder / f"{stem}.{suffix}", folder / f"{stem}.offsets"
        self.end = 0
        self._tokens.touch()
        self._offsets.write_bytes(np.zeros(1, OFFSET).tobytes())

    def add(self, tokens: Tokens, lengths: npt.NDArray[np.int64]) -> None:
        """Adds concatenated sentences: `tokens` of all of them, and `lengths` [N] in pieces."""
        for file, array in ((self._tokens, tokens.astype(self._kind)),
                            (self._offsets, self.end + np.cumsum(lengths, dtype=OFFSET))):
            with open(file, "ab") as stream:
                stream.write(array.tobytes())
        self.end += len(tokens)


def variant_stem(split: str, k: int) -> str:
    """The first part of the names of the files of a split's `k`-th sampled segmentation."""
    return f"{split}.v{k:02d}"


def array_of(file: Path, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """A file as a memory-mapped array. Raises `UserError`."""
    try:
        return np.memmap(file, kind, "r") if file.stat().st_size else np.zeros(0, kind)  # an empty one cannot be mapped
    except (OSError, ValueError) as error:
        raise DamagedFolder(file.parent, f"{file.name} cannot be read ({error})", KIND) from None


def check_tokens(folder: Path, name: str, size: int, kind: Kind) -> None:
    """Raises `DamagedFolder` if a file of tokens has one that a vocabulary of so many pieces has not."""
    highest = int(array_of(folder / name, TOKENS[name.rpartition(".")[2]]).max(initial=0))
    if highest >= size:
        raise DamagedFolder(folder, f"{name} has a token {highest}, but the vocabulary has {size} pieces", kind)


def check_sides(folder: Path, files: Iterable[str], sizes: Mapping[str, int], kind: Kind) -> None:
    """`check_tokens` of the files of all sides, whose vocabularies have these sizes."""
    for name in files:
        side, suffix = name.split(".")[-2:]
        if suffix in TOKENS and side in sizes:
            check_tokens(folder, name, sizes[side], kind)


def padded_with_eos(sentences: Sequence[Tokens]) -> tuple[Indices, Indices]:
    """B sentences of pieces, with eos, padded to the longest: ids [B, L] and lengths [B]."""
    lengths = np.array([len(sentence) + 1 for sentence in sentences], dtype=np.int64)
    ids = np.full((len(sentences), int(lengths.max())), PAD, dtype=np.int64)
    for line, sentence in zip(ids, sentences, strict=True):
        line[:len(sentence)] = sentence
        line[len(sentence)] = EOS
    return ids, lengths


class Side:
    """One side of a split: N sentences in memory-mapped arrays, each truncated to `limit - 1` pieces.

    Attributes:
        lengths: int32 [N], pieces + eos.
    """

    def __init__(self, folder: Path, files: Collection[str], stem: str, limit: int | None = None) -> None:
        """`files`: the names of those that belong to the folder; others in it are not read."""
        suffix = "tokens" if f"{stem}.tokens" in files else "tokens32"
        for name in (f"{stem}.{suffix}", f"{stem}.offsets"):
            if name not in files:
                raise DamagedFolder(folder, f"{MANIFEST} does not name {name}", KIND)
        self._tokens = array_of(folder / f"{stem}.{suffix}", TOKENS[suffix])
        self._offsets = array_of(folder / f"{stem}.offsets", OFFSET)
        pieces = np.diff(self._offsets)
        ends = self._offsets[[0, -1]].tolist() if len(self._offsets) else []
        if ends != [0, len(self._tokens)] or bool((pieces < 0).any()):
            raise DamagedFolder(folder, f"{stem}.offsets does not divide {stem}.tokens into sentences", KIND)
        self._pieces = pieces if limit is None else np.minimum(pieces, limit - 1)
        self.lengths: Lengths = (self._pieces + 1).astype(np.int32)

    def __getitem__(self, i: int) -> Tokens:
        """The pieces of sentence `i`, without bos and eos."""
        start = self._offsets[i]
        return self._tokens[start:start + self._pieces[i]]

    def with_eos(self, indices: Indices) -> tuple[Indices, Indices]:
        """The sentences `indices` [B] as pieces + eos, padded to the longest: ids [B, L] and lengths [B]."""
        pieces = self._pieces[indices][:, None]
        columns = np.arange(int(pieces.max()) + 1)
        position = np.where(columns < pieces, self._offsets[indices][:, None] + columns, -1)
        ids = np.full(position.shape, PAD, dtype=np.int64)
        ids[position >= 0] = self._tokens[position[position >= 0]]
        ids[columns == pieces] = EOS
        return ids, pieces[:, 0] + 1


class Split:
    """The training, validation or a test text: N pairs.

    Attributes:
        sources, targets: the two sides, in pieces.
        src_lengths, trg_lengths: int32 [N], pieces + eos (which is also bos + pieces).
        variants: the number of sampled segmentations.
    """

    def __init__(self, folder: Path, files: Collection[str], name: str, variants: int = 0, variant: int | None = None,
                 limit: int | None = None) -> None:
        """`files`: see `Side`."""
        self._folder, self._files, self._limit = folder, files, limit
        self.name, self.variants = name, variants
        self._columns: dict[str, Side] = {}
        stem = name if variant is None else variant_stem(name, variant)
        self.sources, self.targets = (Side(folder, files, f"{stem}.{side}", limit) for side in ("src", "trg"))
        self.src_lengths, self.trg_lengths = self.sources.lengths, self.targets.lengths
        if len(self.src_lengths) != len(self.trg_lengths):
            raise DamagedFolder(folder, f"{stem} has {len(self.src_lengths)} source sentences, but "
                                        f"{len(self.trg_lengths)} target sentences", KIND)

    def __len__(self) -> int:
        return len(self.src_lengths)

    def windows(self, epoch: int) -> int:
        """How many an epoch has; texts in shards have more, see `windows.py`."""
        return 1

    def window(self, epoch: int, number: int) -> Split:
        """The sentences of an epoch: sampled segmentation `epoch mod variants`, or the plain one if there is none."""
        return self.variant(epoch % self.variants) if self.variants else self

    @property
    def source_per_target(self) -> float:
        """Source tokens for each target token, including eos."""
        return float(self.src_lengths.mean() / self.trg_lengths.mean())

    def variant(self, k: int) -> Split:
        """The `k`-th sampled segmentation of the same sentences, `0 <= k < variants`."""
        if not 0 <= k < self.variants:
            raise IndexError(f"sampled segmentation {k} of {self.name}, which has {self.variants}")
        return Split(self._folder, self._files, self.name, self.variants, k, self._limit)

    def column(self, name: str) -> Side:
        """Another column of the same sentences, such as what a visitor has written beside them."""
        if name not in self._columns:
            self._columns[name] = Side(self._folder, self._files, f"{self.name}.{name}")
        return self._columns[name]

    def truncated(self, limit: int) -> Split:
        """The plain segmentation with every sentence truncated to `limit` tokens, including eos.

        Validation and test texts are stored in full; their loss must not use more than `model.max_length` tokens of a
        sentence.
        """
        return Split(self._folder, self._files, self.name, self.variants, limit=limit)

    def src_text(self) -> list[str]:
        """The source text, a string for each sentence, without surrounding whitespace. Not for the training text."""
        return self._text("src")

    def trg_text(self) -> list[str]:
        """The target text, a string for each sentence, without surrounding whitespace. Not for the training text."""
        return self._text("trg")

    def _text(self, side: str) -> list[str]:
        name = f"{self.name}.{side}.txt"
        if name not in self._files:
            raise DamagedFolder(self._folder, f"{MANIFEST} does not name {name}", KIND)
        try:
            lines = (self._folder / name).read_bytes().decode("utf-8").split("\n")[:-1]
        except (OSError, UnicodeDecodeError) as error:
            raise DamagedFolder(self._folder, f"{name} cannot be read ({error})", KIND) from None
        if len(lines) != len(self):
            raise DamagedFolder(self._folder, f"{name} has {len(lines)} lines for {len(self)} sentences", KIND)
        return lines
