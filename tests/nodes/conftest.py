"""The two machines, which all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from machines import Machines, Unavailable
from node_runs import LONG, SETTINGS, Expected
from warm import Warm


@pytest.fixture(scope="session")
def machines(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Two machines on which `prepared` can be read. Skips the test, saying why, where they cannot be started."""
    try:
        started = Machines(tmp_path_factory.mktemp("scratch"), tmp_path_factory.mktemp("shared"))
    except Unavailable as why:
        pytest.skip(str(why))
    yield started
    started.close()


@pytest.fixture(autouse=True)
def nothing_left(machines: Machines) -> Iterator[None]:
    """After a test no process of a run is left on the machines; they are ended first if it failed."""
    yield
    left = machines.processes(f"run={machines.shared}")
    lines = [" ".join(process.cmdline())[:150] for process in left]
    for process in left:
        process.kill()
    assert not lines, lines


@pytest.fixture(scope="session")
def expected(prepared: Path, tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Expected:
    """Runs on two processes of one machine, by their updates; each is made when it is asked for the first time."""
    @cache
    def run_of(updates: int) -> Path:
        run = tmp_path_factory.mktemp(f"updates-{updates}")
        warm.train(2, prepared / "recipe.yaml", f"run={run}", *SETTINGS, *LONG, f"train.updates={updates}")
        assert warm.wait() == [0, 0], warm.said()
        return run

    return run_of
