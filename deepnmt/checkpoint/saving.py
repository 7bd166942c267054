"""Saving the checkpoints of a run while it trains on.

Every process copies what it owns, at once; that is all that training waits for. A thread then writes the copy. In
shards each process writes its own, and hashes what it writes; in one file the others send theirs to rank 0. When all
have written, rank 0 adds the manifest and renames the folder.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepnmt import folders
from deepnmt.checkpoint.checkpoint import (
    MOMENTS,
    WEIGHTS,
    TrainingState,
    facts_of,
    list_checkpoints,
    recover_checkpoints,
    shapes_of,
    texts_of,
    update_of,
)
from deepnmt.checkpoint.tensors import INDEX, Part, Place, index_of, shard_name, tensor_file
from deepnmt.config import Recipe
from deepnmt.errors import UserError
from deepnmt.folders import Entry
from deepnmt.optim.optimizers import moment_names
from deepnmt.processes.ranks import Ranks

ONE_FILE_BYTES = 1_000_000_000  # of weights and moments; several processes write more than this in shards


def state_bytes(recipe: Recipe, parameters: int) -> int:
    """Bytes of a checkpoint's weights and moments."""
    return 4 * parameters * (1 + len(moment_names(recipe)))


def in_shards(recipe: Recipe, parameters: int, processes: int) -> bool:
    """Whether a run with so many parameters writes its checkpoints in shards, by `train.checkpoint_form`."""
    form = recipe.train.checkpoint_form
    if form != "auto":
        return form == "shards"
    return processes > 1 and state_bytes(recipe, parameters) >= ONE_FILE_BYTES


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written: its update, the seconds that training waited for it, those that writing took, and
    the bytes of its files."""

    update: int
    stall: float
    seconds: float
    size: int


def _tensors_of(parts: Iterable[Part]) -> Iterator[Tensor]:
    """Weights and moments, one after the other: an engine may make each only when it is asked for."""
    for part in parts:
        yield part.weight
        yield from part.moments.values()


class Saver:
    """Writes the checkpoints of a run. Its construction, `save`, `done` and `wait` are collective.

    Args:
        checkpoints: the folder they are in.
        ranks: the processes of the run.
        parts: what this process owns, by `Engine.owned`. Memory for a copy is taken, and held, from now on.
        sharded: whether each process writes its own files.
    """

    def __init__(self, checkpoints: Path, ranks: Ranks, parts: Iterable[Part], sharded: bool) -> None:
        self.checkpoints, self.sharded = checkpoints, sharded
        self._main, self.ranks = ranks, ranks.background_group()
        self._owned: list[Place] = []
        self._moments: list[str] = []
        sizes: list[int] = []
        for part in parts:
            self._owned.append((part.name, list(part.shape), part.start, part.start + len(part.weight)))
            self._moments = list(part.moments)
            sizes += [len(part.weight)] * (1 + len(self._moments))
        # zeros, so that the system hands out the memory now and not when training waits for the first copy
        self._copy = torch.zeros(sum(sizes), pin_memory=ranks.device.type == "cuda").split(sizes)
        described = self.ranks.gather_bytes(json.dumps([self._owned, self._moments]).encode())
        if described:
            self._all_owned = []
            moments: list[str] = []  # a process that owns nothing names none
            for owned, names in map(json.loads, described):
                self._all_owned.append(owned)
                moments = moments or names
            self._index = index_of(self._all_owned, moments)
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Saved] | None = None

    def save(
        self, parts: Iterable[Part], state: TrainingState, recipe_yaml: str, files: Mapping[str, bytes],
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """Copies the parts and begins to write the checkpoint. `wait` must have been called since the last `save`.

        A checkpoint of this update is replaced. Those of later updates (a damaged newest one, say, which the run could
        not resume from) are renamed to `set-aside-update-*`, so that they are neither resumed from nor counted when old
        ones are deleted.

        Args:
            parts: as in the construction.
            files: the task's.
            then: called on rank 0 when the checkpoint is complete.
        """
        started = time.monotonic()
        for slot, tensor in zip(self._copy, _tensors_of(parts), strict=True):
            slot.copy_(tensor, non_blocking=True)
        if self._main.device.type == "cuda":
            torch.cuda.synchronize(self._main.device)
        texts = texts_of(state, recipe_yaml, files)
        self._writing = self._pool.submit(self._write, state.update, texts, then, time.monotonic() - started)

    def done(self) -> bool:
        """Whether `wait` has something to report, and would return it at once on every process. Collective."""
        if self._writing is None:
            return False
        [still_writing] = self._main.sum([0.0 if self._writing.done() else 1.0])
        return still_writing == 0

    def wait(self) -> Saved | None:
        """Waits until the checkpoint that `save` began is on the disk; None if there is none.

        Raises:
            UserError: on every process: disk full, no permission, or another fault of the file system; no partial
                folder is left.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        started = time.monotonic()
        saved = writing.result()
        return replace(saved, stall=saved.stall + time.monotonic() - started)

    def close(self) -> None:
        """Waits for the thread to end."""
        self._pool.shutdown()

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _write(self, update: int, texts: dict[str, bytes], then: Callable[[], object], stall: float) -> Saved:
        started = time.monotonic()
        ranks = self.ranks
        target = self.checkpoints / f"update-{update:08d}"
        with ExitStack() as stack:
            def begin() -> bytes:
                if not ranks.first:
                    return b""
                recover_checkpoints(self.checkpoints)
                return stack.enter_context(folders.new_folder(target)).name.encode()

            temporary = target.with_name(ranks.broadcast_bytes(ranks.raise_everywhere(begin)).decode())
            groups = self._shards() if self.sharded else self._whole()
            entries = ranks.raise_everywhere(lambda: self._write_tensors(groups, temporary, target))
            counts = {name: len(group) for name, group in groups.items()}
            written = ranks.gather_bytes(json.dumps([entries, counts]).encode())

            def end() -> int:
                if not written:
                    return 0
                size = self._publish(temporary, target, update, texts, [json.loads(each) for each in written])
                for path in list_checkpoints(self.checkpoints):
                    if update_of(path) > update:
                        folders.set_aside(path)
                then()
                return size

            size = ranks.raise_everywhere(end)
        return Saved(update, stall, time.monotonic() - started, size)

    def _shards(self) -> dict[str, dict[str, Tensor]]:
        """The files of this process: name to tensors by their keys."""
        weights: dict[str, Tensor] = {}
        moments: dict[str, Tensor] = {}
        slots = iter(self._copy)
        for name, _, start, stop in self._owned:
            weights[f"{name}@{start}:{stop}"] = next(slots)
            for moment in self._moments:
                moments[f"{name}.{moment}@{start}:{stop}"] = next(slots)
        return {shard_name("weights", self.ranks.rank): weights, shard_name("moments", self.ranks.rank): moments}

    def _whole(self) -> dict[str, dict[str, Tensor]]:
        """On rank 0 the two files with all tensors, whole; the other processes send theirs."""
        if not self.ranks.first:
            for slot in self._copy:
                self.ranks.send(slot)
            return {}
        tensors: dict[str, Tensor] = {}
        own = iter(self._copy)
        endings = ["", *[f".{moment}" for moment in self._index["moments"]]]
        for rank, owned in enumerate(self._all_owned):
            for name, shape, start, stop in owned:
                for key in [name + ending for ending in endings]:
                    if rank == 0 and stop - start == math.prod(shape):
                        tensors[key] = next(own).view(shape)  # needs no other copy
                        continue
                    if key not in tensors:
                        tensors[key] = torch.empty(shape)
                    part = tensors[key].view(-1)[start:stop]
                    if rank == 0:
                        part.copy_(next(own))
                    else:
                        self.ranks.receive(part, rank)
        weights = {name: tensors.pop(name) for name in self._index["parameters"]}
        return {WEIGHTS: weights, MOMENTS: tensors}

    def _write_tensors(self, groups: dict[str, dict[str, Tensor]], temporary: Path, target: Path) -> dict[str, Entry]:
        """Writes this process's files; returns their entries in the manifest. Raises `UserError`."""
        if groups and not temporary.is_dir():
            raise UserError(f"process {self.ranks.rank} on {socket.gethostname()} does not see {temporary}, which "
                            "process 0 has made; put the run on a file system that all machines share, or set "
                            "train.checkpoint_form=one_file")
        entries = {}
        for name, group in groups.items():
            content = tensor_file(shapes_of(group), group.__getitem__)
            entries[name] = folders.write_file(temporary / name, content, target)
        return entries

    def _publish(
        self, temporary: Path, target: Path, update: int, texts: dict[str, bytes], written: list[list[dict[str, Any]]]
    ) -> int:
        """Completes the folder, on rank 0, once every process has written; returns its bytes.

        Args:
            written: of each process, entries and number of tensors of its files.
        """
        entries: dict[str, Entry] = {}
        counts: dict[str, int] = {}
        for files, tensors in written:
            entries |= files
            counts |= tensors
        shapes = {name: entry["shape"] for name, entry in self._index["parameters"].items()}
        facts = facts_of(update, shapes, counts)
        if self.sharded:
            texts = {**texts, INDEX: json.dumps(self._index).encode()}
            facts = {"format": folders.SHARDED, **facts}
        for name, text in texts.items():
            entries[name] = folders.write_file(temporary / name, [text], target)
        folders.publish(temporary, target, entries, facts)
        return sum(int(entry["size"]) for entry in entries.values())
