"""The Triton kernels without a GPU: what they compute, and what they take of one. Needs Triton alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOM = Path(__file__).resolve().parent


@pytest.fixture
def kernel_row(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Runs a function of kernel_rows.py in a process of its own."""
    pytest.importorskip("triton", reason="Triton interprets and compiles the kernels; pip install triton")

    def run(name: str) -> dict[str, Any]:
        env = {**os.environ, "PYTHONPATH": str(ROOM.parents[2]), "TRITON_CACHE_DIR": str(tmp_path),
               "TRITON_INTERPRET": str(int(name == "interpreted"))}
        done = subprocess.run([sys.executable, ROOM / "kernel_rows.py", name, tmp_path], env=env, capture_output=True,
                              text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_kernels_compute_what_their_twins_do(kernel_row: Callable[[str], dict[str, Any]]) -> None:
    """By Triton's interpreter, in units of the last place; the twins compute in float64, dropout's masks included."""
    found = kernel_row("interpreted")
    assert len(found) == 59 and {name: far for name, far in found.items() if not far < 12} == {}


def test_kernels_compile_for_gpus_without_spills(kernel_row: Callable[[str], dict[str, Any]]) -> None:
    """For A100 and H100. A GPU runs at full width with up to 64 registers a thread, at half with 128; 16-bit numbers
    are read eight at a time."""
    found = kernel_row("compiled")
    assert len(found) == 14
    for name, of in found.items():
        assert of["spilled"] == 0 and of["wide"] > 0, (name, of)
        assert of["registers"] <= (128 if name.startswith(("add_norm_backward", "attend_step")) else 64), (name, of)
