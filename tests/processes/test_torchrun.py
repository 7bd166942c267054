"""Training under torchrun, in each way to start it on one machine, reaches the losses of the `deepspeed` command; all
have the variables of a new shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from installed import environment
from run_files import losses

import deepnmt
from deepnmt.processes.process_group import free_port

BIN, ROOT = Path(sys.executable).parent, Path(deepnmt.__file__).parents[1]
WAYS = {
    "plain": [],
    "a port": ["--master_port", "{port}"],
    "standalone": ["--standalone"],
    "c10d": ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:{port}", "--rdzv_id", "run"],
}


def train(launcher: list[str], prepared: Path, run: Path) -> dict[int, float]:
    """Losses of a run of 6 updates that a launcher starts."""
    done = subprocess.run(
        [str(BIN / launcher[0]), *(word.format(port=free_port()) for word in launcher[1:]), "train",
         prepared / "recipe.yaml", f"run={run}", "parallel.ds_config=ds_configs/zero1.json", "train.updates=6",
         "train.validate_every=100", "train.valid_bleu=false"],
        env=environment(BIN, run.parent, PYTHONPATH=str(ROOT)), cwd=ROOT, capture_output=True, text=True, timeout=600,
        check=False)
    assert done.returncode == 0 and "finished after 6 updates" in done.stderr, done.stdout + done.stderr
    return losses(run)


@pytest.fixture(scope="module")
def expected(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    launcher = ["deepspeed", "--quiet", "--num_accelerators", "2", "--master_port", "{port}", "--module", "deepnmt"]
    return train(launcher, prepared, tmp_path_factory.mktemp("deepspeed"))


@pytest.mark.parametrize("way", WAYS)
def test_losses(way: str, prepared: Path, tmp_path: Path, expected: dict[int, float]) -> None:
    found = train(["torchrun", "--nproc_per_node", "2", *WAYS[way], "-m", "deepnmt"], prepared, tmp_path)
    assert len(found) == 6 and found == expected


def test_one_process_needs_no_launcher(prepared: Path, tmp_path: Path) -> None:
    """As `deepnmt`, and as `python -m deepnmt`."""
    found = [train(words, prepared, tmp_path / words[0]) for words in (["deepnmt"], ["python", "-m", "deepnmt"])]
    assert len(found[0]) == 6 and found[0] == found[1]
