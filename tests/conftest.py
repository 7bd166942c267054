"""What several test files share: a small prepared corpus and a small recipe over it."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # tests share the cores: no thread spins while it has no work
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process that a test starts would compile deepnmt anew
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job; so would all that a test starts
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from installed import build, make_environment
from refusals import Refused
from warm import Warm, without_pictures

ROOT = Path(__file__).resolve().parents[1]

RECIPE = """
run: {folder}/run
seed: 7
data:
  folder: {folder}/data
  src_lang: en
  trg_lang: de
  train: {{src: {folder}/text/train.en, trg: {folder}/text/train.de}}
  valid: {{src: {folder}/text/valid.en, trg: {folder}/text/valid.de}}
  test: {{held_out: {{src: {folder}/text/test.en, trg: {folder}/text/test.de}}}}
  filters: {{max_tokens: 60}}
  workers: 1
vocab: {{size: 300}}
batch: {{tokens: 256}}
model:
  width: 16
  heads: 2
  ffn: 32
  dropout: 0.1
  max_length: 64
  encoder: {{block: admin, layers: 2}}
  decoder: {{block: admin, layers: 2}}
admin: {{tokens: 512}}
optimizer: {{lr: 5.0e-3}}
schedule: {{warmup: 4}}
train:
  updates: 12
  clip: 1.0
  log_every: 1
  validate_every: 5
  save_every: 3
  valid_sentences: 8
parallel: {{threads: 1}}
translate: {{beam: 2, max_extra: 5}}
average_last: 2
"""


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `text/`, `data/` and `recipe.yaml`; tests give other run folders with `run=`. The text, 600 pairs
    and 20 for each of validation and test, has simple sentences in English and German."""
    from deepnmt.config import load_recipe
    from deepnmt.data.prepare import prepare

    folder = tmp_path_factory.mktemp("prepared")
    shutil.copytree(ROOT / "tests" / "fixtures" / "text", folder / "text")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder), encoding="utf-8")
    prepare(load_recipe(recipe))
    return folder


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout."""
    return build(tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment in which deepnmt is installed from the wheel."""
    return make_environment(tmp_path_factory.mktemp("installed"), wheel)


# Files that take 30 s or more, the longest first. A run ends with the names of those that are not here yet.
LONGEST = [
    "test_launchers", "test_help", "test_kill", "test_lost_nodes", "test_launcher", "test_torchrun", "test_engines",
    "test_foreign_files", "test_erasure", "test_dry_gpu", "test_wheel", "test_guide", "test_pipeline", "test_readme",
    "test_resume_anywhere", "test_faults_of_saves", "test_failing_disk", "test_random_kills",
    "test_nodes_that_differ", "test_demo", "test_steps", "test_tutorial", "test_serving", "test_diagnose",
    "test_notebook", "test_admin_profile", "test_layout_change", "test_heartbeat", "test_process_group",
    "test_training", "test_second_task", "test_offload", "test_optimizers", "test_divergence", "test_gather",
    "test_export", "test_compiled_layers", "test_kernels", "test_guided_alignment", "test_seeded_faults",
    "test_compare_blocks", "test_imports", "test_lm_layouts", "test_update_tokens", "test_block_engines",
    "test_recipes", "test_coordinates", "test_fine_tuning", "test_block_models",
]
_LONG = 30.0


# Beside the core: visitors, other tasks than translation, machines of a cluster, launchers.
BESIDE = ("extras", "tasks", "nodes", "processes/test_launcher.py", "processes/test_torchrun.py")
# What starts processes: fixtures, and names that a test file has imported.
STARTS = {"warm", "installed", "wheel", "tool", "study", "subprocess", "run_on_ranks", "Warm"}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """A quarter of the time in which all tests were imported went into 21 searches for garbage. The 700,000 objects
    that are there in the end stay, so no later search goes through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first, so that no worker is left alone with one at the end.

    Marks as quick what starts no process and is in none of these files, and as slow what works from a wheel, starts
    processes beside the core, or is of a study or a GPU. The core's slow tests are marked where they stand.
    """
    items.sort(key=lambda item: (*LONGEST, item.path.stem).index(item.path.stem))
    for item in items:
        assert isinstance(item, pytest.Function)
        place = item.path.relative_to(ROOT / "tests").as_posix()
        quick = item.path.stem not in LONGEST and not STARTS & {*item.fixturenames, *vars(item.module)}
        if quick:
            item.add_marker("quick")
        starts_beside_the_core = not quick and (
            place.startswith(BESIDE) or bool({"wheel", "installed"} & {*item.fixturenames}))
        if starts_beside_the_core or place.startswith(("studies", "gpu")):
            item.add_marker("slow")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """After a run of most tests, names the files that belong into `LONGEST`."""
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[Path(report.location[0]).stem] += report.duration
    for name, taken in seconds.most_common():
        if taken >= _LONG and name not in LONGEST and len(seconds) > 100:
            terminalreporter.line(f"{name} took {taken:.0f} s: LONGEST in tests/conftest.py should name it")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """PyTorch draws the same in a test whatever has run before it."""
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def pictures() -> None:
    """None of runs in this process. Tests of pictures have imported what draws them by now."""
    without_pictures()


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Starts processes that have everything imported."""
    server = Warm()
    yield server
    server.close()


@pytest.fixture(scope="session")
def tool() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `tools/NAME.py` with arguments as a user would, and returns what it said."""
    return lambda name, *arguments, **env: _said([str(ROOT / "tools" / f"{name}.py"), *map(str, arguments)], env)


@pytest.fixture(scope="session")
def study() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python -m studies NAME` with arguments, and returns what it said."""
    return lambda name, *arguments, **env: _said(["-m", "studies", name, *map(str, arguments)], env)


def _said(words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600, check=False, cwd=ROOT,
                          env={**os.environ, **env})


@pytest.fixture
def threads() -> Iterator[None]:
    """Commands take the machine's cores; here they run beside other tests."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], threads: None) -> Refused:
    """Runs a command that must be refused, and returns what the user reads."""

    def run(command: str, *arguments: object) -> str:
        from deepnmt import cli
        from studies import __main__ as studies

        code = (studies if command in studies.STUDIES else cli).main(command, [str(word) for word in arguments])
        said = capsys.readouterr()
        assert code == 2, said.err
        assert "deepnmt: " in said.err and "Traceback" not in said.err + said.out
        return said.err

    return run
