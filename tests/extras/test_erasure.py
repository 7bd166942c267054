"""The erasure test: a visitor, a folder of deepnmt/extras, or a task, a folder of deepnmt/tasks other than translation,
can be deleted without the core noticing.

Each is deleted from a copy of the package, and once all of them. Then every module imports, and `deepnmt --help` lacks
the visitor's commands alone. Where all are gone, tests of the core pass, and all of them import: what the core needs of
one visitor is missing there, too. No file of the core holds a word of a visitor.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRAS, TASKS = ROOT / "deepnmt" / "extras", ROOT / "deepnmt" / "tasks"
HOMES = {folder.name: folder for room in (EXTRAS, TASKS) for folder in room.iterdir()
         if (folder / "__init__.py").is_file() and folder != TASKS / "translation"}
VISITORS = sorted(HOMES)
# Quick tests of the core: blocks, learning rates, the search, and recipes.
CORE = ["tests/model/test_blocks.py::test_block_follows_its_formula", "tests/optim/test_optim.py::test_learning_rate",
        "tests/decode/test_search.py::test_length_penalties_by_hand",
        "tests/config/test_config.py::test_each_fault_has_its_message"]


def commands_of(visitor: str) -> set[str]:
    """The names in the table `COMMANDS` of a visitor's module `commands`, read without importing it."""
    file = HOMES.get(visitor, TASKS / visitor) / "commands.py"
    if not file.is_file():
        return set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "COMMANDS":
            assert isinstance(node.value, ast.Dict)
            return {ast.literal_eval(key) for key in node.value.keys if key is not None}
    raise AssertionError(f"{file} has no COMMANDS")


def listed(said: str) -> set[str]:
    """The commands in the text of `deepnmt --help`."""
    return set(re.findall(r"^  ([a-z-]+) +\S", said.split("Exit codes:")[0], flags=re.MULTILINE))


@pytest.fixture(scope="module")
def erased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each copy, `without-VISITOR` and `without-all`, and `with-all`. A copy has what Python has compiled
    already (its files are as old as the checkout's), but nothing that another process is just writing."""
    folder = tmp_path_factory.mktemp("erased")
    for name, gone in {"with-all": [], "without-all": VISITORS, **{f"without-{v}": [v] for v in VISITORS}}.items():
        copy = folder / name
        copy.mkdir()
        for part in ("deepnmt", "tests", "studies") if name == "without-all" else ("deepnmt",):
            shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=shutil.ignore_patterns("*.pyc.*"))
        for part in ("docs", "recipes", "ds_configs", "setup.cfg", "pyproject.toml"):
            (copy / part).symlink_to(ROOT / part)
        for visitor in gone:
            home = HOMES[visitor].relative_to(ROOT / "deepnmt")
            shutil.rmtree(copy / "deepnmt" / home)
            shutil.rmtree(copy / "tests" / home, ignore_errors=True)
    environment = {**os.environ, "PYTHONPATH": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, ROOT / "tests" / "support" / "erasing.py", folder, *CORE], cwd=folder,
                   env=environment, timeout=1700, check=True)
    return folder


@pytest.mark.parametrize("visitor", [*VISITORS, "all"])
def test_the_core_does_not_notice(visitor: str, erased: Path) -> None:
    said = (erased / f"without-{visitor}" / "said.txt").read_text(encoding="utf-8")
    assert (erased / f"without-{visitor}" / "code.txt").read_text() == "0", said
    everything = listed((erased / "with-all" / "said.txt").read_text(encoding="utf-8"))
    going = set(VISITORS) if visitor == "all" else {visitor}
    stay = set().union(*map(commands_of, {*VISITORS, "translation"} - going))  # another task may have it, too
    gone = set().union(*map(commands_of, going)) - stay - {"new"}  # which the core has, too
    assert gone <= everything and listed(said) == everything - gone
    if visitor == "all":
        assert re.search(r"^\d{3,} passed", said, flags=re.MULTILINE) and "failed" not in said, said


def test_the_tests_of_the_core_need_no_visitor(erased: Path) -> None:
    said = (erased / "without-all" / "collected.txt").read_text(encoding="utf-8")
    assert (erased / "without-all" / "collected_code.txt").read_text() == "0", said
    assert re.search(r"^\d{3,} tests collected", said, flags=re.MULTILINE), said


# Words of each visitor, by which a file of the core would show that it knows it.
WORDS = {
    "alignment": r"guided|alignments?\b|pharaoh",
    "demo": r"deepnmt demo|grammar\b|make_corpus|extras\.demo",
    "doctor": r"doctor|diagnos",
    "export": r"ctranslate2|hugging ?face|onnx|deepnmt export|deepnmt fold\b",
    "fetch": r"mtdata|deepnmt get\b|fetch_texts",
    "check_cluster": r"check[-_]cluster",
    "classify": r"classif|matthews",
    "masked_lm": r"masked_lm|masked language|masking|<mask>",
    "language_model": r"language_model\b|perplexity\.json|deepnmt sample\b",
    "kernels": r"extras[./]kernels|philox|packed_attention|has_kernels|_kernel\b|triton\.jit",
    "modify": r"data\.modify|typos|extras[./]modify",
    "outside_metrics": r"outside_metrics",
    "report": r"deepnmt report\b|report\.html|write_report|extras[./]report",
    "serve": r"uvicorn|starlette|deepnmt serve|prometheus",
    "speech": r"filter ?banks?|soundfile|spec_?augment",
    "trackers": r"wandb|mlflow|trackers",
    "tune": r"deepnmt tune\b|extras[./]tune",
}
# Settings that recipes and checkpoints of users have keep their names, their descriptions and their checks.
SETTINGS = {"config/sections.py", "config/recipe.schema.json"}
# Other files of the core that hold such a word, and why.
_OF_SEARCH = "alignments that a search puts out come from any model's attention, trained with them or not"
ALLOWED = {
    "alignment": dict.fromkeys(("decode/align.py", "decode/translate.py", "commands/options.py",
                                "tasks/translation/commands.py"), _OF_SEARCH),
    "trackers": {"parallel/ds_config.py": "DeepSpeed itself imports an installed mlflow, which takes a second"},
}


@pytest.mark.parametrize("visitor", WORDS)
def test_no_file_of_the_core_holds_a_word_of_a_visitor(visitor: str) -> None:
    files = [file for file in (ROOT / "deepnmt").rglob("*") if file.suffix in (".py", ".json", ".html")
             and not {EXTRAS, *HOMES.values()} & {*file.parents} and (ROOT / "recipes") not in file.resolve().parents]
    words = re.compile(WORDS[visitor], re.IGNORECASE)
    holding = {str(file.relative_to(ROOT / "deepnmt")) for file in files if words.search(file.read_text("utf-8"))}
    assert len(files) > 80 and visitor in VISITORS
    assert holding - SETTINGS == set(ALLOWED.get(visitor, ()))
    assert any(words.search(file.read_text("utf-8")) for file in HOMES[visitor].rglob("*.py"))


def test_every_visitor_has_words() -> None:
    assert set(WORDS) == set(VISITORS)


def test_contributing_lists_every_visitor_and_task() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [name for name in VISITORS if not re.search(rf"`{name}/?`", page)] == []
