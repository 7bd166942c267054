"""Examines copies of deepnmt that lack some visitors: the program that tests/extras/test_erasure.py starts.

`python tests/support/erasing.py FOLDER TESTS...` imports the libraries once, and forks for each copy, a folder in
FOLDER. What its process said is then in its `said.txt`, the exit code in its `code.txt`. In the copy `without-all` the
TESTS are run, too. There all tests of the core are imported as well, and one that needs prepared data is run; see its
`collected.txt`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

LIBRARIES = ("torch", "torch.distributed", "deepspeed", "transformers", "ctranslate2", "onnx", "onnxruntime",
             "matplotlib.pyplot", "pydantic", "sacrebleu", "sentencepiece", "pytest")


# Tests of the core are all but those of visitors, other tasks and studies, and those of the distribution as a whole.
OTHERS = ("extras", "tasks", "studies", "project")
WITH_DATA = "tests/training/test_validate.py::test_bleu_is_that_of_the_target_language"


def enter(copy: Path) -> None:
    """Lets this process run the code of this copy."""
    os.chdir(copy)
    sys.path[:0] = [str(copy), str(copy / "tests" / "support")]


def collect(copy: Path) -> int:
    """Imports all tests of the core, and runs one that needs prepared data."""
    enter(copy)
    import pytest

    core = ["tests", *(f"--ignore=tests/{room}" for room in OTHERS)]
    return int(pytest.main(["--collect-only", *core])) or int(pytest.main([WITH_DATA]))


def examine(copy: Path, tests: list[str]) -> int:
    """Imports every module, prints the help, and runs tests if there are any, all of this copy."""
    enter(copy)
    import deepnmt

    assert Path(deepnmt.__file__).parent == copy / "deepnmt", deepnmt.__file__
    for module in pkgutil.walk_packages(deepnmt.__path__, "deepnmt."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    from deepnmt.cli import main

    assert main(None, ["--help"]) == 0
    import pytest

    return int(pytest.main(tests)) if tests else 0


def fork(work: Callable[[], int], output: Path) -> int:
    """Does something in a process of its own, which prints into a file; returns its exit code."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code = 1
    try:
        with output.open("w", encoding="utf-8") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            try:
                code = work()
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    for library in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    gc.freeze()  # else each process would go through all that, again and again
    everything_gone = Path(sys.argv[1]) / "without-all"
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        tests = sys.argv[2:] if folder == everything_gone else []
        code = fork(partial(examine, folder, tests), folder / "said.txt")
        (folder / "code.txt").write_text(str(code))
    code = fork(partial(collect, everything_gone), everything_gone / "collected.txt")
    (everything_gone / "collected_code.txt").write_text(str(code))
