"""What the files here share: a command that must be refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from refusals import Refused

from deepnmt.cli import main


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
        code = main(command, [str(word) for word in arguments])
        said = capsys.readouterr()
        assert code == 2, said.err
        assert "deepnmt: " in said.err and "Traceback" not in said.err + said.out
        return said.err

    return run
