"""What comes with a wheel, and what works in which environment."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import jsonschema
import pytest
import yaml
from installed import DRIVER, LIBRARIES, ROOT, build, environment, install, make_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deepnmt.cli import main
from deepnmt.shipped import schema_of, shipped_recipes, tasks_of_recipes

DEMO = ["demo", "--pairs", "200", "vocab.size=200", "model.width=16", "model.heads=2", "model.ffn=32",
        "model.encoder.layers=1", "model.decoder.layers=1", "train.updates=2", "train.save_every=1",
        "train.validate_every=2", "train.valid_sentences=2", "admin.tokens=256", "schedule.warmup=1", "data.workers=1",
        "translate.beam=1", "translate.max_ratio=1.0", "translate.max_extra=2"]
FIRST_HOUR, SERVING = ((ROOT / "docs/guide" / page).read_text(encoding="utf-8") for page in (
    "first_hour.md", "serving.md"))


def run(programs: Path, folder: Path, *words: object, program: str = "deepnmt") -> subprocess.CompletedProcess[str]:
    return subprocess.run([programs / program, *map(str, words)], capture_output=True, text=True, timeout=600,
                          check=False, cwd=folder, env=environment(programs))


def test_the_wheel_holds_every_recipe_and_configuration(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("recipes", "ds_configs"):
        files = [file for file in (ROOT / folder).rglob("*") if file.is_file()]
        assert files and {f"deepnmt/{file.relative_to(ROOT)}" for file in files} <= names
    ours = {str(file.relative_to(ROOT)) for file in (ROOT / "deepnmt").rglob("*") if file.is_file()}
    assert {name for name in ours if "__pycache__" not in name} <= names
    assert not any(name.startswith("tests/") for name in names)


@pytest.mark.slow
def test_the_source_distribution_has_tests_and_docs(tmp_path: Path) -> None:
    with tarfile.open(build(tmp_path, "sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/project/test_wheel.py", "tests/fixtures/run_of_0_1/recipe.yaml", "docs/index.md", "Makefile",
            "recipes/demo/admin_18l-18l.yaml", "studies/__main__.py", "constraints.txt"} <= names
    assert not any("__pycache__" in name for name in names)


def test_a_recipe_is_listed_copied_and_trained(installed: Path, tmp_path: Path, prepared: Path) -> None:
    tasks = tasks_of_recipes()
    listed: dict[str, str] = {}
    for part in run(installed, tmp_path, "recipes").stdout.split("task: ")[1:]:
        head, *lines = part.splitlines()
        listed |= {line.split()[0]: head.partition(",")[0] for line in lines}
    assert listed == tasks and len({*tasks.values()}) > 1
    done = run(installed, tmp_path, "copy", "demo/admin_18l-18l", "my/own.yaml")
    assert done.returncode == 0, done.stderr
    first, rest = (tmp_path / "my" / "own.yaml").read_text(encoding="utf-8").split("\n", 1)
    assert rest == (ROOT / "recipes/demo/admin_18l-18l.yaml").read_text(encoding="utf-8")
    schema = first.removeprefix("# yaml-language-server: $schema=")
    assert Path(schema).is_relative_to(installed.parent) and json.loads(Path(schema).read_text(encoding="utf-8"))
    done = run(installed, tmp_path, "copy", "multi30k/lm_4l", "my/lm.yaml")
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "my" / "lm.yaml").read_text(encoding="utf-8").partition("\n")[0]
    assert first.endswith("/deepnmt/tasks/language_model/recipe.schema.json")
    schema = first.removeprefix("# yaml-language-server: $schema=")
    assert Path(schema).is_relative_to(installed.parent) and json.loads(Path(schema).read_text(encoding="utf-8"))
    again = run(installed, tmp_path, "copy", "demo/admin_18l-18l", "my/own.yaml")
    assert again.returncode == 2 and "exists already" in again.stderr
    wrong = run(installed, tmp_path, "copy", "demo/admin_18l", "x.yaml")
    assert wrong.returncode == 2 and "did you mean demo/admin_18l-18l?" in wrong.stderr


@pytest.mark.parametrize(("option", "words", "said", "made"), [
    ("--target", ["train", "demo/admin_18l-18l", "--dry-run"], "memory per process", set()),
    ("--user", DEMO, "BLEU", {"data", "runs"})])
def test_other_ways_to_install(
    option: str, words: list[str], said: str, made: set[str], wheel: Path, installed: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip's --target needs PYTHONPATH; --user is for an interpreter outside of a virtual environment. The demo ends
    with a score in an empty folder; inside of one it runs in tests/extras/demo/test_demo.py."""
    env = environment(installed)
    if option == "--target":
        python = str(installed / "python")
        install(wheel, Path(python), "--target", str(tmp_path / "lib"))
        env |= {"PYTHONPATH": str(tmp_path / "lib")}
        home = tmp_path / "lib"
    else:
        python = str(Path(sys.executable).resolve())
        monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path / "user"))
        install(wheel, Path(python), "--user", "--break-system-packages")
        env |= {"PYTHONUSERBASE": str(tmp_path / "user"), "PYTHONPATH": str(LIBRARIES)}
        home = tmp_path / "user"
    (tmp_path / "empty").mkdir()
    script = f"import deepnmt; assert deepnmt.__file__.startswith({str(home)!r}), deepnmt.__file__; " \
             "from deepnmt.cli import main; import sys; sys.exit(main())"
    done = subprocess.run([python, "-c", script, *words], capture_output=True, text=True, timeout=600, check=False,
                          cwd=tmp_path / "empty", env=env)
    assert done.returncode == 0 and said in done.stdout, done.stderr
    assert {file.name for file in (tmp_path / "empty").iterdir()} == made


@pytest.mark.parametrize("name", list(shipped_recipes()))
def test_every_recipe_fits_the_schema(name: str) -> None:
    schema = json.loads(schema_of(tasks_of_recipes()[name]).read_text(encoding="utf-8"))
    tree = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8"))
    for key in ("lr", "eps"):  # 1e-8 is a text in YAML 1.1
        tree["optimizer"][key] = float(tree["optimizer"].get(key, 1e-8))
    jsonschema.validate(tree, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**tree, "trian": {}}, schema)


def test_translation_needs_the_listed_packages_alone(wheel: Path, prepared: Path, tmp_path: Path) -> None:
    """A run is trained here and used in an environment with the packages that the first hour's page lists."""
    lists = re.search(r"pip install --no-deps deepnmt-.*\n((?:pip install .*\\\n)?.*)\n", FIRST_HOUR)
    assert lists
    packages = lists[1].removeprefix("pip install ").replace("\\\n", " ").split()
    container, = re.findall(r"^FROM .*?^CMD", SERVING, re.MULTILINE | re.DOTALL)
    installed = re.findall(r"pip install --no-cache-dir (?!--no-deps)(.*?)(?= --index-url|\n [&C]|\nCOPY)", container,
                           re.DOTALL)
    needed = {*packages, "uvicorn", "starlette", "prometheus-client"}
    assert {*" ".join(installed).replace("\\\n", " ").split()} == needed
    programs = make_environment(tmp_path / "env", wheel, only=packages)
    for name in ("deepspeed", "tensorboard", "matplotlib"):
        assert "No module" in run(programs, tmp_path, "-c", f"import {name}", program="python").stderr
    tiny = ["train.updates=2", "train.save_every=1", "train.validate_every=2"]
    code = main("train", [str(prepared / "recipe.yaml"), f"run={tmp_path / 'run'}", *tiny])
    assert code == 0
    text = prepared / "text"
    (tmp_path / "pairs.tsv").write_text("the old dog\tder alte Hund\n", encoding="utf-8")
    lines = [["average", "run"], ["fold", "run"], ["translate", "run", "--input", str(text / "test.en")],
             ["evaluate", "run"], ["score", "run", "--input", "pairs.tsv"]]
    done = run(programs, tmp_path, "-c", DRIVER, json.dumps(lines), program="python")
    assert done.returncode == 0, done.stderr
    done = run(programs, tmp_path, "train", prepared / "recipe.yaml", "run=other", *tiny,
               "parallel.ds_config=ds_configs/zero1.json")
    assert done.returncode == 2 and "run pip install deepspeed" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


# Modules that need more than every installation has, and are imported where that is asked for.
OF_EXTRAS = {"extras/export/ctranslate2", "extras/export/searcher", "extras/export/huggingface", "extras/export/onnx",
             "extras/kernels/kernels", "extras/serve/app", "extras/serve/metrics", "extras/serve/server",
             "recipes/launch/prepare_with_dask"}


def packages_in(statements: Iterable[ast.AST]) -> set[str]:
    """The packages, other than Python's and deepnmt, that these statements import."""
    imported = {name.partition(".")[0] for node in statements
                for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                             [node.module or "deepnmt"] if isinstance(node, ast.ImportFrom) else [])}
    parts = {"pydantic_core", "h11"}  # of pydantic and of uvicorn
    return imported - sys.stdlib_module_names - parts - {"deepnmt"}


def test_every_package_that_is_imported_is_required(wheel: Path) -> None:
    """By the wheel's own list; what a requirement brings along counts only if it is listed. What the head of a module
    imports is required without any extra, and nothing is that no module imports."""
    with zipfile.ZipFile(wheel) as archive:
        modules = {name: ast.parse(archive.read(name)) for name in archive.namelist() if name.endswith(".py")}
        [metadata] = [archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA")]
    lines = re.findall("^Requires-Dist: (.*)$", metadata, re.M)
    required = {canonicalize_name(Requirement(line).name) for line in lines}
    always = {canonicalize_name(Requirement(line).name) for line in lines if "extra ==" not in line}
    distributions = {name: set(map(canonicalize_name, found)) for name, found in packages_distributions().items()}
    used: set[str] = set()
    for file, module in modules.items():
        everywhere, head = packages_in(ast.walk(module)), packages_in(module.body)
        used |= everywhere
        assert [name for name in everywhere if not distributions.get(name, {name}) & required] == [], file
        if file.removeprefix("deepnmt/").removesuffix(".py") not in OF_EXTRAS:
            assert [name for name in head if not distributions.get(name, {name}) & always] == [], file
    assert always <= {package for name in used for package in distributions.get(name, {name})}
