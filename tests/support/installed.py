"""deepnmt as its users have it: installed from a wheel, in a virtual environment without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = Path(str(distribution("torch").locate_file("")))
# Runs commands, one after the other, in one process, and tells by its exit code and last words which one failed.
DRIVER = """
import json, sys
from deepnmt.cli import main
for command, *words in json.loads(sys.argv[1]):
    if code := main(command, words):
        sys.exit(f"exit code {code}: {command} {words}")
"""


def build(folder: Path, kind: str) -> Path:
    """The wheel or the sdist of a copy of the checkout, since building one writes into it."""
    checkout = folder / "checkout"
    checkout.mkdir()
    for entry in ROOT.iterdir():
        if entry.is_file():
            shutil.copy(entry, checkout)
        elif entry.name in ("deepnmt", "docs", "ds_configs", "recipes", "studies", "tests", "tools"):
            shutil.copytree(entry, checkout / entry.name, symlinks=True,
                            ignore=shutil.ignore_patterns("__pycache__"))
    script = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    made = subprocess.run([sys.executable, "-c", script], cwd=checkout, capture_output=True, text=True,
                          check=True).stdout
    shutil.rmtree(checkout)
    return folder / made.split()[-1]


def make_environment(folder: Path, wheel: Path, only: Iterable[str] = ()) -> Path:
    """A virtual environment with the wheel and the libraries of this one; returns its folder of programs.

    Args:
        only: the packages that it has, with what they require, instead of all.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install(wheel, python)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    libraries = LIBRARIES
    if only:
        libraries = folder / "libraries"
        libraries.mkdir()
        for name in {name for package in required(only) for name in top_level(package)}:
            (libraries / name).symlink_to(LIBRARIES / name)
    # of a folder that a .pth file names no .pth is read, so that an editable deepnmt there stays out
    (site / "libraries.pth").write_text(f"{libraries}\n", encoding="utf-8")
    for program in ("deepspeed", "torchrun"):
        launcher = {"deepspeed": "deepspeed.launcher.runner", "torchrun": "torch.distributed.run"}[program]
        file = folder / "bin" / program
        file.write_text(f"#!{python}\nfrom {launcher} import main\nmain()\n", encoding="utf-8")
        file.chmod(0o755)
    return folder / "bin"


def required(packages: Iterable[str]) -> set[str]:
    """These packages and all that they require, without extras, as far as they are installed."""
    found: set[str] = set()
    waiting = list(packages)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        try:
            needs = map(Requirement, distribution(name).requires or ())
        except PackageNotFoundError:
            continue
        found.add(name)
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def top_level(package: str) -> set[str]:
    """The names of a package's files and folders in site-packages."""
    names = {file.parts[0] for file in distribution(package).files or ()}
    return {name for name in names if name not in ("..", "__pycache__") and (LIBRARIES / name).exists()}


def install(wheel: Path, python: Path, *options: str) -> None:
    """Installs the wheel alone for an interpreter, with pip's options."""
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps",
                    "--disable-pip-version-check", "--no-index", "--ignore-installed", *options, str(wheel)],
                   check=True)


def environment(programs: Path, home: Path | None = None, **more: str) -> dict[str, str]:
    """The variables of a new shell in which these programs are found first, as a user has them: HOME and PATH, and none
    that the suite or its machine sets, but the one that keeps threads without work from taking other tests' cores.

    Args:
        home: a folder for caches; without, one beside the programs.
        more: further variables, which the user sets.
    """
    home = home or programs.parent / "home"
    home.mkdir(exist_ok=True)
    return {"HOME": str(home), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_WAIT_POLICY": "passive",
            **more}
