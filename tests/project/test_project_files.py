"""Files that a repository host reads are valid, and the files that CONTRIBUTING.md and SECURITY.md name exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import deepnmt

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def tree(name: str) -> dict[str, Any]:
    content = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def test_the_citation_is_of_this_version() -> None:
    citation = tree("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == deepnmt.__version__
    assert all(work["authors"] and work["title"] for work in citation["references"])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_an_issue_form_has_required_fields(form: Path) -> None:
    fields = [field for field in tree(str(form))["body"] if field["type"] != "markdown"]
    assert tree(str(form)).keys() >= {"name", "description", "body"}
    assert any(field.get("validations", {}).get("required") for field in fields)
    names = [field["id"] for field in fields]
    assert names and len(set(names)) == len(names) and all(field["attributes"]["label"] for field in fields)


def test_the_workflow_runs_a_target_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    steps = tree(".github/workflows/check.yml")["jobs"]["check"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    assert "make check" in commands
    assert [word for command in commands for word in command.split()[1:] if word not in targets] == []


def test_hooks_are_the_tools_of_make_lint() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    hooks = [hook for repo in tree(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    called = {Path(hook["entry"].split()[0]).name for hook in hooks}
    assert called == set(re.findall(r"\$\(BIN\)/([a-z-]+)", makefile.partition("lint:")[2].partition("\n\n")[0]))


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names, and so do processes that tests start."""
    names = [file.name for file in (ROOT / "tests").rglob("*.py") if file.name != "conftest.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_a_changed_file_names_its_tests() -> None:
    """`make changed`: the table's paths and tests exist, and a file's room is found from its path."""
    spec = importlib.util.spec_from_file_location("changed", ROOT / ".ci" / "changed.py")
    assert spec and spec.loader
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    named = [*changed.TESTS, changed.REST, *(test for tests in changed.TESTS.values() for test in tests.split())]
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert changed.tests_of("deepnmt/optim/schedules.py") == {"tests/optim", "tests/parallel/test_optimizers.py"}
    assert "tests/extras/serve" in changed.tests_of("deepnmt/extras/serve/page.html")
    assert changed.tests_of("deepnmt/steps.py") == {"tests/cli"}
    assert changed.tests_of("tests/data/test_text.py") == {"tests/data/test_text.py"}
    assert changed.tests_of("tests/extras/kernels/rows.py") == {"tests/extras/kernels"}
    assert changed.tests_of("Makefile") == {changed.REST}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    folders = "deepnmt|tests|docs|recipes|tools|studies"
    named = [*re.findall(rf"((?:{folders})/[\w./-]*\w)", text), *re.findall(r"\]\((?!http)([^)#]+)", text)]
    files = [name for name in named if not name.endswith("/X")]
    assert files and [name for name in files if not (ROOT / name).exists()] == []
