"""The tensors of a checkpoint: how their files are written, and how they are read by name or by range.

In one file, each kind (weights, moments) has all its tensors whole in `KIND.safetensors`. In shards, process r has
written the ranges that it owned, each as a flat tensor `NAME@START:STOP`, into `KIND-0000r.safetensors`, and
`index.json` says where everything is:

    {"moments": ["exp_avg", "exp_avg_sq"], "parameters": {NAME: {"shape": [..], "parts": [[START, STOP, r], ..]}}}

A moment NAME.exp_avg has the shape and the ranges of its weight. START and STOP count elements of the flattened tensor.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepnmt import folders
from deepnmt.folders import Buffer, DamagedFolder

Kind = Literal["weights", "moments"]
INDEX = "index.json"

FLOATS = ("F64", "F32", "F16", "BF16")  # types of numbers that are read; deepnmt itself writes F32
MAPPED_VALUES = 4_000_000  # numbers read from tensor files before they are closed and opened again


@dataclass(frozen=True)
class Part:
    """Elements from `start` of a parameter, counted in its flattened form: their weights and moments, flat.

    `shape` is that of the whole parameter; `moments` are by the optimizer's names. They may be views of what training
    goes on to change.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    weight: Tensor
    moments: Mapping[str, Tensor]


Place = tuple[str, list[int], int, int]  # of a part: name, shape of the whole, start, stop


class Piece(NamedTuple):
    """Where elements `start` to `stop` of a tensor are: under `key` in `file`."""

    start: int
    stop: int
    file: str
    key: str


def shard_name(kind: Kind, rank: int) -> str:
    """The file of a kind that a process writes."""
    return f"{kind}-{rank:05d}.safetensors"


def kind_of(file: str) -> str:
    """The file that would hold a shard's tensors if they were in one file; "" if `file` is no shard."""
    shard = re.fullmatch(r"(weights|moments)-[0-9]{5,}\.safetensors", file)
    return f"{shard[1]}.safetensors" if shard else ""


# -- writing -----------------------------------------------------------------------------------------------------------


def tensor_file(shapes: Mapping[str, Iterable[int]], read: Callable[[str], Tensor]) -> Iterator[Buffer]:
    """The content of a safetensors file of fp32 tensors, the same bytes that safetensors would write.

    Args:
        shapes: of the tensors, by name.
        read: returns a tensor of that name; called for one after the other.

    Raises:
        ValueError: a tensor is not fp32.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # some readers of safetensors require this entry
    end = 0
    for name in sorted(shapes):
        start = end
        end = start + 4 * math.prod(shapes[name])
        header[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in sorted(shapes):
        tensor = read(name).detach()
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} is {tensor.dtype}; a checkpoint holds fp32")
        if tensor.numel():
            yield tensor.cpu().contiguous().view(-1).numpy().data


def index_of(owned: Iterable[Iterable[Place]], moments: Iterable[str]) -> dict[str, Any]:
    """The content of index.json, from the places of each process's parts.

    Raises:
        ValueError: the parts do not make up every parameter exactly once.
    """
    parameters: dict[str, Any] = {}
    places = []
    for rank, parts in enumerate(owned):
        for name, shape, start, stop in parts:
            places.append((name, start, stop, rank, shape))
    for name, start, stop, rank, shape in sorted(places):
        entry = parameters.setdefault(name, {"shape": shape, "parts": []})
        end = entry["parts"][-1][1] if entry["parts"] else 0
        if start != end or entry["shape"] != shape:
            raise ValueError(f"{name} {entry['shape']} ends at {end}, but process {rank} goes on at {start}")
        entry["parts"].append([start, stop, rank])
    for name, entry in parameters.items():
        if entry["parts"][-1][1] != math.prod(entry["shape"]):
            raise ValueError(f"{name} {entry['shape']} is owned up to {entry['parts'][-1][1]} only")
    return {"moments": list(moments), "parameters": parameters}


# -- reading -----------------------------------------------------------------------------------------------------------


class _Named(Mapping[str, Tensor]):
    """Tensors by name, of which `shapes` lists all; calling it is asking for one, as a `Source` is."""

    shapes: dict[str, tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __call__(self, name: str) -> Tensor:
        return self[name]


class Tensors(_Named):
    """The tensors of one kind in a verified checkpoint, in one file or in shards, read from disk when asked for.

    Maps names to whole tensors; as a `Source` it also reads ranges. `shapes`: of the whole tensors, by name. Its
    methods raise `DamagedFolder`.
    """

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[Piece]] = {}
        self._open: dict[str, Any] = {}
        self._mapped = 0
        self._manifest = folders.read_manifest(folder)
        if self._manifest["format"] == folders.SHARDED:
            self._read_index(kind)
        else:
            file = f"{kind}.safetensors"
            with _reading(folder, file), safe_open(self._path(file), framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no mapping)
                    shape = tensors.get_slice(name).get_shape()
                    self._add(name, shape, [Piece(0, math.prod(shape), file, name)])

    def _path(self, file: str) -> Path:
        return folders.require_named(self.folder, self._manifest, file)

    def _read_index(self, kind: Kind) -> None:
        self._path(INDEX)
        index = folders.read_json(self.folder, INDEX)
        try:
            endings = [""]
            if kind == "moments":
                endings = [f".{moment}" for moment in index["moments"]]
            for parameter, entry in index["parameters"].items():
                shape = tuple(map(operator.index, entry["shape"]))
                for ending in endings:
                    name = parameter + ending
                    pieces = []
                    for start, stop, rank in entry["parts"]:
                        pieces.append(Piece(operator.index(start), operator.index(stop), shard_name(kind, rank),
                                            f"{name}@{start}:{stop}"))
                    self._add(name, shape, pieces)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedFolder(self.folder, f"{INDEX} is not an index of tensors ({error!r})") from None

    def _add(self, name: str, shape: Iterable[int], pieces: list[Piece]) -> None:
        self.shapes[name] = tuple(shape)
        self._pieces[name] = pieces

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes.get(name)
        if shape is None:
            raise DamagedFolder(self.folder, f"it holds no tensor {name}")
        return self.part(name, 0, math.prod(shape)).view(shape)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of a tensor, flat. Nothing else is read, but for the rest of a matrix's rows."""
        values = []
        for piece in self._pieces.get(name, ()):
            first, last = max(piece.start, start), min(piece.stop, stop)
            if first < last:
                values.append(self._read(piece, first - piece.start, last - piece.start))
        if sum(map(len, values)) != stop - start:
            raise DamagedFolder(self.folder, f"it does not hold all of the tensor {name}")
        return values[0] if len(values) == 1 else torch.cat([torch.empty(0), *values])

    def _read(self, piece: Piece, start: int, stop: int) -> Tensor:
        """Elements of a stored tensor, which are numbers. What was read from an open file stays in memory, so all are
        closed after `MAPPED_VALUES` numbers."""
        if self._mapped >= MAPPED_VALUES:
            self._open.clear()
            self._mapped = 0
        with _reading(self.folder, piece.file):
            if piece.file not in self._open:
                self._open[piece.file] = safe_open(self._path(piece.file), framework="pt")
            stored = self._open[piece.file].get_slice(piece.key)
            shape = stored.get_shape()
            if math.prod(shape) != piece.stop - piece.start:
                raise DamagedFolder(self.folder, f"{piece.key} in {piece.file} has shape {shape}")
            if stored.get_dtype() not in FLOATS:
                raise DamagedFolder(self.folder, f"{piece.key} in {piece.file} is of type {stored.get_dtype()}, "
                                        "must be F32")
            self._mapped += stop - start
            if shape:
                row = math.prod(shape[1:])
                first = start // row
                values = stored[first : -(-stop // row)].flatten()[start - first * row :][: stop - start]
            else:
                values = self._open[piece.file].get_tensor(piece.key).view(1)
        if bool(values.isnan().any()):
            raise DamagedFolder(self.folder, f"{piece.key} in {piece.file} contains NaN")
        return values


class Renamed(_Named):
    """Tensors under other names; `names`: from the new name of each to its name in `tensors`."""

    def __init__(self, tensors: Tensors | Renamed, names: Mapping[str, str]) -> None:
        self._tensors, self._names = tensors, names
        self.shapes = {new: tensors.shapes[old] for new, old in names.items() if old in tensors.shapes}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names.get(name, name)]

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """See `Tensors.part`."""
        return self._tensors.part(self._names.get(name, name), start, stop)


@contextmanager
def _reading(folder: Path, name: str) -> Iterator[None]:
    """Turns an error while reading a tensor file into `DamagedFolder`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise DamagedFolder(folder, f"{name} cannot be read ({error})") from None
