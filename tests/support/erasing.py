"""Examines copies of deepnmt that lack some visitors: the program that tests/project/test_erasure.py starts.

`python tests/support/erasing.py FOLDER TESTS...` imports the libraries once, and forks for each copy, a folder in
FOLDER. What its process said is then in its `said.txt`, the exit code in its `code.txt`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import sys
import traceback
from pathlib import Path

LIBRARIES = ("torch", "torch.distributed", "deepspeed", "transformers", "ctranslate2", "onnx", "onnxruntime",
             "matplotlib.pyplot", "pydantic", "sacrebleu", "sentencepiece", "pytest")


def examine(copy: Path, tests: list[str]) -> int:
    """Imports every module, prints the help, and runs tests, all of this copy."""
    os.chdir(copy)
    sys.path[:0] = [str(copy), str(copy / "tests" / "support")]
    import deepnmt

    assert Path(deepnmt.__file__).parent == copy / "deepnmt", deepnmt.__file__
    for module in pkgutil.walk_packages(deepnmt.__path__, "deepnmt."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    from deepnmt.cli import main

    assert main(None, ["--help"]) == 0
    import pytest

    return int(pytest.main(tests))


def fork(copy: Path, tests: list[str]) -> int:
    """`examine` in a process of its own; returns its exit code."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code = 1
    try:
        with (copy / "said.txt").open("w", encoding="utf-8") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            try:
                code = examine(copy, tests)
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
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        (folder / "code.txt").write_text(str(fork(folder, sys.argv[2:])))
