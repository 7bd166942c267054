"""Input and output of the translation job: lines, formats, files."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from refusals import user_error

from deepnmt.data.text import read_lines
from deepnmt.decode.formats import WRITERS
from deepnmt.decode.translate import Hypothesis, one_line, open_output
from deepnmt.progress import show_progress

TEXT = "\ufeffein Haus\r\n\n  zwei\u2028Häuser \u0085\rx\nletzte"
LINES = ["ein Haus", "", "  zwei\u2028Häuser \u0085\rx", "letzte"]
BEST = [Hypothesis("ein Haus", -0.25, -0.75, 2, True, ["▁ein", "▁Haus"]), Hypothesis('"das"', -1.5, -3.0, 1, False)]


def test_only_newlines_end_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, packed = tmp_path / "text", tmp_path / "text.gz"
    plain.write_bytes(TEXT.encode())
    packed.write_bytes(gzip.compress(TEXT.encode()))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode()), encoding="latin-1"))
    assert list(read_lines(plain)) == list(read_lines(packed)) == list(read_lines(None)) == LINES


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "text").touch()
    assert list(read_lines(tmp_path / "text")) == []


@pytest.mark.parametrize(("name", "data", "message"), [
    ("text", "a\nb\nä\n".encode("latin-1"), "line 3: not valid UTF-8"),
    ("text.gz", gzip.compress("a\nä".encode("latin-1")), "line 2: not valid UTF-8"),
    ("text.gz", gzip.compress(b"a\n" * 999)[:-9], "is truncated after line"),
    ("text.gz", b"plain text\n", "not a valid .gz file"),
], ids=["plain", "packed", "cut", "not packed"])  # a .gz holds the time: two workers would not name it alike
def test_damaged_input_is_named(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with user_error(message) as fault:
        list(read_lines(tmp_path / name))
    assert str(tmp_path / name) in str(fault.value)


def test_missing_input_is_named(tmp_path: Path) -> None:
    with user_error("absent cannot be read: No such file"):
        list(read_lines(tmp_path / "absent"))


def test_records() -> None:
    assert WRITERS["text"].hypotheses(7, BEST) == "ein Haus\n"
    assert WRITERS["tsv"].hypotheses(7, BEST) == '7\t1\t-0.250000\tein Haus\n7\t2\t-1.500000\t"das"\n'
    line = WRITERS["jsonl"].hypotheses(7, BEST)
    assert line.endswith("\n")
    assert json.loads(line) == {"line": 7, "hypotheses": [
        {"text": "ein Haus", "score": -0.25, "log_prob": -0.75, "tokens": 2, "ended": True,
         "pieces": ["▁ein", "▁Haus"]},
        {"text": '"das"', "score": -1.5, "log_prob": -3.0, "tokens": 1, "ended": False, "pieces": []},
    ]}


def test_one_line() -> None:
    assert one_line("a\nb\r\nc\u2028d\u0085e\x0cf\tg\u00a0h") == "a b c d e f g\u00a0h"


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "out.de"
    with open_output(target) as out:
        out.write("Häuser\n")
        assert not target.exists()
    assert target.read_bytes() == "Häuser\n".encode()
    with pytest.raises(RuntimeError, match="killed"), open_output(target) as out:
        out.write("half\n")
        raise RuntimeError("killed")
    assert target.read_bytes() == "Häuser\n".encode()
    assert list(tmp_path.iterdir()) == [target]


def test_standard_output_is_utf8_and_stays_open(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with open_output(None) as out:
        out.write("Häuser\n")
    print("more", flush=True)
    assert capfdbinary.readouterr().out == "Häuser\nmore\n".encode()


def test_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with user_error(r"output .*absent/out\.de cannot be written: No such file"), \
            open_output(tmp_path / "absent" / "out.de"):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    with user_error("no space is left"), open_output(full) as out:
        out.write("x\n")
    with user_error("no space is left"), open_output(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "as a write to a full disk")
    assert list(tmp_path.iterdir()) == [full] and full.is_char_device()
    with full.open("w") as stdout, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stdout)
        with user_error("standard output cannot be written: no space is left"), open_output(None) as out:
            out.write("x\n")
        with suppress(OSError):
            stdout.close()


def test_output_to_links_fifos_and_devices(tmp_path: Path) -> None:
    null, fifo, link, target = (tmp_path / name for name in ("null", "fifo", "link", "target"))
    null.symlink_to("/dev/null")
    os.mkfifo(fifo)
    link.symlink_to("target")
    reader = subprocess.Popen(["cat", fifo], stdout=subprocess.PIPE)
    for output in (null, fifo, link, link):  # what the link leads to is made, then replaced
        with open_output(output) as out:
            out.write("Häuser\n")
    assert reader.communicate(timeout=60)[0] == target.read_bytes() == "Häuser\n".encode()
    assert null.is_symlink() and null.is_char_device() and fifo.is_fifo() and link.is_symlink()
    assert sorted(tmp_path.iterdir()) == sorted([null, fifo, link, target])


def test_nothing_is_written_through_a_planted_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("mine")
    (tmp_path / "out.part").symlink_to(victim)
    with open_output(out) as stream:
        stream.write("theirs")
    assert victim.read_text() == "mine" and out.read_text() == "theirs" and not out.is_symlink()
    monkeypatch.setattr("deepnmt.files.secrets.token_hex", lambda _: "guessed")
    (tmp_path / ".tmp-out-guessed").symlink_to(victim)
    with user_error("File exists"), open_output(out) as stream:
        stream.write("theirs")
    assert victim.read_text() == "mine"


def test_progress_in_a_log_is_rare_and_plain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with show_progress("{:,} lines translated") as progress:
        progress(10)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr("deepnmt.progress.PLAIN_SECONDS", 0.0)
        progress(1234)
    assert capsys.readouterr().err == "1,234 lines translated in 0 s\n"
