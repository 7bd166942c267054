"""Two processes save in shards, and one of them is killed, or gets an error of the file system, at each of its writes.

The system calls are caught in a preloaded library (tests/support/faults.c); the package does not know of it. A write is
also the making, syncing, renaming or deleting of a file or folder. Errors at all of them every day; kills, which need
new processes each, at every third of the first process, and at all if DEEPNMT_LONG is set.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_run
import torch
from warm import TESTS, Warm

from deepnmt.checkpoint.checkpoint import list_checkpoints, moments_in, newest_checkpoint, update_of, weights_in
from deepnmt.checkpoint.retention import prune
from deepnmt.checkpoint.saving import Saver
from deepnmt.checkpoint.tensors import Part
from deepnmt.config import Train
from deepnmt.errors import UserError
from deepnmt.processes import heartbeat
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks

WORLD = 2
RANKS = [0, pytest.param(1, marks=pytest.mark.slow)]


def parts_of(update: int, ranks: Ranks) -> list[Part]:
    """This process's half of two parameters, whose values are those of the update."""
    shapes, half = {"b": (4,), "w": (3, 4)}, ranks.rank
    return [Part(name, shape, half * (size // 2), torch.full((size // 2,), float(update)),
                 {"exp_avg": torch.full((size // 2,), update / 2)})
            for name, shape in shapes.items() for size in [torch.Size(shape).numel()]]


def save(run: Path, ranks: Ranks, update: int) -> str:
    """A save as the trainer makes it; returns why it failed, by the class of the error, its number and its message."""
    saver = Saver(run, ranks, parts_of(update, ranks), True)
    try:
        saver.save(parts_of(update, ranks), tiny_run.state_of(update), "a: 1\n", {"src.spm": b"vocabulary"},
                   lambda: prune(run, Train(updates=99, keep_last=1, keep_best=0), {}))
        saver.wait()
        return ""
    except UserError as fault:
        return f"{type(fault).__name__} {fault.errno} {fault}"
    finally:
        saver.close()


def prepare(run: Path, ranks: Ranks) -> None:
    """10 is whole; 20, which the next save replaces, and 30, which it sets aside, are damaged."""
    if ranks.first:
        shutil.rmtree(run, ignore_errors=True)
    ranks.barrier()
    assert save(run, ranks, 10) == ""
    if ranks.first:
        for update in (20, 30):
            damaged = run / f"update-000000{update}"
            damaged.mkdir()
            (damaged / "manifest.json").write_bytes(b"{")
    ranks.barrier()


def check(run: Path) -> int:
    """That a whole checkpoint is there; returns its update."""
    newest = newest_checkpoint(run, lambda damage: None)
    assert newest is not None, sorted(path.name for path in run.iterdir())
    update = update_of(newest)
    weights, moments = weights_in(newest), moments_in(newest)
    assert weights.shapes == {"b": (4,), "w": (3, 4)}
    for name in weights:
        assert bool((weights[name] == update).all()) and bool((moments[f"{name}.exp_avg"] == update / 2).all())
    return update


def recover(run: Path, ranks: Ranks) -> None:
    """The resumed run saves update 20, and nothing else is left."""
    assert save(run, ranks, 20) == "" and check(run) == 20
    ranks.barrier()  # the first process may still delete what it replaced
    assert [update_of(path) for path in list_checkpoints(run)] == [20] and not list(run.glob(".*"))
    ranks.barrier()


def faulty(run: str, rank: str, at: str) -> None:
    """Runs on each rank: recovers from the last time, and saves update 20, in which process `rank` is killed at change
    `at` (0: none)."""
    with processes(threads=1) as ranks:
        assert heartbeat.current is not None
        heartbeat.current.close()
        heartbeat.current = None  # it would wait ten seconds before it says who is lost
        if Path(run).exists():
            recover(Path(run), ranks)
        prepare(Path(run), ranks)
        os.environ.update(FAULT_UNDER=run, FAULT_RANK=rank, FAULT_AT=at, FAULT_COUNT=f"{run}.{rank}.count")
        fault = save(Path(run), ranks, 20)
        assert at == "0" and fault == "", fault


def last(run: str) -> None:
    """Runs on each rank: recovers from the last time."""
    with processes(threads=1) as ranks:
        recover(Path(run), ranks)


def failing(run: str, rank: str, count: str, found: str) -> None:
    """Runs on each rank: saves of update 20 in which process `rank` gets an error at one change after the other."""
    results = []
    with processes(threads=1) as ranks:
        for at in range(1, int(count) + 1):
            prepare(Path(run), ranks)
            seen = Path(f"{run}.{rank}.errors")
            before = seen.stat().st_size if seen.exists() else 0
            os.environ.update(FAULT_UNDER=run, FAULT_RANK=rank, FAULT_AT=str(before + at), FAULT_COUNT=str(seen),
                              FAULT_ERRNO=str(errno.ENOSPC))
            fault = save(Path(run), ranks, 20)
            del os.environ["FAULT_UNDER"]
            ranks.barrier()
            results.append([fault, check(Path(run)), sorted(path.name for path in Path(run).glob(".tmp-*"))])
            recover(Path(run), ranks)
    Path(f"{found}.{ranks.rank}").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    if shutil.which("cc") is None:
        pytest.skip("no C compiler builds tests/support/faults.c here")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, TESTS / "support" / "faults.c", "-ldl"], check=True)
    warm = Warm(library)
    yield warm
    warm.close()


@pytest.fixture(scope="module")
def changes(preloaded: Warm, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The number of changes that each process makes in a save."""
    run = tmp_path_factory.mktemp("changes") / "run"
    for rank in range(WORLD):
        preloaded.run(WORLD, "test_faults_of_saves:faulty", run, rank, 0)
        assert check(run) == 20
    return [Path(f"{run}.{rank}.count").stat().st_size for rank in range(WORLD)]


@pytest.mark.parametrize("rank", RANKS)
def test_killed_at_every_write_of_every_process(
    rank: int, preloaded: Warm, changes: list[int], tmp_path: Path
) -> None:
    found, run = [], tmp_path / "run"
    assert changes[rank] >= (40 if rank == 0 else 10)
    for at in range(1, changes[rank] + 1, 1 if rank or os.environ.get("DEEPNMT_LONG") else 3):
        preloaded.start(WORLD, "test_faults_of_saves:faulty", run, rank, at)
        codes = preloaded.wait(120)
        assert codes[rank] == -9 and 0 not in codes, f"{at}: {codes}\n{preloaded.said()}"
        found.append(check(run))
    preloaded.run(WORLD, "test_faults_of_saves:last", run)
    assert found == sorted(found) and set(found) == ({10, 20} if rank == 0 else {10})
    print(f"process {rank}: {len(found)} kills, {found.count(20)} of them after the new checkpoint was complete")


@pytest.mark.parametrize("rank", RANKS)
def test_a_full_disk_at_every_write_of_every_process(
    rank: int, preloaded: Warm, changes: list[int], tmp_path: Path
) -> None:
    preloaded.run(WORLD, "test_faults_of_saves:failing", tmp_path / "run", rank, changes[rank], tmp_path / "found")
    ours, others = (json.loads((tmp_path / f"found.{number}").read_text()) for number in range(WORLD))
    assert ours == others, "every process gets the same message"
    for fault, update, left in ours:
        assert not fault or (fault.startswith(f"FolderWriteError {errno.ENOSPC} ") and "\n" not in fault)
        assert update == 20 if not fault else update in (10, 20)
        assert len(left) <= 1
    assert sum(bool(fault) for fault, *_ in ours) >= (25 if rank == 0 else 10)
