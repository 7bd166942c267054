"""Language models from text files to perplexities: texts, blocks, training, scores, samples, faults as sentences."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from refusals import Refused, contents
from small_disk import small_disk
from small_text import ROOT, recipe, tree, write_texts
from torch.nn import functional as F

from deepnmt.cli import main
from deepnmt.config import load_recipe
from deepnmt.data.examples import ExampleStream
from deepnmt.data.vocab import Vocabulary
from deepnmt.errors import UserError
from deepnmt.evaluate.evaluate import text_name
from deepnmt.files import read_log
from deepnmt.steps import run_steps
from deepnmt.tasks.language_model.model import continue_text, load, score_stream, token_scores
from deepnmt.tasks.language_model.text import Blocks, PreparedText, blocks_of, texts_of
from deepnmt.tokens import EOS, PAD

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts and a run of 60 updates, which has learned some."""
    folder = tmp_path_factory.mktemp("trained")
    write_texts(folder)
    file = folder / "lm.yaml"
    file.write_text(yaml.safe_dump(tree(folder, train={"updates": 60, "validate_every": 30, "save_every": 30})))
    assert main("prepare", [str(file)]) == 0 and main("train", [str(file), "--dry-run"]) == 0
    assert main("train", [str(file)]) == 0 and main("average", [str(folder / "run")]) == 0
    return folder


def test_it_learns_and_tells_how_well(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Validation, evaluate and score agree, and the text has less than it had at first."""
    valid = [record for record in read_log(trained / "run" / "log.jsonl") if record["type"] == "valid"]
    assert valid[-1]["word_perplexity"] < valid[0]["word_perplexity"] < 16
    counts = PreparedText.open(recipe(trained)).counts("valid")
    text = (trained / "valid.txt").read_text()
    assert counts["bytes"] == len(text.encode()) and counts["words"] == len(text.split()) + text.count("\n")
    assert valid[-1]["bits_per_byte"] == pytest.approx(
        counts["tokens"] * math.log2(valid[-1]["perplexity"]) / counts["bytes"])
    run = str(trained / "run")
    assert main("evaluate", [run, "--test", "valid", "--checkpoint", "newest"]) == 0
    found = json.loads((trained / "run" / "perplexity-update-00000060-valid.json").read_text())["texts"]["valid"]
    for name in ("word_perplexity", "bits_per_byte", "perplexity"):
        assert found[name] == pytest.approx(valid[-1][name], rel=1e-5)
    assert main("evaluate", [run, "--context", "12"]) == 0
    assert [file.name for file in (trained / "run").glob("perplexity*2.json")] == ["perplexity-context_12.json"]
    table = capsys.readouterr().out.splitlines()
    assert table[-1].split()[:2] == ["held", f"{PreparedText.open(recipe(trained)).counts('test.held')['words']:,}"]
    lines, scores = trained / "lines.txt", trained / "scores.jsonl"
    lines.write_text("the dog sees the cat .\ncat the the . sees dog\n", encoding="utf-8")
    assert main("score", [run, "--input", str(lines), "--output", str(scores), "--pieces"]) == 0
    good, bad = (json.loads(line) for line in scores.read_text().splitlines())
    assert good["score"] > bad["score"] and len(good["pieces"]) == 7
    assert sum(value for _, value in good["pieces"]) == pytest.approx(good["score"], abs=1e-4)


def test_another_text_is_measured_beside_the_runs_own(trained: Path) -> None:
    run, other = trained / "run", trained / "other"
    shutil.copytree(recipe(trained).data.folder, other)
    assert main("evaluate", [str(run), f"data.folder={other}"]) == 0
    assert [file.name for file in run.glob("perplexity*other.json")] == [f"perplexity-{text_name(str(other))}.json"]


def test_a_text_that_is_not_prepared_is_not_measured(trained: Path, tmp_path: Path, refused: Refused) -> None:
    """What was prepared under its name, or all that was, was measured instead. Moved texts, and none, are no others."""
    file, run, held = str(trained / "lm.yaml"), str(trained / "run"), Path(recipe(trained).data.test["held"].trg[0])
    valid, other = trained / "valid.txt", tmp_path / "held.txt"
    assert "data.test.new is not prepared in" in refused("evaluate", run, f"data.test.new={valid}")
    assert "data.test.held is another text than" in refused("evaluate", run, f"data.test.held={valid}")
    assert "data.valid is another text than" in refused("evaluate", file, "--test", "valid", f"data.valid={held}")
    for _ in range(2):  # the first time it is not there
        assert main("evaluate", [run, f"data.test.held={other}"]) == 0
        shutil.copy(held, other)
    assert main("prepare", [file, f"data.folder={tmp_path / 'new'}", f"data.test.held={valid}"]) == 0
    assert main("evaluate", [run, f"data.folder={tmp_path / 'new'}"]) == 0


def test_scores_appear_when_all_are_there(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, scores = tmp_path / "lines.txt", tmp_path / "scores.txt"
    lines.write_text("the dog\n" * 2, encoding="utf-8")
    scores.write_text("earlier ones", encoding="utf-8")
    first = iter(["a piece"])
    monkeypatch.setattr(Vocabulary, "to_pieces", lambda _, ids: [next(first) for _ in ids[:1]] * len(ids))
    with pytest.raises(StopIteration):  # at the second line
        main("score", [str(trained / "run"), "--input", str(lines), "--output", str(scores), "--pieces"])
    assert scores.read_text(encoding="utf-8") == "earlier ones" and len(list(tmp_path.iterdir())) == 2


def test_a_sample_is_fixed_by_its_seed_and_drawn_from_the_model(trained: Path, capsys: pytest.CaptureFixture[str]
                                                                ) -> None:
    words = [str(trained / "run"), "--prompt", "the dog", "--tokens", "6", "--count", "2"]
    said = []
    for more in ([], ["parallel.device=cpu"], ["seed=4"]):
        assert main("sample", [*words, *more]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2] and said[0].startswith("the dog")
    assert main("sample", [*words, "--prompt", "the dog .\nthe dog"]) == 0
    assert capsys.readouterr().out.startswith("the dog .\nthe dog")
    loaded = load(trained / "run", CPU)
    prompt = loaded.vocab.encode("the dog")
    drawn = np.array(continue_text(loaded.model, prompt, 3000, 1, 1)).ravel()
    hidden = loaded.model.decode(torch.tensor([[EOS, *prompt]]), None, None)[0, -1]
    p = loaded.model.log_probabilities(hidden).exp().detach().numpy()
    p[[0, 1, PAD]] = 0
    hot = np.array(continue_text(loaded.model, prompt, 3000, 1, 1, 3.0)).ravel()
    for sample, power in ((drawn, 1), (hot, 1 / 3)):
        shares = np.bincount(sample, minlength=loaded.vocab.size) / len(sample)
        assert np.abs(shares - p**power / (p**power).sum()).max() < 0.03
    for alone in ({"top_k": 1}, {"top_p": 1e-9}):
        assert continue_text(loaded.model, prompt, 2, 1, 1, **alone) == [[int(p.argmax())]] * 2


def test_sliding_windows_are_brute_force(trained: Path) -> None:
    """2,000 tokens: each alone, after all that its window has before it."""
    loaded = load(trained / "run", CPU)
    tokens, _ = PreparedText.open(recipe(trained)).documents("train")
    tokens = np.asarray(tokens[:2000], dtype=np.int64)
    documents = np.array([0, 700, 2000])
    for window, context in ((48, 40), (24, 0), (40, 39)):
        ours = score_stream(loaded.model, tokens, documents, window, context, 960, CPU)
        step = window - context
        given, places = [], []
        for begin, end in itertools.pairwise(documents.tolist()):
            for at in range(begin, end):
                counted = begin + (at - begin) // step * step
                first = max(begin, counted - context)
                before = [EOS, *tokens[first:at]] if first == begin else list(tokens[first - 1 : at])
                given.append(torch.tensor(before))
                places.append(at)
        padded = torch.nn.utils.rnn.pad_sequence(given, batch_first=True, padding_value=PAD)
        with torch.no_grad():
            hidden = torch.cat([loaded.model.decode(part, None, None) for part in padded.split(500)])
        last = hidden[torch.arange(len(given)), torch.tensor([len(each) - 1 for each in given])]
        theirs = F.linear(last, loaded.model.output_weight).log_softmax(-1)[range(len(given)), tokens[places]]
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-4, atol=2e-5)


def test_scores_are_the_loss(trained: Path) -> None:
    loaded = load(trained / "run", CPU)
    blocks = blocks_of(recipe(trained), PreparedText.open(recipe(trained)), "valid")
    batch = blocks.batch(range(4), 0, CPU)
    with torch.no_grad():
        nll = float(loaded.model(batch).nll)
    assert float(-token_scores(loaded.model, batch["trg_in"], batch["trg_out"]).sum()) == pytest.approx(nll, rel=1e-5)


@pytest.mark.parametrize("documents", [[0, 100], [0, 7, 31, 32, 100]])
def test_blocks_have_every_token_once_after_the_one_before(documents: list[int]) -> None:
    tokens = np.arange(4, 104)
    blocks = Blocks("train", tokens, np.array(documents), 9)
    stream = ExampleStream(blocks, 40, 1)
    for epoch in range(2):
        seen = []
        for index in range(stream.epoch_size(epoch)):
            batch = stream.batch(epoch, index, CPU)
            assert batch["trg_out"].numel() <= 40 and batch.tokens == int((batch["trg_out"] != PAD).sum())
            for given, target in zip(batch["trg_in"], batch["trg_out"], strict=True):
                kept = target[target != PAD].tolist()
                place = kept[0] - 4
                assert given[0] == (EOS if place in documents else kept[0] - 1)
                assert given[1 : len(kept)].tolist() == kept[:-1] and kept == list(range(kept[0], kept[0] + len(kept)))
                assert not any(place < border < place + len(kept) for border in documents)
                seen += kept
        assert sorted(seen) == tokens.tolist()
    orders = [ExampleStream(blocks, 40, seed).plan(epoch).order.tolist() for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    assert stream.plan(0).order.tolist() == orders[0] and len({tuple(order) for order in orders}) == 3


def test_a_text_is_one_stream_or_documents(tmp_path: Path) -> None:
    """What stands in the arrays is the text again."""
    write_texts(tmp_path)
    text = (tmp_path / "valid.txt").read_text()
    for apart in (False, True):
        made = recipe(tmp_path, data={"documents": apart, "folder": str(tmp_path / f"data-{apart}")})
        PreparedText.prepare(made)
        data = PreparedText.open(made)
        data.verify()
        tokens, documents = data.documents("valid")
        parts = [np.split(tokens[begin:end], np.flatnonzero(tokens[begin:end] == EOS) + 1)[:-1]
                 for begin, end in itertools.pairwise(documents.tolist())]
        again = ["".join(f"{data.vocab.decode(line[:-1].tolist())}\n" for line in lines) for lines in parts]
        assert "\n".join(again) == text and len(again) == (12 if apart else 1)
        before = {file.name: file.read_bytes() for file in data.folder.iterdir()}
        PreparedText.prepare(made)
        assert {file.name: file.read_bytes() for file in data.folder.iterdir()} == before


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_other_vocabularies(kind: str, tmp_path: Path) -> None:
    write_texts(tmp_path)
    made = recipe(tmp_path, vocab={"kind": kind, "size": 24}, data={"block": 32})
    PreparedText.prepare(made)
    data = PreparedText.open(made)
    assert data.vocab.kind == kind and data.counts("train")["unknown"] == 0
    given = recipe(tmp_path, vocab={"kind": kind, "model": str(data.folder)}, data={"folder": str(tmp_path / "again")})
    PreparedText.prepare(given)
    assert PreparedText.open(given).vocab.fingerprint == data.vocab.fingerprint


@pytest.mark.parametrize(("text", "said"), [
    ("a b\n\n\nc\n", r"train\.txt, line 3: a document is empty"),
    ("\na b\n", r"train\.txt, line 1: a document is empty"),
    ("", r"there is no text in .*train\.txt"), ("a\n\xff\n", r"train\.txt, line 2: not valid UTF-8")])
def test_faulty_texts(text: str, said: str, tmp_path: Path) -> None:
    write_texts(tmp_path)
    (tmp_path / "train.txt").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=said):
        PreparedText.prepare(recipe(tmp_path, data={"documents": True}))
    assert not (tmp_path / "data").exists()


def test_a_vocabulary_of_another_text(tmp_path: Path) -> None:
    write_texts(tmp_path)
    PreparedText.prepare(recipe(tmp_path))
    (tmp_path / "train.txt").write_text("ein Hund\nder Hund bellt\n" * 20, encoding="utf-8")
    with pytest.raises(UserError, match=r"train\.txt, line 1: the vocabulary has no piece of this line, and"):
        PreparedText.prepare(
            recipe(tmp_path, vocab={"model": str(tmp_path / "data")}, data={"folder": str(tmp_path / "new")}))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_vocabulary_without_the_letters_of_a_text(kind: str, tmp_path: Path) -> None:
    """It knows the space alone."""
    write_texts(tmp_path)
    settings = {"kind": kind, "size": 24}
    PreparedText.prepare(recipe(tmp_path, vocab=settings))
    (tmp_path / "train.txt").write_text("собака видит\nкошку\n" * 20, encoding="utf-8")
    given = recipe(tmp_path, vocab={**settings, "model": str(tmp_path / "data")}, data={"folder": str(tmp_path / "n")})
    with pytest.raises(UserError, match=r"train\.txt, line 1: the vocabulary has no piece of this line, and"):
        PreparedText.prepare(given)


def test_prepared_text_has_the_vocabulary_that_the_recipe_names(tmp_path: Path) -> None:
    write_texts(tmp_path)
    for size in (24, 26):
        PreparedText.prepare(recipe(tmp_path, vocab={"kind": "bpe", "size": size},
                                    data={"folder": str(tmp_path / f"data-{size}")}))
    made = [recipe(tmp_path, vocab={"kind": "bpe", "model": str(tmp_path / f"data-{size}")}) for size in (24, 26)]
    PreparedText.prepare(made[0])
    for use in (PreparedText.prepare, PreparedText.open):
        with pytest.raises(UserError, match=r"another vocabulary than .*data-26, which vocab\.model names"):
            use(made[1])


@pytest.mark.parametrize("folder", [False, True])
def test_nothing_of_the_users_is_replaced_by_a_folder(folder: bool, tmp_path: Path) -> None:
    write_texts(tmp_path)
    theirs = tmp_path / "data"
    if folder:
        theirs.mkdir()
        theirs /= "mine.txt"
    theirs.write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match=r"data holds no manifest\.json, so it is not prepared data"):
        PreparedText.prepare(recipe(tmp_path))
    assert theirs.read_text() == "mine"


@pytest.mark.parametrize(("changes", "said"), [
    ({"model": {"max_length": 16}}, r"data\.block \(24\) must not be above model\.max_length \(16\)"),
    ({"batch": {"tokens": 20}}, r"data\.block \(24\) must not be above batch\.tokens \(20\)"),
    ({"model": {"encoder": {"layers": 1}}}, "a language model is a decoder by itself"),
    ({"model": {"bands": [8, 30]}}, r"model\.bands \(\[8, 30\]\) must be below vocab\.size"),
    ({"model": {"bands": [8]}, "train": {"label_smoothing": 0.1}}, r"train\.label_smoothing .* needs one softmax"),
    ({"train": {"best_by": "bleu"}}, r"train\.best_by \(bleu\) is of translation"),
    ({"data": {"documents": "yes"}}, r"data\.documents: is 'yes'"),
    ({"data": {"src_lang": "de"}}, "data: src_lang is of pairs, src and trg; remove it"),
    ({"data": {"test": {"valid": ["a.txt"]}}}, r"data: test\.valid: evaluate calls the validation text so"),
    ({"metrics": {"comet": {"command": "x {hyp}"}}}, "metrics has no effect with task: language_model"),
])
def test_faulty_settings(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        recipe(tmp_path, **changes)


def test_commands_refuse_what_they_cannot_do(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, long = str(trained / "run"), trained / "long.txt"
    long.write_text("the dog .\n" + "the dog " * 40 + "\n", encoding="utf-8")
    for command, words, said in (
        ("evaluate", ["--checkpoint", "best", "--checkpoint", "newest"], "several --checkpoint are an ensemble"),
        ("evaluate", ["--context", "24"], r"--context is 24 and data\.block 24"),
        ("evaluate", ["--test", "held", "--test", "other"], "^deepnmt: --test other is not prepared; .* held, valid"),
        ("evaluate", ["--test", "held", "--test", "held"], "two of the test sets held, held have the same name"),
        ("score", ["--input", str(long)], r"long\.txt, line 2: has 81 tokens .* reads at most 48"),
        ("score", ["--input", str(long), "--output", str(long)], "is the input file itself; give another output"),
        ("sample", ["--tokens", "100"], "--prompt has 0 tokens, and --tokens is 100, but the model reads at most 48"),
        ("sample", ["--temperature", "0"], "give a temperature of 1e-6 to 1e6"),
        ("sample", ["--temperature", "nan"], "give a temperature of 1e-6 to 1e6"),
        ("sample", ["--temperature", "inf"], "give a temperature of 1e-6 to 1e6"),
        ("sample", ["--prompt", "\udcff"], r"--prompt is '\\udcff', which is not UTF-8"),
        ("score", ["train.updates=3"], "train.updates=3 has no effect here"),
        ("sample", ["model.decoder.layers=9"], "model.decoder.layers=9 has no effect here"),
        ("translate", [], "translate needs a model that was trained on pairs, but data.train of the recipe is a"),
        ("report", [], "run has task: language_model, but report shows translations beside their references"),
        ("diagnose", [], "the recipe has task: language_model, but the doctor's verdict was learned from translation"),
        ("profile", [], "task: language_model, whose ω are measured when a run begins"),
        ("get", [], "task: language_model, whose texts are not pairs"),
        ("fold", [], "holds a model of the task language_model, must be one of translation"),
        ("export", ["--to", "onnx"], "--to is 'onnx', must be one of huggingface"),
    ):
        assert main(command, [run, *words]) == 2
        assert re.search(said, capsys.readouterr().err), (command, words)


def test_recipes_are_listed_by_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("recipes", []) == 0
    listed = capsys.readouterr().out
    ours = listed[listed.index("task: language_model") :]
    assert "demo/admin_18l-18l" in listed.split("task: language_model")[0]
    for name in sorted((ROOT / "recipes").rglob("*.yaml")):
        if "task: language_model" in name.read_text(encoding="utf-8"):
            assert f"{name.parent.name}/{name.stem}" in ours




@pytest.mark.parametrize("apart", [True, False])
def test_a_recipe_for_a_text(apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is in one of three texts, documents whole; the recipe is for what the text is; run takes its steps."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    lines = (tmp_path / "train.txt").read_text().splitlines()
    text = tmp_path / "text.txt"
    text.write_text("\n".join(line for line in lines if line or apart) + "\n")
    assert main("new", ["my.yaml", "--text", str(text), "--machine", "cpu"]) == 0
    made = load_recipe("my.yaml")
    assert made.task == "language_model" and texts_of(made).documents == apart
    parts = [Path(f"data/my/text/{name}.txt").read_text() for name in ("train", "valid", "test")]
    assert sorted("".join(parts).split("\n\n" if apart else "\n")) == sorted(
        (text.read_text() + "\n" * apart).split("\n\n" if apart else "\n"))
    assert all(parts) and len(parts[0]) > 4 * len(parts[1])
    steps: list[list[str]] = []
    monkeypatch.setattr("deepnmt.steps.run_status", lambda run: SimpleNamespace(code=0))
    assert run_steps("my.yaml", made, [], lambda words: int(steps.append(words) is not None)) == 0
    assert [words[0] for words in steps] == ["prepare", "train", "average", "evaluate"]
    assert main("new", ["my.yaml", "--text", str(text)]) == 2 and main("new", ["my.txt", "--text", str(text)]) == 2
    assert main("new", ["other.yaml", "--text", str(tmp_path / "none.txt")]) == 2


def test_a_recipe_for_a_short_text_can_be_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its vocabulary had more pieces than the text gives, and two runs of 50 lines were held out of 130."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    lines = [line for line in (tmp_path / "train.txt").read_text().splitlines() if line][:130]
    Path("text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert main("new", ["my.yaml", "--text", "text.txt", "--machine", "cpu"]) == 0
    assert main("prepare", ["my.yaml"]) == 0
    made = load_recipe("my.yaml")
    assert PreparedText.open(made).vocab.size == made.vocab.size < 200
    assert len(Path("data/my/text/train.txt").read_text().splitlines()) > 100
    texts = [Path(f"data/my/text/{name}.txt").read_text() for name in ("valid", "train", "test")]
    words = [len(text.split()) + text.count("\n") for text in texts]  # a line's end counts as one
    share = float(re.findall(r"valid.txt # ([\d.]+)% of it", Path("my.yaml").read_text())[0])
    assert share == pytest.approx(100 * words[0] / sum(words), abs=0.051)


@pytest.mark.parametrize(("text", "said"), [
    ("a b\n" * 100, "text.txt has 100 lines, from which nothing can be held out; give 101 or more"),
    ("a b\n" * 60 + "\n" + "a b\n" * 60, "text.txt has 2 documents, too few to hold some out"),
    ("a b\n" * 60 + "\n\n" + "a b\n" * 60, "text.txt, line 62: two empty lines follow each other"),
])
def test_a_text_that_gives_no_recipe_leaves_nothing(text: str, said: str, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(text, encoding="utf-8")
    assert said in refused("new", "my.yaml", "--text", "text.txt", "--machine", "cpu")
    assert "the folders of data and run get the recipe's name" in refused("new", "a #b.yaml", "--text", "text.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    Path("text.txt").write_text("a b\n" * 101, encoding="utf-8")
    for file, most in (("my.yaml", 100), ("text.txt/my.yaml", 10**6)):
        with small_disk(most):
            said = refused("new", file, "--text", "text.txt", "--machine", "cpu")
        assert "cannot be written" in said and list(contents(tmp_path)) == ["text.txt"]
    assert main("new", ["my.yaml", "--text", "text.txt", "--machine", "cpu"]) == 0
