"""Training under torchrun, with the variables of a new shell, has the losses of processes that need no launcher.

Those of the `deepspeed` command are compared in test_launcher.py. Here the processes meet by c10d. At a fixed port they
train in tests/cli/test_help.py; that processes meet there, and with --standalone, is in test_process_group.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from installed import environment
from run_files import losses
from warm import Warm

import deepnmt
from deepnmt.processes.process_group import free_port

BIN, ROOT = Path(sys.executable).parent, Path(deepnmt.__file__).parents[1]
TORCHRUN = ["torchrun", "--nproc_per_node", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:{port}",
            "--rdzv_id", "run", "-m", "deepnmt"]
SETTINGS = ["parallel.ds_config=ds_configs/zero1.json", "train.updates=6", "train.validate_every=100",
            "train.valid_bleu=false"]


def train(launcher: list[str], prepared: Path, run: Path) -> dict[int, float]:
    """Losses of a run of 6 updates that a launcher starts."""
    done = subprocess.run(
        [str(BIN / launcher[0]), *(word.format(port=free_port()) for word in launcher[1:]), "train",
         prepared / "recipe.yaml", f"run={run}", *SETTINGS],
        env=environment(BIN, run.parent, PYTHONPATH=str(ROOT)), cwd=ROOT, capture_output=True, text=True, timeout=600,
        check=False)
    assert done.returncode == 0 and "finished after 6 updates" in done.stderr, done.stdout + done.stderr
    return losses(run)


@pytest.mark.parametrize(("launcher", "world"), [(TORCHRUN, 2), (["python", "-m", "deepnmt"], 1)],
                         ids=["torchrun", "one process needs none"])
def test_losses(launcher: list[str], world: int, prepared: Path, tmp_path: Path, warm: Warm) -> None:
    found = train(launcher, prepared, tmp_path / "run")
    warm.run(world, "warm:train", prepared / "recipe.yaml", f"run={tmp_path / 'forked'}", *SETTINGS)
    assert len(found) == 6 and found == losses(tmp_path / "forked")
