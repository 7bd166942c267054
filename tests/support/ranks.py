"""Runs a function of a test module on N real processes that communicate through gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from deepnmt.processes.process_group import free_port
from deepnmt.processes.ranks import Ranks

Gather = Callable[[bytes], "list[bytes] | None"]

_TESTS = Path(__file__).resolve().parents[1]
_ROOMS = [room for room in (*_TESTS.iterdir(), *_TESTS.glob("extras/*")) if room.is_dir()]
_PATHS = ":".join(map(str, (_TESTS.parent, *_ROOMS)))
_CODE = "import sys; sys.path[:0] = sys.argv[1].split(':'); import importlib; m, f = sys.argv[2].split(':'); " \
        "getattr(importlib.import_module(m), f)(*sys.argv[3:]); from deepnmt.cli import end_process; end_process(0)"


def run_on_ranks(world: int, target: str, *arguments: str, timeout: float = 600) -> None:
    """Runs `module:function(*arguments)` in `world` processes; fails with their output unless all exit with 0."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world),
           "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _CODE, _PATHS, target, *arguments]
    running = [subprocess.Popen(command, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True) for r in range(world)]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    codes = [process.returncode for process in running]
    assert codes == [0] * world, f"exit codes {codes}\n" + "\n".join(outputs)


def played(rank: int, world: int, gather: Gather = lambda _: None) -> Ranks:
    """One of several processes on the CPU, whose `gather_bytes` is `gather`."""
    ranks = Ranks(rank, world, rank, world, torch.device("cpu"))
    object.__setattr__(ranks, "gather_bytes", gather)
    return ranks
