"""The journal of a translation: killed and taken up, in parts, refused for another text, model or search."""

from __future__ import annotations

import gzip
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from kills import kill_before
from peaks import begin_peak, peak
from refusals import user_error
from warm import Warm

from deepnmt import config
from deepnmt.data.parts import Part
from deepnmt.data.text import read_lines
from deepnmt.decode import sharing
from deepnmt.decode.journal import parts_folder
from deepnmt.decode.translate import in_step, translate_files, translate_shards

LINES = ["a dog sees the tree", "", "two cats", "the old red house is in the garden", " \t ", "birds", "a", "sing sing",
         "the house " * 400]
TEXT = "".join(f"{line} {number}\n" if line.strip() else f"{line}\n"
               for number, line in enumerate(LINES * 7, start=1))  # 63 lines
SETTINGS = config.Translate(beam=2, max_ratio=0.02, max_extra=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model of one layer a side, with a vocabulary of 40 pieces."""
    return tiny_run.write(tiny_run.recipe_of(tmp_path_factory.mktemp("run")), 1, seed=2)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "CHUNK", 4)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in").write_text(TEXT, encoding="utf-8")
    return tmp_path / "in"


def translate(checkpoint: str | Path, source: str | Path, target: str | Path, settings: config.Translate = SETTINGS,
              **more: Any) -> int:
    return translate_files(Path(checkpoint), str(source), str(target), settings, **more)


def translate_in_a_process(checkpoint: str, source: str, target: str, files: str) -> None:
    """Is killed when it has given that many files of the journal their names."""
    sharing.CHUNK = 4
    kill_before(int(files) + 1, f"{target}.parts", "os.rename")
    translate(checkpoint, source, target, alignments=f"{target}.links")


def test_what_a_kill_leaves_is_taken_up(
    checkpoint: Path, source: Path, tmp_path: Path, warm: Warm, small_chunks: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    translate(checkpoint, source, whole, alignments=f"{whole}.links")
    lines = whole.read_text(encoding="utf-8").split("\n")[:-1]
    assert len(lines) == 63 and all(not line for line, given in zip(lines, TEXT.split("\n")) if not given.strip())
    for count in (3, 13):  # the facts and a chunk of two files; then six more, and half of one that does not count
        warm.start(1, "test_journal:translate_in_a_process", checkpoint, source, out, count)
        assert warm.wait() == [-9] and not out.exists(), warm.said()
    sides = [len(list(parts_folder(out).glob(f"[0-9]*.{side}.*"))) for side in (0, 1)]
    assert sides == [8, 7], "it was killed between the outputs of a chunk"
    begun: list[int] = []
    share = sharing.share
    monkeypatch.setattr("deepnmt.decode.translate.share", lambda *all: (begun.append(all[-1]), share(*all))[1])
    translate(checkpoint, source, out, alignments=f"{out}.links")
    assert len(begun) == 16 - 7 and "chunks of lines are translated already" in capsys.readouterr().err
    assert out.read_bytes() == whole.read_bytes()
    assert Path(f"{out}.links").read_bytes() == Path(f"{whole}.links").read_bytes()
    assert not list(tmp_path.glob("*.parts"))


@pytest.mark.parametrize("output_format", ["text", "jsonl"])
def test_parts_give_the_output_of_one_call(
    output_format: str, checkpoint: Path, source: Path, tmp_path: Path, small_chunks: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Samples depend on the numbers of lines, and so does jsonl."""
    settings = config.Translate(method="sample", max_ratio=0.02, max_extra=4)
    packed = tmp_path / "in.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    translate(checkpoint, source, tmp_path / "whole", settings, output_format=output_format)
    for number in (3, 1, 2):
        assert not (tmp_path / "out").exists()
        translate(checkpoint, packed, tmp_path / "out", settings, part=Part(number, 3), output_format=output_format)
        assert ("part 3 of 3 is done; 11 of 16 chunks" in capsys.readouterr().err) == (number == 3)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    assert translate(tmp_path / "no model", packed, tmp_path / "out", settings, part=Part(1, 3)) == 0
    assert "out is there already; remove it" in capsys.readouterr().err
    with user_error("--part has no effect on standard output"):
        translate(checkpoint, packed, "-", settings, part=Part(1, 3))


def test_another_text_model_or_search_is_refused(
    checkpoint: Path, source: Path, tmp_path: Path, small_chunks: None
) -> None:
    out = tmp_path / "out"

    def refused(reason: str, *changed: Any, **more: Any) -> None:
        with user_error(reason):
            translate(*(changed or (checkpoint, source)), out, **more)

    translate(checkpoint, source, out, part=Part(1, 3))
    refused(r"out\.parts was begun with translate\.beam 2, but now it is 3",
            settings=SETTINGS.model_copy(update={"beam": 3}))
    refused("was begun with --format text, but now it is jsonl", output_format="jsonl")
    refused("was begun with --alignments False, but now it is True", alignments=f"{out}.links")
    refused("was begun with seed 1, but now it is 2", seed=2)
    other = tiny_run.write(tiny_run.recipe_of(tmp_path / "run"), 1, seed=3)
    refused("was begun by another model", other, source)
    source.write_text("an inserted line\n" + TEXT, encoding="utf-8")
    refused(r"chunk 1 of the text has changed since .*out\.parts holds its translation")
    source.write_text("".join(TEXT.splitlines(keepends=True)[:8]), encoding="utf-8")
    refused("chunk .* of the text has changed since")
    source.write_text(TEXT, encoding="utf-8")
    damaged = next(parts_folder(out).glob("00000003.0.*"))
    damaged.write_bytes(damaged.read_bytes() + b"x")
    refused(f"{re.escape(str(damaged))} is damaged; delete it, and give the same command again")
    damaged.unlink()
    facts = parts_folder(out) / "journal.json"
    begun = facts.read_bytes()
    facts.write_bytes(b"")  # as after a power failure
    refused("journal.json cannot be read .*; delete the folder to have all translated anew")
    facts.write_bytes(begun)
    smaller = SETTINGS.model_copy(update={"batch_tokens": 100})
    translate(checkpoint, source, out, smaller)  # how many are computed at once may change
    translate(checkpoint, source, tmp_path / "whole")
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_fault_keeps_what_is_done(checkpoint: Path, tmp_path: Path, small_chunks: None,
                                    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_bytes(b"a dog\n" * 4 + b"\xff\n")
    for _ in range(2):
        with user_error("line 5: not valid UTF-8"):
            translate(checkpoint, tmp_path / "in", tmp_path / "out")
        assert "1 chunks of lines are in" in capsys.readouterr().err
    with user_error(r"output .*absent/out cannot be written: there is no folder .*absent; make it"):
        translate(checkpoint, tmp_path / "in", tmp_path / "absent" / "out")
    with user_error(r"output .*absent/links cannot be written"):  # before anything is translated
        translate(tmp_path / "no model", tmp_path / "in", tmp_path / "out", alignments=str(tmp_path / "absent/links"))
    monkeypatch.setattr("os.access", lambda *_: False)  # to root a folder is always open
    with user_error(r"output .*/out cannot be written: there is no permission, or the disk is read-only"):
        translate(tmp_path / "no model", tmp_path / "in", tmp_path / "out")


def test_a_part_that_ends_early_leaves_the_others_their_folder(
    checkpoint: Path, source: Path, tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it or they have finished a chunk."""
    out, translations = tmp_path / "out", translate_shards

    def interrupt(*_: Any, **__: Any) -> Iterator[Any]:
        raise KeyboardInterrupt

    def while_another_ends(*arguments: Any, **more: Any) -> Iterator[Any]:
        monkeypatch.setattr("deepnmt.decode.translate.translate_shards", interrupt)
        with pytest.raises(KeyboardInterrupt):
            translate(checkpoint, source, out, part=Part(1, 2))
        monkeypatch.setattr("deepnmt.decode.translate.translate_shards", translations)
        return translations(*arguments, **more)

    monkeypatch.setattr("deepnmt.decode.translate.translate_shards", while_another_ends)
    translate(checkpoint, source, out, part=Part(2, 2))
    assert not out.exists()
    translate(checkpoint, source, out, part=Part(1, 2))
    translate(checkpoint, source, tmp_path / "whole")
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst", ".bz2"])
def test_the_name_says_how_the_output_is_compressed(
    suffix: str, checkpoint: Path, source: Path, tmp_path: Path, small_chunks: None
) -> None:
    written = []
    for name in ("out", f"out{suffix}", f"again{suffix}"):
        translate(checkpoint, source, tmp_path / name)
        written.append((tmp_path / name).read_bytes())
    assert written[1] == written[2] != written[0]
    assert list(read_lines(tmp_path / f"out{suffix}")) == written[0].decode().split("\n")[:-1]
    if suffix == ".xz":
        assert lzma.decompress(written[1]) == written[0]


def test_a_text_is_read_line_by_line(tmp_path: Path) -> None:
    """A million lines of two texts of 30 MB, in less memory than one of them has."""
    files = [str(tmp_path / name) for name in ("one", "other")]
    for file in files:
        Path(file).write_text("a line of thirty characters, ok\n" * 1_000_000, encoding="utf-8")
    before = begin_peak()
    chunks = sharing.in_chunks(in_step(*files))
    assert sum(map(len, chunks)) == 1_000_000
    assert peak() - before < 16_000  # KiB
    with open(files[1], "a", encoding="utf-8") as stream:
        stream.write("more\n")
    with user_error("one has 1000000 lines and .*other has 1000001; line N of one must belong to line N of the other"):
        next(in_step(*files))
