"""What tests of mistakes share beside their fixtures."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

Tool = Callable[..., "subprocess.CompletedProcess[str]"]
Refused = Callable[..., str]  # a command and its words; what the user reads


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])
