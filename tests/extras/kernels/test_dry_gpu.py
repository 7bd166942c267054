"""What would run on a GPU, traced on one that is not there: faults, launches, bytes, memory and waits.

The tables are golden: they may only fall. A new line, or a larger number, needs a reason in the commit that changes it.
DEEPNMT_LONG=1 traces more layouts, probes and precisions. The compiled part (fake_cuda.cpp) needs g++.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deepnmt.config.choices import BLOCKS

ROOM = Path(__file__).resolve().parent
LONG = bool(os.environ.get("DEEPNMT_LONG"))

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles what answers for CUDA; install it")

GOLDEN: dict[str, Any] = json.loads((ROOM / "golden.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Runs a function of rows.py in a process of its own, once, and returns its figures."""
    import torch

    library = tmp_path_factory.mktemp("cuda") / "libfake_cuda.so"
    installed = Path(torch.__file__).parent
    subprocess.run(["g++", "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{installed / 'include'}", "-o", library,
                    ROOM / "fake_cuda.cpp", f"-L{installed / 'lib'}", "-ltorch_cpu", "-lc10"], check=True)
    paths = os.pathsep.join(map(str, (ROOM.parents[2], ROOM.parents[1] / "support", ROOM)))
    env = {**os.environ, "DEEPNMT_FAKE_CUDA": str(library), "PYTHONPATH": paths}

    @cache
    def run(name: str) -> dict[str, Any]:
        code = f"import before_torch, runpy, sys; sys.argv[1:] = ['{name}']; runpy.run_path('{ROOM}/rows.py', None, "\
               "'__main__')"
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600,
                              check=False)
        assert done.returncode == 0, done.stderr
        said, _, figures = done.stdout.rstrip().rpartition("\n")
        return {**json.loads(figures), "said": said}

    return run


def grown(found: dict[str, int], golden: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What is more than in the table: now and there."""
    return {name: (count, golden.get(name, 0)) for name, count in found.items() if count > golden.get(name, 0)}


def test_no_block_has_a_fault_and_none_makes_the_host_wait_more(row: Callable[[str], dict[str, Any]]) -> None:
    """Updates, evaluation, what is saved, probes and decoding: all tensors are where they should be."""
    found = row("blocks")
    assert found["faults"] == {} and found["waits"].keys() == BLOCKS.keys()
    assert {block: more for block, waits in found["waits"].items() if (more := grown(waits, GOLDEN["blocks"]))} == {}


def test_no_layout_has_a_fault_and_none_makes_the_host_wait_more(row: Callable[[str], dict[str, Any]]) -> None:
    """Every collective got contiguous tensors on the GPU. Waits and messages are those of an update of two
    micro-batches."""
    found = row("layouts")
    assert found["faults"] == {}
    golden, traced = GOLDEN["layouts"], found["waits"].keys()
    assert traced <= golden.keys() and len(traced) == (29 if LONG else 16)
    for kind in ("waits", "messages"):
        assert {name: more for name in traced if (more := grown(found[kind][name], golden[name][kind]))} == {}


def test_deepspeed_probes_nothing_and_says_nothing(row: Callable[[str], dict[str, Any]]) -> None:
    """On a GPU without the CUDA toolkit its probes would print seven warnings for every process."""
    found = row("layouts")
    assert not found["probed"]
    assert "compatibility" not in found["said"]


@pytest.mark.parametrize("name", ["counts", "counts_with_kernels"])
def test_launches_bytes_and_memory_of_60l_12l(row: Callable[[str], dict[str, Any]], name: str) -> None:
    """A micro-batch of 28,672 tokens a side; the memory is what `--dry-run` says, within 10 %. Of a layer: launches,
    and what it moves beside matrix products and attention. 100L-100L decodes on a GPU of 80 GB, whose memory the whole
    batch of its recipe would exceed; a step of beam search with 12 layers launches so much, and the host waits once in
    eight."""
    found, golden = row(name), GOLDEN[name]
    for layout in ("zero1 bf16", *(["zero1 fp16", "zero0 bf16"] if LONG else [])):
        now, most = found[layout], golden["update"]
        assert grown({key: now[key] for key in most if key != "waits"}, most) == {}, layout
        assert grown(now["waits"], most["waits"]) == {}, layout
        assert now["peak"] == pytest.approx(now["estimate"], rel=0.1), layout
    for side, layer in found["layers"].items():
        assert grown(layer, golden["layers"][side]) == {}, side
    deep = found["deepest"]
    assert 1 <= deep["sentences"] < deep["asked"] and 0.5 * 80e9 < deep["peak"] < 80e9 - 2.5 * 2**30
    assert grown({key: found["decoding"][key] for key in golden["decoding"]}, golden["decoding"]) == {}
