"""`deepnmt status`: a sentence and an exit code for every way in which a run can stand."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import pytest
from refusals import Refused

from deepnmt.cli import main


@pytest.mark.parametrize(("status", "code", "words"), [
    ({"status": "finished", "update": 5000, "seconds": 1.0}, 0, "is finished, at update 5,000, 5 min ago"),
    ({"status": "finished", "update": 7, "warning": "the encoder has collapsed"}, 0, "ago; the encoder has collapsed"),
    ({"status": "lost", "update": 7, "error": "no sign of life from rank 1 on n2 for 90 s"}, 1,
     "ended at update 7, 5 min ago: no sign of life from rank 1 on n2"),
    ({"status": "preempted", "update": 7, "signal": "SIGTERM", "cause": "by SIGTERM"}, 75,
     "was stopped by SIGTERM at update 7, 5 min ago, and saved; the same command resumes it"),
    ({"status": "failed", "update": 7, "error": "Diverged: 5 in a row"}, 2, "has failed at update 7, 5 min ago: Div"),
    ({"status": "running", "update": 7}, 1, "ended without saying so"),
    ("no JSON", 1, "ended without saying so, after its last word at an unknown update"),
    ([], 1, "ended without saying so"),
])
def test_what_a_run_says(
        status: object, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "STATUS.json"
    file.write_text(status if isinstance(status, str) else json.dumps(status))
    os.utime(file, (time.time() - 300,) * 2)
    assert main("status", [str(tmp_path)]) == code
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path} ") and words in said
    with (tmp_path / ".lock").open("w") as lock:
        lock.write("process 4711 on node1\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main("status", [str(tmp_path)]) == 3, "somebody trains there, whatever the file says"
        assert "is running: process 4711 on node1 trains there" in capsys.readouterr().out
    assert main("status", [str(tmp_path)]) == code, "the lock is free again"


def test_where_nothing_has_begun(tmp_path: Path, refused: Refused) -> None:
    assert "has no STATUS.json, so no training has begun there" in refused("status", tmp_path)
