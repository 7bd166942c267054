"""Classifiers: the reader, scores, the model's formula, layouts, resuming, the commands, and users' mistakes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from refusals import Refused
from task_layouts import four_updates
from tiny_engines import parallel
from torch.nn import functional as F
from warm import Warm

from deepnmt.checkpoint.checkpoint import load_weights, newest_checkpoint, shapes_by_name
from deepnmt.cli import main
from deepnmt.config import Vocab, check_recipe, load_recipe
from deepnmt.data.vocab import Vocabulary, train_vocabulary
from deepnmt.model.init import fill
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.ranks import Ranks
from deepnmt.steps import run_steps
from deepnmt.tasks.classify.data import Row, open_examples, segment
from deepnmt.tasks.classify.metrics import count, interval, scores
from deepnmt.tasks.classify.model import build_of
from deepnmt.tasks.classify.settings import ClassifyRecipe
from deepnmt.tasks.classify.task import TASK, validate
from deepnmt.tokens import BOS, EOS
from deepnmt.training.state import TrainState

TEXT = Path(__file__).resolve().parents[2] / "fixtures" / "text"
LABELS = ["other", "same"]


def tree(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, dict[str, Any]] = {
        "data": {"train": str(folder / "train.tsv"), "valid": str(folder / "valid.tsv"), "labels": LABELS,
                 "columns": {"text": 1, "pair": 2, "label": 3}},
        "vocab": {"model": str(folder / "vocab.spm")},
        "batch": {"sentences": 8, "accumulation": 1},
        "model": {"width": 16, "heads": 2, "ffn": 24, "max_length": 128, "encoder": {"layers": 2, "block": "post_ln"},
                  "decoder": None},
        "optimizer": {"lr": 3e-3}, "schedule": {"name": "constant", "warmup": 0},
        "train": {"updates": 8, "log_every": 1, "validate_every": 4, "save_every": 4},
        "parallel": {"ds_config": None, "threads": 1},
    }
    for name, settings in sections.items():
        own[name] = {**own.get(name, {}), **settings}
    return {"run": str(folder / "run"), "seed": 3, "task": "classify", "average_last": 1, **own}


def recipe_in(folder: Path, **sections: dict[str, Any]) -> ClassifyRecipe:
    return cast(ClassifyRecipe, check_recipe(tree(folder, **sections), "test"))


def write(folder: Path, name: str = "recipe.yaml", **sections: dict[str, Any]) -> str:
    (folder / name).write_text(json.dumps(tree(folder, **sections)), encoding="utf-8")
    return str(folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of sentences, every second one the same sentence twice, and a vocabulary."""
    folder = tmp_path_factory.mktemp("classify")
    lines = (TEXT / "train.en").read_text(encoding="utf-8").splitlines()[:140]
    pairs = [f"{line}\t{line if n % 2 else lines[n - 1]}\t{LABELS[n % 2]}\n" for n, line in enumerate(lines)]
    (folder / "train.tsv").write_text("".join(pairs[:100]), encoding="utf-8")
    (folder / "valid.tsv").write_text("".join(pairs[100:]), encoding="utf-8")
    (folder / "vocab.spm").write_bytes(train_vocabulary(lines, Vocab(size=120)))
    return folder


@pytest.mark.parametrize("labels", [2, 3])
def test_scores_are_those_of_the_formulas(labels: int) -> None:
    """Against the definitions in five lines, as scikit-learn has them; of labels that are never found, too."""
    generator = np.random.default_rng(labels)
    for right, found in ((generator.integers(0, labels, 200), generator.integers(0, labels, 200)),
                         (np.zeros(5, dtype=int), np.zeros(5, dtype=int)),
                         (np.array([0, 1, 1, 0]), np.array([0, 0, 0, 0]))):
        tp, fp, fn = (np.array([np.sum(a & b) for a, b in zip(*sides, strict=True)]) for sides in (
            ([right == k for k in range(labels)], [found == k for k in range(labels)]),
            ([right != k for k in range(labels)], [found == k for k in range(labels)]),
            ([right == k for k in range(labels)], [found != k for k in range(labels)])))
        f1 = [2 * t / (2 * t + p + n) if t + p + n else 0.0 for t, p, n in zip(tp, fp, fn, strict=True)]
        x, y = (np.eye(labels)[each] - np.eye(labels)[each].mean(0) for each in (right, found))
        cov = {"xy": (x * y).sum(), "xx": (x * x).sum(), "yy": (y * y).sum()}
        scale = math.sqrt(cov["xx"] * cov["yy"])
        ours = scores(count(right, found, labels))
        assert ours["accuracy"] == pytest.approx(float((right == found).mean()))
        assert ours["f1"] == pytest.approx(f1[1] if labels == 2 else float(np.mean(f1)))
        assert ours["matthews"] == pytest.approx(cov["xy"] / scale if scale > 1e-12 else 0.0)


def test_the_interval_is_students() -> None:
    """Six values: t = 2.571 with 5 degrees of freedom."""
    values = [0.80, 0.82, 0.79, 0.85, 0.81, 0.83]
    mean, half = interval(values)
    assert mean == pytest.approx(np.mean(values))
    assert half == pytest.approx(2.571 * np.std(values, ddof=1) / math.sqrt(6))
    assert math.isnan(interval([0.5])[1])


def test_pairs_have_marks_and_segments(folder: Path) -> None:
    recipe = recipe_in(folder)
    data, vocab = open_examples(recipe), Vocabulary.load(folder / "vocab.spm")
    first = (folder / "valid.tsv").read_text().splitlines()[1].split("\t")
    a, b = vocab.encode(first[0]), vocab.encode(first[1])
    batch = data.valid.batch([1, 4], 7, torch.device("cpu"))
    size = len(a) + len(b) + 3
    assert batch["src"][0, :size].tolist() == [BOS, *a, EOS, *b, EOS] and batch["src_lengths"][0] == size
    assert batch["segments"][0, :size].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    assert batch["labels"].tolist() == [LABELS.index(first[2]), 0] and batch.tokens == 2
    stream = TASK.stream(recipe, data)
    sizes = [len(stream.update(TrainState().position, 13, 0, 1, torch.device("cpu")).batches[n]["labels"])
             for n in range(13)]
    assert sorted(sizes) == [4, *[8] * 12] and 0 < stream.waste(0) < 0.5


def test_a_mask_in_the_text_is_text(folder: Path) -> None:
    """The vocabulary of a masked language model has one."""
    lines = (TEXT / "train.en").read_text(encoding="utf-8").splitlines()[:140]
    vocab = Vocabulary(train_vocabulary(lines, Vocab(size=120), ["<mask>"]))
    rows = iter([Row("valid.tsv, line 1", ["<mask> a dog", "<mask>"], "same")])
    [sequence] = segment(recipe_in(folder), vocab, rows, "valid").sequences
    assert vocab.tags["<mask>"] not in sequence and len(sequence) > 10


def test_tables_with_names_and_json_lines_are_the_same(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "train.tsv").read_text().splitlines()
    (tmp_path / "a.tsv").write_text("\n".join(["one\ttwo\tis", *lines]) + "\n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text("".join(
        json.dumps(dict(zip(("one", "two", "is"), line.split("\t"), strict=True))) + "\n" for line in lines))
    columns = {"text": "one", "pair": "two", "label": "is"}
    found = [open_examples(recipe_in(folder, data={"train": str(tmp_path / name), "valid": str(tmp_path / name),
                                                   "columns": columns})) for name in ("a.tsv", "a.jsonl")]
    plain = open_examples(recipe_in(folder))
    assert [data.train.sequences for data in found] == [plain.train.sequences] * 2
    assert [data.train.labels.tolist() for data in found] == [plain.train.labels.tolist()] * 2


def test_loss_and_gradients_are_those_of_the_formula(folder: Path) -> None:
    recipe = recipe_in(folder, model={"dropout": 0.0, "attention_dropout": 0.0}, train={"head_dropout": 0.0})
    data = open_examples(recipe)
    build = build_of(recipe, data.vocab.size)
    model, generator = build(lambda part: None), torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator) / 3 for name, shape in shapes_by_name(build).items()}
    fill(model, weights.__getitem__)
    batch, w = data.valid.batch(range(len(data.valid)), 0, torch.device("cpu")), dict(model.named_parameters())
    src = batch["src"]
    x = w["embeddings.tokens.weight"][src] + w["encoder.input.positions.weight"][:src.size(1)]
    x = x + w["encoder.input.segments.weight"][batch["segments"]]
    x = F.layer_norm(x, (16,), w["encoder.input.norm.weight"], w["encoder.input.norm.bias"], 1e-12)
    keep = torch.arange(src.size(1)) < batch["src_lengths"][:, None]
    for layer in model.encoder.layers:
        x = layer(x, keep[:, None, None, :], 0)
    pooled = torch.tanh(x[:, 0] @ w["head.pooler.weight"].t() + w["head.pooler.bias"])
    logits = pooled @ w["head.out.weight"].t() + w["head.out.bias"]
    expected = F.cross_entropy(logits, batch["labels"], reduction="sum")
    found = model(batch)
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(found.loss, list(w.values())),
                            torch.autograd.grad(expected, list(w.values())), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    engine = TASK.start(recipe, layout_of(recipe, 1), data, Ranks.alone(), False)
    engine.fill(weights.__getitem__)
    result = validate(recipe, data, engine, Ranks.alone())
    assert result.loss == pytest.approx(float(expected.detach()) / len(data.valid), rel=1e-5)
    assert result.figures["accuracy"] == float((logits.argmax(1) == batch["labels"]).double().mean())
    assert result.value == -result.figures["accuracy"]
    for by, value in (("f1", -result.figures["f1"]), ("loss", result.loss)):
        recipe = recipe_in(folder, model={"dropout": 0.0, "attention_dropout": 0.0}, train={"best_by": by})
        assert validate(recipe, data, engine, Ranks.alone()).value == pytest.approx(value)


def test_every_layout_takes_the_same_updates(folder: Path, warm: Warm) -> None:
    alone, = four_updates(warm, 1, folder, [tree(folder, batch={"accumulation": 2})])
    layouts = ["zero0_fp32", "zero1_fp32", "zero2_fp32", "zero3_fp32"]
    both = four_updates(warm, 2, folder, [tree(folder, parallel=parallel(layout, threads=1)) for layout in layouts])
    for layout, found in zip(layouts, both, strict=True):
        np.testing.assert_allclose(found, alone, rtol=1e-6, atol=1e-6, err_msg=layout)


def test_a_run_resumes_to_the_bit_and_classifies(folder: Path, refused: Refused,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """Also: a file of labels, its scores, and what a run of another recipe begins with."""
    whole, broken, file = folder / "whole", folder / "broken", write(folder)
    assert main("train", [file, f"run={whole}"]) == 0
    for ends in (4, 8):
        assert main("train", [file, f"run={broken}", f"train.updates={ends}"]) == 0
    ours, theirs = (load_weights(cast(Path, newest_checkpoint(run / "checkpoints"))) for run in (broken, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and len(ours) == len(theirs) > 20

    capsys.readouterr()
    out = folder / "labels.tsv"
    assert main("classify", [str(whole), "--input", str(folder / "valid.tsv"), "--output", str(out), "--score"]) == 0
    said = capsys.readouterr().out
    rows = [line.split("\t") for line in out.read_text().splitlines()]
    right = [line.split("\t")[2] for line in (folder / "valid.tsv").read_text().splitlines()]
    accuracy = sum(row[0] == label for row, label in zip(rows, right, strict=True)) / len(right)
    assert f"{len(right)} examples: accuracy {accuracy:.4f}, f1 " in said
    assert all(row[0] == LABELS[int(float(row[2]) > float(row[1]))] for row in rows if row[1] != row[2])
    assert all(abs(float(row[1]) + float(row[2]) - 1) < 2e-4 for row in rows)
    overrides = [f"run={whole}", "parallel.threads=1"]
    assert main("classify", [file, "--input", str(folder / "valid.tsv"), "--score", *overrides]) == 0
    shown = capsys.readouterr()
    assert shown.out == out.read_text() and "examples: accuracy" in shown.err
    (folder / "unlabelled.tsv").write_text("a b\tc d\n\tc\n", encoding="utf-8")
    out.unlink()
    assert "unlabelled.tsv is the input file itself; give another output file" in refused(
        "classify", whole, "--input", folder / "unlabelled.tsv", "--output", folder / "unlabelled.tsv")
    assert f"there is no folder {folder / 'none'}" in refused(  # said before any text is read
        "classify", whole, "--input", folder / "unlabelled.tsv", "--output", folder / "none" / "out.tsv")
    said = refused("classify", str(whole), "--input", folder / "unlabelled.tsv", "--output", out)
    assert "unlabelled.tsv, line 2: the text in column 1 is empty" in said and not out.exists()

    recipe = recipe_in(folder, train={"init_from": str(whole)}, data={"labels": [*LABELS, "third"]})
    engine = TASK.start(recipe, layout_of(recipe, 1), open_examples(recipe), Ranks.alone(), True)
    for name, p in engine.module.named_parameters():
        if not name.startswith("head.out."):
            assert torch.equal(p, theirs[name]), name
        else:
            assert p.shape != theirs[name].shape and bool(p.isfinite().all()), name


@pytest.mark.parametrize("setting", ["vocab.model", "train.init_from"])
def test_a_run_goes_on_without_what_it_began_with(setting: str, folder: Path, tmp_path: Path, refused: Refused) -> None:
    """It has the vocabulary itself, and neither setting may change."""
    first = write(folder, train={"updates": 2, "validate_every": 2, "save_every": 2})
    assert main("train", [first, f"run={tmp_path / 'old'}"]) == 0
    began = ["vocab.model=null", f"{setting}={tmp_path / 'old'}"]
    words = [first, f"run={tmp_path / 'new'}", *began]
    assert main("train", words) == 0
    (tmp_path / "old").rename(tmp_path / "gone")
    assert main("train", [*words, "train.updates=4"]) == 0
    assert setting in refused("train", first, f"run={tmp_path / 'another'}", *began)


def test_a_missing_input_is_not_to_be_standard_input(folder: Path, tmp_path: Path, refused: Refused) -> None:
    """Which `classify` does not read."""
    file = write(folder, train={"updates": 2, "validate_every": 2, "save_every": 2})
    assert main("train", [file, f"run={tmp_path}"]) == 0
    for name in ("-", "none.tsv"):
        assert refused("classify", str(tmp_path), "--input", name).endswith(
            f"there is no input file {name}; give one of lines with tabs, or of JSON lines (.jsonl)\n")


def test_run_prepares_nothing(folder: Path) -> None:
    file = write(folder, train={"updates": 2, "validate_every": 2, "save_every": 2})
    taken: list[str] = []

    def start(words: list[str]) -> int:
        taken.append(words[0])
        return main(words[0], words[1:])

    steps = [f"run={folder / 'steps'}"]
    assert run_steps(file, load_recipe(file, steps), steps, start) == 0 and taken == ["train", "average"]


def test_seeds_have_a_mean_and_an_interval(folder: Path, capsys: pytest.CaptureFixture[str], refused: Refused) -> None:
    file = write(folder, train={"updates": 2, "validate_every": 2, "save_every": 2})
    run = folder / "seeds"
    for _ in range(2):  # the second time nothing is left to do
        assert main("seeds", [file, "--seeds", "1,2,5", f"run={run}"]) == 0
        said = capsys.readouterr().out
    found = json.loads((run / "seeds.json").read_text())
    values = [each["accuracy"] for each in found["seeds"].values()]
    assert list(found["seeds"]) == ["1", "2", "5"] and found["mean"]["accuracy"] == pytest.approx(np.mean(values))
    mean, half = interval(values)
    assert f"{mean:.4f} ± {half:.4f}" in said and found["interval_95"]["accuracy"] == pytest.approx(half)
    assert load_recipe(run / "seed-5").seed == 5
    assert "--seeds is 1,1, must be two or more different numbers" in refused("seeds", file, "--seeds", "1,1")
    assert "different numbers from 0 to 2147483647" in refused("seeds", file, "--seeds", f"1,{2**31}")


@pytest.mark.parametrize("line, columns, expected", [
    ("a b\tc d\tsane", {}, "train.tsv, line 2: the label is 'sane', but data.labels are other, same; did you mean"),
    ("a b\tsame", {}, "train.tsv, line 2: there is no column 3 with a text or a number, only 1, 2"),
    ("a b\t \tsame", {}, "train.tsv, line 2: the text in column 2 is empty"),
    ("a " * 200 + "\tb\tsame", {}, "tokens with their marks, but model.max_length is 128"),
    ("a\tb\tsame", {"text": "one", "pair": "two", "label": "is"}, "train.tsv, line 2: there is no column 'one'"),
])
def test_faulty_examples(line: str, columns: dict[str, str], expected: str, folder: Path, tmp_path: Path,
                         refused: Refused) -> None:
    (tmp_path / "train.tsv").write_text(f"a b\tc d\tsame\n{line}\n", encoding="utf-8")
    data = {"train": str(tmp_path / "train.tsv"), "valid": str(tmp_path / "train.tsv"),
            **({"columns": columns} if columns else {})}
    file = write(tmp_path, data=data, vocab={"model": str(folder / "vocab.spm")})
    assert expected in refused("train", file) and not (tmp_path / "run" / "checkpoints").exists()
    if "max_length" in expected:
        recipe = recipe_in(tmp_path, data={**data, "too_long": "cut"}, vocab={"model": str(folder / "vocab.spm")})
        cut = open_examples(recipe).train
        assert cut.src_lengths is cut.trg_lengths, "which are asked for in every micro-batch"
        assert cut.lengths[1] == 128 and cut.sequences[1][-1] == EOS and cut.sequences[1][-3] == EOS


@pytest.mark.parametrize("value, expected", [
    ("null", "line 1: there is no column 'one' with a text or a number, only two, is"),
    ('["a"]', "line 1: there is no column 'one' with a text or a number, only two, is"),
    ("5", "line 1: the label is 'none'"),
    ('"\\ud83d"', "line 1: the column 'one' has half of a character"),
])
def test_json_lines_have_texts_and_numbers(value: str, expected: str, folder: Path, tmp_path: Path,
                                           refused: Refused) -> None:
    """null was read as the text None."""
    (tmp_path / "a.jsonl").write_text(f'{{"one": {value}, "two": "b", "is": "none"}}\n', encoding="utf-8")
    data = {"train": str(tmp_path / "a.jsonl"), "columns": {"text": "one", "pair": "two", "label": "is"}}
    assert expected in refused("train", write(folder, "json.yaml", data=data))


def test_columns_of_one_name_are_refused(folder: Path, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "a.tsv").write_text("one\tone\tis\na\tb\tsame\n", encoding="utf-8")
    data = {"train": str(tmp_path / "a.tsv"), "columns": {"text": "one", "label": "is"}}
    assert "a.tsv, line 1: two columns are named 'one'" in refused("train", write(folder, "twice.yaml", data=data))


@pytest.mark.parametrize("changes, expected", [
    (["vocab.model=null"], "vocab.model is null, but a classifier trains no vocabulary"),
    (["vocab.model=nowhere"], "vocab.model is nowhere, where there is no vocabulary"),
    (["train.init_from=nowhere", "vocab.model=null"], "there is no folder nowhere"),
    (["data.labels=[a,a]"], "labels are a, a, one of them twice"),
    (["data.columns={text: 1, label: x}"], "give them all by number, or all by name"),
    (["batch.tokens=100"], "tokens (100) has no effect with task: classify; set sentences instead"),
    (["train.best_by=bleu"], "train.best_by"),
    (["train.freeze=[pooler]"], "train.freeze names 'pooler', but no parameter"),
    (["translate.beam=7"], "translate has no effect with task: classify"),
    (["parallel.pipeline_stages=2", "parallel.ds_config=ds_configs/zero1.json"], "is not offered with task: classify"),
])
def test_settings_that_are_refused(changes: list[str], expected: str, folder: Path, refused: Refused) -> None:
    assert expected in refused("train", write(folder), "--dry-run", *changes)


RECIPES = sorted(file for file in (TEXT.parents[2] / "recipes" / "bert").glob("*.yaml")
                 if "task: classify" in file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipes_are_read(file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch,
                          capsys: pytest.CaptureFixture[str]) -> None:
    """Each line of a recipe has a comment; with a file of its columns and a vocabulary the dry run is passed."""
    text = file.read_text(encoding="utf-8")
    assert all("# " in line for line in text.splitlines() if line.strip())
    home = folder / "glue" / file.stem.split("_")[0].upper()
    home.mkdir(parents=True)
    monkeypatch.setenv("GLUE_DATA", str(home.parent))
    recipe = load_recipe(file)
    columns, labels = recipe.data.columns, recipe.data.labels
    for name in ("train", "dev"):
        rows = [[columns.label, "id", columns.text, columns.pair], [labels[0], "1", "A b", "c d"],
                [labels[1], "2", "a b", "c"]]
        (home / f"{name}.tsv").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    assert main("train", [str(file), "--dry-run", f"vocab.model={folder}/vocab.spm", "train.init_from=null"]) == 0
    assert "2 examples for training, 2 for validation" in capsys.readouterr().out
