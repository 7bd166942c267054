"""The Python API does the same as the commands, and restores the state of the process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from refusals import user_error
from run_files import losses, scalars

import deepnmt
from deepnmt.cli import main
from deepnmt.model.dropout import seed_dropout
from deepnmt.processes.host import quiet_libraries
from deepnmt.training.log import Monitor
from deepnmt.training.status import SIGNALS

ROOT = Path(__file__).resolve().parents[2]
SHORT = {"train.updates": 6, "train.validate_every": 6, "train.valid_bleu": False}
TEXT = ["the old dog sees the house", "", "  two cats sleep ", "the " * 80]
WEIGHTS = "checkpoints/update-00000006/weights.safetensors"


@pytest.fixture(scope="module")
def run(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> deepnmt.Run:
    """A run trained in Python."""
    return deepnmt.train(prepared / "recipe.yaml", {**SHORT, "run": tmp_path_factory.mktemp("api") / "run"})


def test_importing_deepnmt_imports_nothing_else() -> None:
    script = ("import sys\nbefore = set(sys.modules)\nimport deepnmt\n"
              "assert not {'torch', 'numpy', 'pydantic'} & sys.modules.keys()\n"
              "assert set(deepnmt.__all__) <= set(dir(deepnmt))\n"
              "assert deepnmt.UserError.__module__ == 'deepnmt.errors' and 'torch' not in sys.modules\n"
              "import deepnmt.training.log\n"
              "assert deepnmt.train.__module__ == 'deepnmt.api' and deepnmt.load.__doc__\n"
              "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('deepnmt.')}\n"
              "assert not rooms & {'doctor', 'demo', 'cli'} and 'studies' not in sys.modules\n"
              "import tiny_run\n"
              "from deepnmt.training.dry_run import count_parameters\n"
              "recipe = tiny_run.recipe_of('run')\n"
              "tiny_run.weights_of(recipe), count_parameters(recipe.model, 40, 40)\n"
              "assert 'torch._dynamo' not in sys.modules, 'a model is made and counted without the compiler: 1.4 s'\n")
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT,
                   env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")})
    assert callable(deepnmt.train) and Monitor.__module__ == "deepnmt.training.log"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        deepnmt.trian  # noqa: B018


def test_training_equals_the_command(prepared: Path, run: deepnmt.Run, tmp_path: Path, threads: None) -> None:
    words = [f"{name}={json.dumps(value)}" for name, value in SHORT.items()]
    assert main("train", [str(prepared / "recipe.yaml"), f"run={tmp_path}", *words]) == 0
    assert (tmp_path / WEIGHTS).read_bytes() == (run.folder / WEIGHTS).read_bytes()
    assert (run.update, run.checkpoint.name) == (6, "update-00000006")
    assert [record["update"] for record in run.log() if record["type"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert repr(run) == (f"Run({str(run.folder)!r}: admin 2L-2L, {run.parameters:,} parameters, checkpoint "
                         "update-00000006 on cpu)")


@pytest.mark.parametrize("layout", [None, "ds_configs/zero1.json"])
def test_training_restores_the_process(
        prepared: Path, tmp_path: Path, layout: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what it tells libraries in their variables."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # as a user's process, not that of the suite
    quiet_libraries()
    environment, count = dict(os.environ), torch.get_num_threads()
    handlers = [signal.getsignal(number) for number in SIGNALS]
    changes = {**SHORT, "run": tmp_path, "parallel.ds_config": layout, "parallel.threads": 2}
    trained = [deepnmt.train(prepared / "recipe.yaml", {**changes, "train.updates": updates}) for updates in (1, 2)]
    assert [one.update for one in trained] == [1, 2], "called again, it resumes"
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert dict(os.environ) == environment and torch.get_num_threads() == count and not dist.is_initialized()


def test_training_probes_the_layers(prepared: Path, tmp_path: Path, threads: None) -> None:
    run = tmp_path / "run"
    deepnmt.train(prepared / "recipe.yaml", {**SHORT, "run": run, "train.probe_every": 2})
    probed = [updates for name, updates in scalars(run).items() if name.endswith("/branch_rms")]
    assert probed and all(list(updates) == [2, 4, 6] for updates in probed)


def test_in_another_thread(prepared: Path, tmp_path: Path) -> None:
    recipe, runs = deepnmt.read_recipe(prepared / "recipe.yaml", {**SHORT, "run": tmp_path, "train.updates": 1}), []
    thread = threading.Thread(target=lambda: runs.append(deepnmt.train(recipe)))
    thread.start()
    thread.join()
    assert runs[0].update == 1


@pytest.mark.parametrize("layout", [None, "ds_configs/zero1.json"])
def test_one_run_trains_at_a_time(layout: str | None, prepared: Path, run: deepnmt.Run, tmp_path: Path,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Another is refused while one is in the middle of an update, whose dropout it would change."""
    paused, refused = threading.Event(), threading.Event()

    def seed_and_wait(*arguments: Any) -> None:
        seed_dropout(*arguments)
        if not paused.is_set():
            paused.set()
            assert refused.wait(60)

    monkeypatch.setattr("deepnmt.model.layers.seed_dropout", seed_and_wait)
    recipe, changes = prepared / "recipe.yaml", {**SHORT, "parallel.ds_config": layout, "run": tmp_path / "one"}
    thread = threading.Thread(target=lambda: deepnmt.train(recipe, changes))
    thread.start()
    assert paused.wait(60)
    with user_error("another thread of this process is training"):
        deepnmt.train(recipe, {**changes, "run": tmp_path / "other"})
    refused.set()
    thread.join()
    assert losses(tmp_path / "one") == pytest.approx(losses(run.folder), rel=1e-6 if layout else 0, abs=0)
    assert not (tmp_path / "other").exists()
    assert deepnmt.train(recipe, {**changes, "train.updates": 7}).update == 7


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Restores Python's handler of Ctrl-C, which an earlier command in this process may have replaced."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_saves_first(prepared: Path, tmp_path: Path, ctrl_c: None) -> None:
    log = tmp_path / "log.jsonl"

    def press() -> None:
        while not (log.exists() and '"type": "train", "update": 2,' in log.read_text()):
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        deepnmt.train(prepared / "recipe.yaml", {**SHORT, "run": tmp_path, "train.updates": 5000})
    thread.join()
    saved = deepnmt.load(tmp_path)
    assert saved.update >= 2
    updates = saved.update + 1
    assert deepnmt.train(saved.recipe, {"train.updates": updates}).update == updates


@pytest.mark.parametrize("settings", [
    {}, {"beam": 1}, {"method": "sample", "nbest": 3, "temperature": 0.7}, {"precision": "bf16"},
])
def test_translations_equal_the_command(
        run: deepnmt.Run, tmp_path: Path, threads: None, settings: dict[str, object]) -> None:
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in TEXT), encoding="utf-8")
    words = [f"translate.{name}={value}" for name, value in settings.items()]
    common = ["translate", [str(run.folder), f"--input={tmp_path}/in", f"--output={tmp_path}/out", *words]]
    form = "jsonl" if "nbest" in settings else "text"
    assert main(common[0], [*common[1], f"--format={form}"]) == 0
    written = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    if form == "text":
        assert run.translate(TEXT, **settings) == written
    else:
        hypotheses = run.translate_nbest((line for line in TEXT), **settings)
        told = [[{name: value for name, value in vars(one).items() if name != "alignment"} for one in best]
                for best in hypotheses]  # which was not asked for
        assert told == [json.loads(line)["hypotheses"] for line in
                                                                        written]
    assert not run.model.training and next(run.model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_stream_takes_no_more_sentences_than_it_answers(run: deepnmt.Run, threads: None, ahead: int) -> None:
    taken = []

    def arriving() -> Iterator[str]:
        for text in TEXT:
            taken.append(text)
            yield text

    stream = run.stream(arriving(), ahead=ahead, method="sample", seed=5)
    assert taken == []
    first = next(stream)
    assert len(taken) == ahead
    assert [first, *stream] == run.translate(TEXT, method="sample", seed=5) != run.translate(TEXT, method="sample")
    with user_error("ahead is 0, must be a whole number, 1 or more"):
        run.stream(TEXT, ahead=0)


def test_scores_equal_the_command(run: deepnmt.Run, threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main("evaluate", [str(run.folder)]) == 0
    written = json.loads((run.folder / "scores.json").read_text(encoding="utf-8"))
    monkeypatch.chdir(run.folder)  # its name is the system's all the same
    report = deepnmt.load(".").evaluate()
    assert report.as_json().items() <= written.items() and "BLEU" in report.table()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_changed_weight_is_seen(run: deepnmt.Run, threads: None, precision: str) -> None:
    mine = deepnmt.load(run.folder)
    before = mine.translate_nbest(TEXT, precision=precision), mine.score(TEXT[:1], TEXT[:1], precision=precision)
    with torch.no_grad():
        mine.model.output_weight.mul_(0.5)
    after = mine.translate_nbest(TEXT, precision=precision), mine.score(TEXT[:1], TEXT[:1], precision=precision)
    assert before[0] != after[0] and before[1] != after[1]


def test_another_programs_search_scores_as_the_command(run: deepnmt.Run, threads: None) -> None:
    """`deepnmt score` computes in fp32 there."""
    other = {"backend": "ctranslate2", "finish": "best", "patience": 1.0, "precision": "int8"}
    assert run.score(TEXT[:1], TEXT[:1], **other) == run.score(TEXT[:1], TEXT[:1])


def test_checkpoints_by_name(run: deepnmt.Run, prepared: Path) -> None:
    assert deepnmt.load(run.folder, "best").checkpoint.name == "update-00000006"
    older = deepnmt.load(run.folder, run.folder / "checkpoints" / "update-00000003", device="cpu")
    assert (older.update, older.folder) == (3, run.folder)
    averaged = deepnmt.average(run, updates=[3, 6])
    assert averaged.checkpoint == run.folder / "averaged" and averaged.update == 6
    assert deepnmt.load(str(run.folder)).checkpoint == averaged.checkpoint
    assert deepnmt.load(averaged.checkpoint).translate(TEXT) == averaged.translate(TEXT)
    mean = (older.model.output_weight.double() + run.model.output_weight.double()) / 2
    assert torch.equal(averaged.model.output_weight, mean.float())
    assert deepnmt.prepare(prepared / "recipe.yaml") == prepared / "data"


def test_mistakes(run: deepnmt.Run, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = prepared / "recipe.yaml"
    with user_error(r"translate.baem: unknown setting; did you mean translate.beam\?"):
        run.translate(TEXT, baem=5)
    with user_error(f"there is no folder {tmp_path}/none"):
        deepnmt.load(tmp_path / "none")
    with user_error("holds no recipe.yaml"):
        deepnmt.average(tmp_path)
    with user_error(r"did you mean train.updates\?"):
        deepnmt.train(recipe, {"train.updatse": 3})
    with user_error("run: is missing"):
        deepnmt.read_recipe({"seed": 3})
    other = {"run": "run", "task": "masked_lm", "data": {"folder": "data", "train": ["none"], "valid": ["none"]},
             "model": {"encoder": {"layers": 1}, "decoder": None}, "train": {"updates": 1}}
    with user_error("but the task of this recipe is masked_lm; train it with the command"):
        deepnmt.train(other)
    with user_error("there is no text file none"):
        deepnmt.prepare(other)
    with user_error("there is no prepared data"):
        deepnmt.train(recipe, {"run": tmp_path / "run", "data.folder": tmp_path / "nowhere"})
    for changes in (5, {1: 2}):
        with user_error("changes is .*, must be a mapping of settings"):
            deepnmt.read_recipe(recipe, changes)
    circle: dict[str, Any] = {}
    circle["data"] = circle
    with user_error("the recipe is .*, which is no tree of settings"):
        deepnmt.train(circle)
    for path in (None, 5, b"runs/my", "a\0b", "x" * 300, "\ud800"):
        for function in (deepnmt.load, deepnmt.train, deepnmt.prepare, deepnmt.average):
            with user_error("(folder|recipe|run) is .*, (must be a path|which is no path)"):
                function(path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with user_error("deepnmt.train runs on one process"):
        deepnmt.train(recipe)


@pytest.mark.parametrize(("texts", "said"), [
    (None, "is None, must be a list"), (5, "is 5, must be a list"),
    ("a dog", r"is a single string, must be a list, such as \['a dog'\]"),
    (b"a dog", r"is a single string, must be a list"), (["a dog", None], r"\[1\] is None, must be a string"),
    (["a dog", 5.0], r"\[1\] is 5.0, must be a string"), ([b"a dog"], r"\[0\] is b'a dog', must be a string"),
    (["a dog\ud800"], r"\[0\] is 'a dog\\ud800', which holds half of a character"),
])
def test_what_is_no_list_of_texts(run: deepnmt.Run, texts: Any, said: str) -> None:
    for call in (run.translate, run.translate_nbest, lambda given: list(run.stream(given)),
                 lambda given: run.score(given, ["ein Hund"])):
        with user_error(f"^sentences{said}" if said.startswith(r"\[") else f"^sentences {said}"):
            call(texts)
    for name, call in (("prefixes", lambda given: run.translate(["a dog"], prefixes=given)),
                       ("translations", lambda given: run.score(["a dog"], given)), ("tests", run.evaluate)):
        if texts is not None:
            with user_error(f"^{name}"):
                call(texts)


def test_arguments_of_another_kind(run: deepnmt.Run, tmp_path: Path) -> None:
    with user_error("there are 1 prefixes of 2 sentences; give one of each"):
        run.translate(["a dog", "a cat"], prefixes=["ein"])
    with user_error("there are 1 translations of 2 sentences; give one of each"):
        run.score((text for text in ("a dog", "a cat")), ["ein Hund"])
    for device in ("gpu7", "cuda:99", "meta", 1.5):
        with user_error("device is .*, (which cannot be used|must be cpu, cuda)"):
            deepnmt.load(run.folder, device=device)
    for call in (lambda: run.stream(["a"], ahead="2"), lambda: run.score(["a"], ["b"], top=-1),
                 lambda: deepnmt.average(run, last=2.0), lambda: deepnmt.average(run, updates=["3"])):
        with user_error("is .*, must be a whole number"):
            call()
    for call in (lambda: deepnmt.average(run, updates=3), lambda: deepnmt.load(run.folder, plugins=3)):
        with user_error("is 3, must be a list"):
            call()
    with user_error("plugins is a single string, must be a list, such as .'my.py'."):
        deepnmt.load(run.folder, plugins="my.py")
    with user_error("seed: is .<object"):
        run.translate(["a dog"], seed=object())
