"""Every process of a finished run ends with exit code 0, in every layout: no abort at exit, no hang.

Once in layouts in which no other test runs `deepnmt train` to its end, since `Warm.run` wants exit codes of 0. If
DEEPNMT_LONG is set, twenty times in all layouts, the first time as fresh programs, then as forked ones, which end in
the same way (see warm.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks import run_on_ranks
from tiny_engines import options
from warm import TESTS, Warm, train

LONG = bool(os.environ.get("DEEPNMT_LONG"))
# processes, layout, pipeline stages
LAYOUTS = [(2, "zero3_offload_bf16", 0), (3, "zero0_fp32", 3)]
if LONG:  # every configuration that comes with deepnmt
    LAYOUTS += [(1, "local", 0), (4, "zero1_fp32", 2)]
    LAYOUTS += [(2, f"{path.stem}_{precision}", stages)
                for path in sorted((TESTS.parent / "ds_configs").glob("*.json"))
                for precision in ("fp32", "bf16", "fp16")
                for stages in ((0, 2) if path.stem in ("zero0", "zero1") else (0,))]
    LAYOUTS += [(4, "zero1_fp16", 4), (6, "zero1_bf16", 3)]


def job(*arguments: str) -> None:
    """Runs on each rank."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # as in warm.py
    code = train(*arguments)
    if code:
        raise SystemExit(code)


@pytest.mark.parametrize(("world", "layout", "stages"), LAYOUTS)
@pytest.mark.timeout(3600 if LONG else 1800)
def test_all_processes_end_with_0(
    world: int, layout: str, stages: int, prepared: Path, tmp_path: Path, warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    for number in range(20 if LONG else 1):
        start = run_on_ranks if LONG and number == 0 else warm.run
        overrides = (f"run={tmp_path / str(number)}", *options(layout, stages), "train.updates=2")
        start(world, "test_exit_codes:job", str(prepared / "recipe.yaml"), *overrides)
