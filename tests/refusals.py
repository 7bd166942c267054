"""What tests of mistakes share beside their fixtures."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from deepnmt.errors import UserError

Tool = Callable[..., "subprocess.CompletedProcess[str]"]
Refused = Callable[..., str]  # a command and its words; what the user reads


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def user_error(said: str) -> pytest.RaisesExc[UserError]:
    """Expects a user's mistake to be refused with a sentence in which the pattern is found."""
    return pytest.raises(UserError, match=said)
