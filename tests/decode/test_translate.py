"""The translation job over a saved model: files in, files out, one or several processes."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
import torch
from ranks import Gather, played
from refusals import user_error
from sacrebleu import sentence_chrf
from warm import Warm

from deepnmt import config
from deepnmt.checkpoint.checkpoint import LoadedModel, load_model
from deepnmt.data.text import arriving_lines
from deepnmt.decode import sharing, translate
from deepnmt.decode.models import cast_weights
from deepnmt.decode.steppers import CachedStepper
from deepnmt.decode.translate import Hypothesis, translate_files, translate_lines, translate_shards
from deepnmt.model.transformer import Transformer
from deepnmt.processes.process_group import processes
from studies.benchmarks.recomputing import RecomputingStepper

LINES = ["a dog sees the tree", "", "two cats", "the old red house is in the garden", " \t ", "birds", "a", "sing sing"]
SETTINGS = config.Translate(beam=3, max_ratio=1.0, max_extra=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model of one layer a side, with a vocabulary of 40 pieces."""
    return tiny_run.write(tiny_run.recipe_of(tmp_path_factory.mktemp("run")), 1, seed=2)


@pytest.fixture
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(checkpoint)


def expected(loaded: LoadedModel, settings: config.Translate = SETTINGS) -> list[list[Hypothesis]]:
    return translate_lines(loaded.model, loaded.vocabs, LINES, settings)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "in.en"
    file.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return file


def test_as_many_lines_out_as_in_and_in_order(
    checkpoint: Path, loaded: LoadedModel, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = translate_files(checkpoint, str(source), str(tmp_path / "out"), SETTINGS)
    out = (tmp_path / "out").read_text(encoding="utf-8").split("\n")
    assert out == [best[0].text for best in expected(loaded)] + [""]
    assert [bool(line) for line in out[:-1]] == [bool(line.strip()) for line in LINES]
    assert written == len(LINES)
    assert "8 lines in " in capsys.readouterr().err


def test_gz_and_standard_streams_give_the_same_output(
    checkpoint: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = source.read_bytes()
    packed = tmp_path / "in.gz"
    packed.write_bytes(gzip.compress(data))
    for name in (source, packed):
        translate_files(checkpoint, str(name), str(tmp_path / "out"), SETTINGS)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        capsys.readouterr()
        translate_files(checkpoint, "-", "-", SETTINGS)
        assert capsys.readouterr().out.encode() == (tmp_path / "out").read_bytes()


@pytest.mark.timeout(300, method="thread")  # it would wait for an answer
def test_a_pipe_is_answered_line_by_line(
    checkpoint: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each line is written once the answer to the one before it is there. Samples depend on the line's number."""
    settings = SETTINGS.model_copy(update={"method": "sample"})
    (questions, ask), (answer, answers) = os.pipe(), os.pipe()
    with (open(questions, encoding="utf-8") as stdin, open(answers, "w", encoding="utf-8") as stdout,
          open(answer, encoding="utf-8") as reader, ThreadPoolExecutor(1) as thread):
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("sys.stdout", stdout)
        done = thread.submit(translate_files, checkpoint, "-", "-", settings)
        said = []
        for text in ("a dog sees ", "the tree\n", "\n", "two cats\nthe old red house is in the garden\n",
                     " \t \nbirds\na\nsing sing"):
            os.write(ask, text.encode())
            said += [reader.readline() for _ in range(text.count("\n"))]
        os.close(ask)
        assert done.result() == 8
        said.append(reader.readline())
    assert said == [best[0].text + "\n" for best in expected(loaded, settings)]


def test_a_fault_in_a_pipe_follows_the_answers_before_it(tmp_path: Path) -> None:
    questions, ask = os.pipe()
    os.write(ask, "\ufeffein\u2028Haus\r\n\nmäh\n".encode() + b"\xff\nrest")
    texts = arriving_lines(questions, "standard input")
    assert next(texts) == ["ein\u2028Haus", "", "mäh"]
    with user_error("standard input, line 4: not valid UTF-8"):
        next(texts)
    os.close(ask)
    os.close(questions)


def test_nbest_lists(checkpoint: Path, loaded: LoadedModel, source: Path, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"nbest": 3})
    best = expected(loaded, settings)
    assert [len(hypotheses) for hypotheses in best] == [3, 1, 3, 3, 1, 3, 3, 3]
    translate_files(checkpoint, str(source), str(tmp_path / "out.tsv"), settings, output_format="tsv")
    rows = [line.split("\t") for line in (tmp_path / "out.tsv").read_text(encoding="utf-8").splitlines()]
    flat = [(n, r, h) for n, hs in enumerate(best, start=1) for r, h in enumerate(hs, start=1)]
    assert [(int(n), int(r), text) for n, r, _, text in rows] == [(n, r, h.text) for n, r, h in flat]
    assert [float(score) for _, _, score, _ in rows] == pytest.approx([h.score for _, _, h in flat], abs=1e-5)
    translate_files(checkpoint, str(source), str(tmp_path / "out.jsonl"), settings, output_format="jsonl")
    objects = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [o["line"] for o in objects] == list(range(1, 9))
    assert [[h["text"] for h in o["hypotheses"]] for o in objects] == [[h.text for h in hs] for hs in best]


@pytest.mark.parametrize("choose", ["mbr", "chrf"])
@pytest.mark.parametrize("method", ["beam", "sample"])
def test_candidates_are_chosen_as_a_plain_reference_does(choose: str, method: str, loaded: LoadedModel) -> None:
    """With SacreBLEU's chrF of every pair."""
    search = SETTINGS.model_copy(update={"method": method, "beam": 6})
    lists = expected(loaded, search.model_copy(update={"nbest": 6}))
    given = ["the dog", "", "cats", "a house", "", "bird", "a dog", "sings"]
    settings = search.model_copy(update={"candidates": 6, "choose": choose, "nbest": 2})
    chosen = translate_lines(loaded.model, loaded.vocabs, LINES, settings, references=given)
    for best, hypotheses, reference in zip(chosen, lists, given, strict=True):
        texts = [h.text for h in hypotheses]
        if not any(texts):
            continue
        against = texts if choose == "mbr" else [reference]
        values = {text: np.mean([sentence_chrf(text, [other]).score for other in against]) for text in texts}
        assert [h.score for h in best] == pytest.approx(sorted(values.values(), reverse=True)[:2], abs=1e-9)
        assert [values[h.text] for h in best] == pytest.approx([h.score for h in best], abs=1e-9)
    with user_error("translate.choose is chrf, against translations that are there already; name their file"):
        translate_lines(loaded.model, loaded.vocabs, LINES, settings.model_copy(update={"choose": "chrf"}))
    with user_error("translate.choose is mine, which only the commands translate and evaluate ask"):
        translate_lines(loaded.model, loaded.vocabs, LINES, settings.model_copy(update={"choose": "mine"}))
    for update in ({"nbest": 1, "choose": "mbr"}, {"nbest": 1, "choose": "score", "candidates": 1}):
        with user_error(f"references .no. have no effect because translate.choose is {update['choose']}"):
            translate_files(loaded.folder, "-", "-", settings.model_copy(update=update), references="no")


def test_a_batch_is_fitted_to_the_memory(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known beforehand, or found out at an error; the translations are the same."""
    sizes: list[int] = []

    class Small(CachedStepper):
        room = 3

        def __init__(self, model: Transformer, src: torch.Tensor, *rest: Any) -> None:
            if len(src) > self.room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            sizes.append(len(src))
            super().__init__(model, src, *rest)

    def found(stepper: Any = Small) -> list[str]:
        sizes.clear()
        translated = translate_lines(loaded.model, loaded.vocabs, LINES, SETTINGS, stepper=stepper)
        return [best[0].text for best in translated]

    assert found() == found(CachedStepper) == [best[0].text for best in expected(loaded)]
    plain = found()
    assert max(sizes) == 3, "6 sentences at once are too many, halved they fit"
    longest = max(len(loaded.src_vocab.encode(line)) + 1 for line in LINES)
    steps = int(SETTINGS.max_ratio * longest) + SETTINGS.max_extra
    each = loaded.model.decoding_bytes(longest, min(steps, 300), SETTINGS.beam)
    monkeypatch.setattr(translate, "free_memory", lambda device: each * 2 / 0.9 + 1)
    assert found() == plain and sizes[0] == 2
    Small.room = 0
    with user_error(r"one line of .* tokens needs more memory than cpu has for it; set translate.beam \(3\) or "):
        found()


@pytest.mark.parametrize("settings", [
    {"max_ratio": 1e308, "max_extra": 2**17, "min_length": 2**17, "no_repeat_ngram": 2**17, "batch_tokens": 10**9},
    {"patience": 1e308}, {"patience": 1e-308, "finish": "best"}, {"alpha": 10.0, "length_penalty": "gnmt"},
    {"method": "sample", "temperature": 1e-6, "top_k": 10**6}, {"method": "sample", "temperature": 1e308},
    {"method": "sample", "top_p": 1e-308, "epsilon": 1 - 1e-16}, {"beam": 100, "nbest": 100}])
def test_extreme_settings_work(settings: dict[str, Any], loaded: LoadedModel) -> None:
    found = expected(loaded, config.Translate(**settings))
    assert len(found) == len(LINES) and all(found)


@pytest.mark.parametrize(("settings", "named"), [
    ({"beam": 5000}, "beam (5,000)"), ({"method": "mbr", "samples": 10**4}, "samples (10,000)"),
    ({"method": "sample", "nbest": 10**4}, "nbest (10,000)")])
def test_a_search_that_cannot_fit_is_refused_before_it_begins(
    settings: dict[str, Any], named: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine's kernel would end the process, where a GPU says that there is too little memory."""
    monkeypatch.setattr(translate, "free_memory", lambda device: 2.0**31)
    with user_error(f"one line of .* tokens needs more memory than cpu has for it; set translate.{re.escape(named)}"):
        expected(loaded, config.Translate(**settings))


def test_an_empty_file_gives_an_empty_file(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "in").touch()
    assert translate_files(checkpoint, str(tmp_path / "in"), str(tmp_path / "out"), SETTINGS) == 0
    assert (tmp_path / "out").read_bytes() == b""


def test_the_reference_decoder_gives_the_same_file(checkpoint: Path, source: Path, tmp_path: Path) -> None:
    translate_files(checkpoint, str(source), str(tmp_path / "cached"), SETTINGS)
    translate_files(checkpoint, str(source), str(tmp_path / "plain"), SETTINGS, stepper=RecomputingStepper)
    assert (tmp_path / "cached").read_bytes() == (tmp_path / "plain").read_bytes()


def test_bf16_weights_and_fp32_positions(checkpoint: Path, loaded: LoadedModel, source: Path, tmp_path: Path) -> None:
    """translate.precision=bf16 gives the same output as a model with bf16 weights."""
    settings = SETTINGS.model_copy(update={"precision": "bf16"})
    model = cast_weights(loaded.model, "bf16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    translate_files(checkpoint, str(source), str(tmp_path / "out"), settings)
    best = expected(loaded)
    assert (tmp_path / "out").read_text(encoding="utf-8") == "".join(h[0].text + "\n" for h in best)
    assert [h[0].score for h in best] != [h[0].score for h in expected(load_model(checkpoint))]


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
@pytest.mark.parametrize("method", ["beam", "sample", "mbr"])
def test_processes_share_the_lines(
    chunk: int, method: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes are simulated one after the other; each passes its bytes on chunk by chunk."""
    monkeypatch.setattr(sharing, "CHUNK", chunk)
    settings = SETTINGS.model_copy(update={"method": method})
    sent: list[list[bytes]] = [[], []]
    seen: list[int] = []

    def run(rank: int, gather: Gather) -> Iterator[list[Hypothesis]]:
        return translate_shards(loaded.model, loaded.vocabs, LINES, settings, played(rank, 3, gather),
                                progress=seen.append)

    for rank in (1, 2):
        assert list(run(rank, sent[rank - 1].append)) == []
    rounds = iter(range(len(LINES)))

    def collect(data: bytes) -> list[bytes]:
        turn = next(rounds)
        return [data, sent[0][turn], sent[1][turn]]

    seen.clear()
    together = list(run(0, collect))
    for ours, alone in zip(together, expected(loaded, settings), strict=True):
        assert [h.text for h in ours] == [h.text for h in alone]
        assert [h.score for h in ours] == pytest.approx([h.score for h in alone], abs=1e-5)
    assert seen == sorted(seen)
    assert seen[-1] == len(LINES)


SEARCHES = {"beam": SETTINGS.model_copy(update={"nbest": 2}),
            "mbr": SETTINGS.model_copy(update={"method": "mbr", "samples": 6, "nbest": 2})}


def translate_together(folder: str, source: str, target: str) -> None:
    """Runs on each rank."""
    with processes() as ranks:
        for name, settings in SEARCHES.items():
            written = translate_files(Path(folder), source, f"{target}.{name}", settings, output_format="jsonl",
                                      ranks=ranks)
            assert written == (len(LINES) if ranks.first else 0)


def test_two_processes_write_the_same_as_one(checkpoint: Path, source: Path, tmp_path: Path, warm: Warm) -> None:
    warm.run(2, "test_translate:translate_together", checkpoint, source, tmp_path / "two")
    for name, settings in SEARCHES.items():
        translate_files(checkpoint, str(source), str(tmp_path / "one"), settings, output_format="tsv")
        one = [line.split("\t") for line in (tmp_path / "one").read_text(encoding="utf-8").splitlines()]
        two = [json.loads(line) for line in (tmp_path / f"two.{name}").read_text(encoding="utf-8").splitlines()]
        flat = [(o["line"], rank, h["text"]) for o in two for rank, h in enumerate(o["hypotheses"], start=1)]
        assert flat == [(int(n), int(r), text) for n, r, _, text in one]


def test_impossible_requests_are_rejected_before_the_model_is_loaded(source: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "no model"
    with user_error(r"there is no input file .*absent"):
        translate_files(nowhere, str(tmp_path / "absent"), "-", SETTINGS)
    with user_error("is the input file itself"):
        translate_files(nowhere, str(source), str(source), SETTINGS)
    with user_error(r"translate\.nbest is 2, but the format text holds one"):
        translate_files(nowhere, str(source), "-", SETTINGS.model_copy(update={"nbest": 2}))
    with user_error("standard input reaches one process only, but 2 were started"):
        translate_files(nowhere, "-", "-", SETTINGS, ranks=played(0, 2))


def test_bad_text_leaves_no_output(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"a dog\n\xff\n")
    with user_error("line 2: not valid UTF-8"):
        translate_files(checkpoint, str(tmp_path / "in"), str(tmp_path / "out"), SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
