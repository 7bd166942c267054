"""Too little memory, in an update, a validation or a search: one sentence, and nothing that was saved is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from refusals import Refused
from run_files import losses

from deepnmt.cli import main
from deepnmt.errors import enough_memory
from deepnmt.parallel.engine import LocalEngine

OPTIONS = ("train.updates=4", "train.save_every=1", "train.validate_every=3", "train.valid_bleu=false")


def cpu() -> NoReturn:
    torch.empty(2**50, dtype=torch.uint8)
    raise AssertionError("a petabyte was given")


def python() -> NoReturn:
    raise MemoryError


def gpu() -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")


@pytest.fixture(scope="module")
def whole(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole")
    assert main("train", [str(prepared / "recipe.yaml"), f"run={run}", *OPTIONS]) == 0
    return run


@pytest.mark.parametrize(("step", "call", "fault", "said"), [
    ("train_step", 3, cpu, "DefaultCPUAllocator: "), ("train_step", 3, python, "(MemoryError)"),
    ("train_step", 3, gpu, "(CUDA out of memory. Tried to allocate 2.00 GiB.)"),
    ("evaluate", 1, cpu, "DefaultCPUAllocator: ")])
def test_training_ends_with_a_sentence_and_goes_on(
    step: str, call: int, fault: Callable[[], NoReturn], said: str, prepared: Path, whole: Path, tmp_path: Path,
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = getattr(LocalEngine, step), []

    def short(*arguments: Any) -> Any:
        calls.append(arguments)
        return fault() if len(calls) == call else real(*arguments)

    words = (prepared / "recipe.yaml", f"run={tmp_path}", *OPTIONS)
    with monkeypatch.context() as changed:
        changed.setattr(LocalEngine, step, short)
        told = refused("train", *words).splitlines()[-1]
    assert told.startswith("deepnmt: there is not enough memory (") and said in told
    assert "parallel.recompute_layers" in told and "batch.tokens" in told
    assert json.loads((tmp_path / "STATUS.json").read_text())["status"] == "failed"
    assert main("train", [str(word) for word in words]) == 0
    assert losses(tmp_path) == losses(whole)


def test_a_search_names_its_settings(whole: Path, prepared: Path, tmp_path: Path, refused: Refused,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepnmt.decode.translate.free_memory", lambda device: 2.0**20)
    words = ("--input", prepared / "text" / "test.en", "--output", tmp_path / "out", "translate.beam=10000")
    said = refused("translate", whole, *words)
    assert "needs more memory" in said and "set translate.beam (10,000)" in said
    assert not (tmp_path / "out").exists()


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="a bug"), enough_memory("buy more"):
        raise RuntimeError("a bug")
