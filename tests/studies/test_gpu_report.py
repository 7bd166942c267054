"""The accelerator report at a toy size on a CPU, with too little time or text, and training with a time limit."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from refusals import Tool
from run_files import records
from tiny_engines import options
from warm import Warm, without_pictures

from deepnmt.config import load_recipe
from deepnmt.errors import UserError
from deepnmt.parallel.deepspeed import check_device
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.process_group import processes
from deepnmt.training.status import FINISHED
from deepnmt.training.trainer import train
from studies.__main__ import main
from studies.benchmarks import gpu_measure as measure
from studies.benchmarks.gpu_report import FULL, SHUTDOWN, TOY, Job, Report, TooSlow, markdown

ROOT = Path(__file__).resolve().parents[2]
Reported = Callable[..., "tuple[dict[str, Any], str]"]


@pytest.fixture
def reported(study: Tool, tmp_path: Path) -> Reported:
    """Writes a toy report into `tmp_path/report` and checks the exit code; returns the report and its page."""

    def run(*words: object, code: int = 0) -> tuple[dict[str, Any], str]:
        done = study("gpu-report", "--toy", "--output", tmp_path / "report", *words, DS_ACCELERATOR="cpu")
        assert done.returncode == code, done.stderr
        return json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8")), done.stdout or done.stderr

    return run


def program(module: str, *words: str) -> None:
    """Runs a `Job`'s module in a forked process, with the accelerator's own list of precisions."""
    vars(get_accelerator()).pop("is_fp16_supported")  # see warm.py
    torch.set_num_threads = lambda _: None  # two threads take four times the CPU time
    without_pictures()
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__")


def test_toy_report(
    tmp_path: Path, warm: Warm, threads: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Forked(Job):
        """A job that ends before its constructor returns."""

        def __init__(self, name: str, module: list[str], log: Path) -> None:
            self.name, self.log, self.started, self.late = name, log, time.monotonic(), False
            warm.start(1, "test_gpu_report:program", *module)
            [code] = warm.wait()
            log.write_text(warm.said(), encoding="utf-8")
            self.process: Any = SimpleNamespace(wait=lambda _=None: code, poll=lambda: code)

    monkeypatch.setattr("studies.benchmarks.gpu_report.Job", Forked)
    monkeypatch.chdir(ROOT)
    assert main("gpu-report", ["--toy", "--output", str(tmp_path / "report")]) == 0
    page = capsys.readouterr().out
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    parts = report["parts"]
    assert list(parts) == ["corpus", "machine", "prepare", "60L-12L zero1_fp16", "60L-12L zero1_bf16", "train",
                           "average", "score"]
    computes = parts["machine"]["figures"]["precisions"]
    left_out = {f"60L-12L zero1_{precision}" for precision in ("fp16", "bf16") if precision not in computes}
    assert {name for name, part in parts.items() if part["status"] != "done"} == left_out
    assert report["seconds"] < report["budget"]
    assert all(rate > 0 for rate in parts["machine"]["figures"]["matmul_tflops"].values())
    for precision in computes[1:]:
        step = parts[f"60L-12L zero1_{precision}"]["figures"]
        assert (step["precision"], step["stage"], step["steps"], step["dropped"]) == (precision, 1, 3, 0)
        assert 3.5 < step["loss_per_token"] < 7.0  # random tokens: about ln 60, and a new model's error
    assert parts["train"]["figures"]["updates"] == 12 and parts["train"]["figures"]["status"] == "finished"
    assert len(parts["train"]["figures"]["validations"]) == 2
    assert parts["score"]["figures"]["bleu"] >= 0 and "tok:13a" in parts["score"]["figures"]["bleu_signature"]
    assert "test BLEU" in page and ("fp16, ZeRO-1" in page) == ("fp16" in computes) and page.strip() == (
        tmp_path / "report" / "report.md").read_text(encoding="utf-8").strip()
    widths = [line.replace("\\|", "").count("|") for line in page.splitlines() if line.startswith("| fp16")]
    assert widths == [10] * ("fp16" in computes)


def test_a_precision_that_the_accelerator_lacks_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in ("fp16", "bf16"):
        monkeypatch.setattr(get_accelerator(), f"is_{precision}_supported", lambda: False)
    monkeypatch.setattr(measure, "_product_tflops", lambda *_: 1.0)
    machine = measure.machine(8, 8, 8, 8, 8)
    assert machine["precisions"] == ["fp32"]
    report = Report(tmp_path, ROOT / "recipes" / "tatoeba", None, 8.0, 590.0, TOY, None, "training")
    report.part("corpus", dict)
    report.part("machine", lambda: machine)
    report.step_rates()
    assert [(part.status, part.note) for part in report.parts[2:]] == [
        ("skipped", f"this machine's {machine['device']} does not compute in {precision}")
        for precision in ("fp16", "bf16")]
    recipe = load_recipe(ROOT / "recipes" / "demo" / "admin_18l-18l.yaml",
                         ["parallel.ds_config=ds_configs/zero1.json", "parallel.precision=bf16"])
    with pytest.raises(UserError, match="has no bf16; set parallel"):
        check_device(layout_of(recipe, 1))


def test_updates_in_each_layout(prepared: Path, tmp_path: Path, warm: Warm) -> None:
    """Both layouts take the same updates; the page has a line for each."""
    found = {}
    for layout, stages in (("zero1_fp16", 0), ("pipeline_zero1_fp16", 1)):
        recipe = load_recipe(prepared / "recipe.yaml", [
            f"run={tmp_path}/{layout}", *options("zero1_fp16", stages), "parallel.threads=1", "train.updates=6",
            "train.validate_every=6", "train.save_every=6", "train.log_every=2", "train.valid_bleu=false"])
        job = {"measure": "updates", "recipe": recipe.model_dump()}
        (tmp_path / f"{layout}.job").write_text(json.dumps(job), encoding="utf-8")
        answer = tmp_path / layout / "answer.json"
        warm.run(1, "studies.benchmarks.gpu_measure:run_job", tmp_path / f"{layout}.job", answer)
        found[layout] = json.loads((tmp_path / layout / "answer.json").read_text(encoding="utf-8"))
    plain, staged = found.values()
    assert [update for update, _ in plain["losses"]] == [2, 4, 6] and plain["updates"] == 6
    assert [loss for _, loss in staged["losses"]] == pytest.approx([loss for _, loss in plain["losses"]], rel=2e-3)
    assert staged["validation"] == pytest.approx(plain["validation"], rel=2e-3)
    assert plain["loss_scales"] == staged["loss_scales"] and plain["loss_scales"]["lowest"] >= 1
    assert all(run["target_tokens_per_second"] > 0 < run["model_tflops"] for run in found.values())
    page = markdown({"toy": True, "seconds": 1.0, "budget": 2.0, "parts": {
        "corpus": {"status": "done", "seconds": 0.1, "note": "", "figures": {"name": "demo", "pairs": {"train": 600}}},
        **{f"updates {layout}": {"status": "done", "seconds": 0.1, "note": "", "figures": run}
           for layout, run in found.items()}}})
    heads = ("| zero1_fp16 |", "| zero1_fp16, 1 stage")
    lines = [line for line in page.splitlines() if line.startswith(heads)]
    assert [line.count("|") for line in lines] == [12, 12] and "demo, 600 pairs" in page


@pytest.mark.skipif(not os.environ.get("DEEPNMT_LONG"), reason="five processes one after the other; DEEPNMT_LONG=1")
def test_toy_report_of_layouts(reported: Reported) -> None:
    report, page = reported("--part", "layouts")
    parts = report["parts"]
    assert list(parts) == ["corpus", "machine", "prepare", "updates zero1_fp16", "updates pipeline_zero1_fp16",
                           "60L-12L zero1_fp16", "60L-12L zero1_bf16",
                           "60L-12L compiled zero1_bf16", "60L-12L compiled zero1_fp16"]
    assert page.count(", ZeRO-1, compiled in ") == 2
    assert {part["status"] for part in parts.values()} == {"done"}
    assert "| zero1_fp16, 1 stage(s) | 6 |" in page


def test_failed_and_skipped_parts_are_reported(reported: Reported, tmp_path: Path) -> None:
    (tmp_path / "few.tsv").write_text("Go.\tGeh.\n", encoding="utf-8")
    report, page = reported("--tsv", tmp_path / "few.tsv", "--budget", "0.001", code=1)
    parts = report["parts"]
    assert parts["corpus"]["status"] == "failed" and "few.tsv has too few sentences" in parts["corpus"]["note"]
    assert parts["machine"]["status"] == "skipped" and "0 s of the budget are left" in parts["machine"]["note"]
    assert parts["train"]["status"] == "skipped" and "needs the part prepare" in parts["train"]["note"]
    assert "| corpus | failed |" in page
    assert "exists already" in reported(code=2)[1]


def test_job_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    job = Job("sleeper", ["timeit", "-n1", "-r1", "print('asleep', flush=True); import time; time.sleep(100)"],
              tmp_path / "log")
    started = time.monotonic()
    with pytest.raises(TooSlow, match="sleeper ended with code -15"):
        job.wait_for_success(1.0)
    assert time.monotonic() - started < 60 and job.process.poll() == -15
    with pytest.raises(RuntimeError, match="No module named"):
        Job("nothing", ["no_such_module"], tmp_path / "other").wait_for_success(30.0)


def test_a_device_too_slow_for_one_update_gets_smaller_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[int, float]] = []

    def measure(self: Report, name: str, arguments: dict[str, Any], *_: str) -> dict[str, Any]:
        requests.append((arguments["tokens"], arguments["until"] - time.monotonic()))
        raise TooSlow("stopped")

    monkeypatch.setattr(Report, "_measure", measure)
    report = Report(tmp_path, ROOT / "recipes" / "tatoeba", None, 8.0, 590.0, FULL, None, "training")
    with pytest.raises(TooSlow):
        report.step("zero1_fp16")
    assert [tokens for tokens, _ in requests] == [32768, 2048]
    assert all(0 < left <= FULL.limits["step"] - SHUTDOWN for _, left in requests)


def test_training_ends_at_its_time_limit(prepared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def status(limit: str) -> tuple[str, int]:
        recipe = load_recipe(prepared / "recipe.yaml", [f"run={run}", f"train.max_seconds={limit}"])
        with processes(1) as ranks:
            assert train(recipe, ranks) == FINISHED
        found = json.loads((run / "STATUS.json").read_text(encoding="utf-8"))
        return found["status"], found["update"]

    assert status("1.0e-6") == ("finished", 2)  # the time of an update is known at the next one
    assert [record["update"] for record in records(run, "valid")] == [2]
    assert (run / "checkpoints" / "update-00000002" / "manifest.json").exists()
    assert status("1.0e-6") == ("finished", 2)
    assert status("null") == ("finished", 12)
    assert records(run, "train")[2]["learning_rate"] == pytest.approx(5e-3 * 3 / 4)  # the schedule has not moved
