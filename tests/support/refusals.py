"""Helpers for tests of users' mistakes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from deepnmt.errors import UserError

Tool = Callable[..., "subprocess.CompletedProcess[str]"]
Refused = Callable[..., str]  # (command, arguments) -> the message to the user


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def user_error(pattern: str) -> pytest.RaisesExc[UserError]:
    """Expects a `UserError` whose message matches the pattern."""
    return pytest.raises(UserError, match=pattern)
