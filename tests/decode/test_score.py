"""Scores of given translations, prefixes and ensembles, over one short run and models beside it."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_run
import torch
from refusals import user_error
from warm import Warm

import deepnmt
from deepnmt import config
from deepnmt.cli import main
from deepnmt.config import load_recipe
from deepnmt.data.prepared import open_prepared
from deepnmt.decode.models import load_models
from deepnmt.decode.score import Given, score_files, score_lines
from deepnmt.decode.steppers import mean_logits
from deepnmt.decode.translate import Hypothesis, translate_files, translate_lines
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks

CHANGES = {"train.updates": 6, "train.validate_every": 6, "train.save_every": 6, "train.valid_bleu": False}
SETTINGS = config.Translate(beam=3, nbest=3, max_ratio=1.0, max_extra=4)
LINES = ["the old dog sees the house", "", "two cats sleep", "a " * 30, "the house"]


@pytest.fixture(scope="module")
def run(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six updates."""
    return deepnmt.train(prepared / "recipe.yaml", {**CHANGES, "run": tmp_path_factory.mktemp("score") / "a"}).folder


@pytest.fixture(scope="module")
def texts(run: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The files of the validation text."""
    split = open_prepared(load_recipe(prepared / "recipe.yaml")).split("valid")
    folder = tmp_path_factory.mktemp("texts")
    files = folder / "valid.src", folder / "valid.trg"
    for file, lines in zip(files, (split.src_text(), split.trg_text()), strict=True):
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return files


def test_the_mean_over_the_validation_text_is_the_logs(
    run: Path, texts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, ranks = load_recipe(run), Ranks.alone()
    exported = recipe.translate.model_copy(update={"backend": "ctranslate2"})  # which searches alone
    totals = score_files(run, str(texts[0]), str(texts[1]), str(tmp_path / "out"), exported, ranks=ranks)
    valid = next(r for r in deepnmt.load(run).log() if r["type"] == "valid")
    assert totals.loss / totals.tokens == pytest.approx(math.log(valid["perplexity"]), abs=1e-6)
    assert f"perplexity {valid['perplexity']:.2f}" in capsys.readouterr().err
    sums = [float(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert 1e-4 < 1 + sum(sums) / totals.loss < 1e-2  # the search gives no probability to the piece that pads
    lines = list(zip(*(file.read_text(encoding="utf-8").splitlines() for file in texts), strict=True))
    scored = deepnmt.load(run).score([src for src, _ in lines], [trg for _, trg in lines], top=1)
    assert [each.log_prob for each in scored] == pytest.approx(sums, abs=1e-5)
    assert scored[0].pieces[-1].piece == "</s>" and scored[0].pieces[0].top[0][1] >= scored[0].pieces[0].log_prob
    (whole,) = deepnmt.load(run).score([lines[0][0]], [lines[0][1]], top=10_000)
    for piece in whole.pieces:  # of all pieces but pad, which JSON could not write
        assert math.fsum(math.exp(value) for _, value in piece.top) == pytest.approx(1, abs=1e-5)
        assert min(value for _, value in piece.top) > -math.inf


@pytest.mark.parametrize("method", ["beam", "greedy", "sample"])
def test_the_searchs_own_output_has_its_log_probabilities(method: str, run: Path, tmp_path: Path) -> None:
    """Through the files, with pieces as they were chosen and hypotheses that were truncated."""
    settings = SETTINGS.model_copy(update={"method": method, "nbest": 1 if method == "greedy" else 3})
    (tmp_path / "in").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    translate_files(run, str(tmp_path / "in"), str(tmp_path / "h.jsonl"), settings, output_format="jsonl")
    score_files(run, str(tmp_path / "in"), str(tmp_path / "h.jsonl"), str(tmp_path / "s.jsonl"), settings,
                output_format="jsonl", pieces=True, top=2)
    ended = set()
    for hyps, scores in zip(*((tmp_path / name).read_text(encoding="utf-8").splitlines()
                              for name in ("h.jsonl", "s.jsonl")), strict=True):
        for h, s in zip(json.loads(hyps)["hypotheses"], json.loads(scores)["translations"], strict=True):
            ended.add(h["ended"])
            if h["pieces"]:
                assert s["log_prob"] == pytest.approx(h["log_prob"], abs=1e-5, rel=5e-7)
                assert (s["score"], s["tokens"]) == (pytest.approx(h["score"], abs=1e-5), h["tokens"])
                assert sum(piece["log_prob"] for piece in s["pieces"]) == pytest.approx(s["log_prob"], abs=1e-5)
                assert [piece["piece"] for piece in s["pieces"]] == h["pieces"] + ["</s>"] * h["ended"]
                assert all(len(piece["top"]) == 2 for piece in s["pieces"])
    assert False in ended
    (tmp_path / "h.jsonl.gz").write_bytes(gzip.compress((tmp_path / "h.jsonl").read_bytes()))
    score_files(run, str(tmp_path / "in"), str(tmp_path / "h.jsonl.gz"), str(tmp_path / "again"), settings,
                output_format="jsonl", pieces=True, top=2)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "s.jsonl").read_bytes()


def score_together(folder: str, source: str, target: str) -> None:
    """Runs on each rank."""
    with processes() as ranks:
        score_files(folder, source, None, target, SETTINGS, output_format="tsv", ranks=ranks)


def test_contrastive_sets_give_an_accuracy_on_any_number_of_processes(
    run: Path, texts: tuple[Path, Path], tmp_path: Path, warm: Warm, capsys: pytest.CaptureFixture[str]
) -> None:
    src, trg = (file.read_text(encoding="utf-8").splitlines() for file in texts)
    rows = [(s, t, trg[i - 3], trg[i - 7]) for i, (s, t) in enumerate(zip(src, trg, strict=True))]
    (tmp_path / "sets.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    totals = score_files(run, str(tmp_path / "sets.tsv"), None, str(tmp_path / "one"), SETTINGS)
    scores = np.array([list(map(float, line.split("\t"))) for line in (tmp_path / "one").read_text().splitlines()])
    right = int((scores[:, 0] > scores[:, 1:].max(1)).sum())
    assert (totals.right, totals.sets) == (right, len(src)) and 0 < right < len(src)
    assert f"accuracy {right / len(src):.4f}" in capsys.readouterr().err
    warm.run(2, "test_score:score_together", run, tmp_path / "sets.tsv", tmp_path / "two")
    two = [line.split("\t") for line in (tmp_path / "two").read_text(encoding="utf-8").splitlines()]
    assert [float(row[2]) for row in two] == pytest.approx(scores.flatten().tolist(), abs=1e-5)
    assert [(row[0], row[1], row[4]) for row in two] == [
        (str(n), str(k), text) for n, row in enumerate(rows, start=1) for k, text in enumerate(row[1:], start=1)]


def test_faulty_requests_to_score(run: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a\nb\n", encoding="utf-8")
    (tmp_path / "one").write_text("x\n", encoding="utf-8")
    (tmp_path / "bad.jsonl").write_text('{"hypotheses": 3}\nx\n', encoding="utf-8")
    (tmp_path / "ids.jsonl").write_text('{"hypotheses": [{"text": "x", "pieces": [5]}]}\n' * 2, encoding="utf-8")
    (tmp_path / "other.jsonl").write_text('{"hypotheses": [{"text": "x", "pieces": ["nopiece"]}]}\n' * 2, "utf-8")
    for translations, message in ((None, "line 1: no tab"), ("one", "has 2 lines and .*one has 1"),
                                  ("bad.jsonl", "line 1: not an object with hypotheses"),
                                  ("ids.jsonl", "line 1: not an object with hypotheses"),
                                  ("other.jsonl", "not in this model's vocabulary")):
        with user_error(message):
            score_files(run, str(tmp_path / "in"), translations and str(tmp_path / translations),
                        str(tmp_path / "out"), SETTINGS)
        assert not (tmp_path / "out").exists()


# -- prefixes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["beam", "greedy", "sample"])
def test_a_prefix_begins_the_translation_and_an_empty_one_changes_nothing(method: str, run: Path) -> None:
    models = load_models(run, SETTINGS, Ranks.alone())
    settings = SETTINGS.model_copy(update={"method": method, "nbest": 1 if method == "greedy" else 3, "patience": None})

    def search(prefixes: list[str] | None) -> list[list[Hypothesis]]:
        return translate_lines(models.all[0], models.vocabs, LINES, settings, prefixes=prefixes)

    plain = search(None)
    assert search([""] * len(LINES)) == plain
    prefixes = ["der Hund", "nichts", "", "ein alter Baum und", "das"]
    begun = search(prefixes)
    assert begun[2] == plain[2] and begun[1] == plain[1]  # no prefix, in a batch with others; and an empty line
    for i in (0, 3, 4):
        assert all(h.text.startswith(prefixes[i]) and not plain[i][0].text.startswith(prefixes[i]) for h in begun[i])
        given = [Given(h.text, h.pieces, h.ended) for h in begun[i]]
        scored = score_lines(models.all, models.vocabs, [(LINES[i], given)], settings)[0]
        assert [h.log_prob for h in begun[i]] == pytest.approx([s.log_prob for s in scored], abs=1e-5, rel=5e-7)


def test_the_beginning_of_a_translation_is_continued_to_it(run: Path, tmp_path: Path) -> None:
    """By a greedy search, if the beginning is segmented as it was chosen; prefixes come from a file."""
    (tmp_path / "in").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    greedy = SETTINGS.model_copy(update={"method": "greedy", "nbest": 1})
    models = load_models(run, greedy, Ranks.alone())
    plain = [best[0] for best in translate_lines(models.all[0], models.vocabs, LINES, greedy)]
    begins = [models.vocabs[1].decode(models.vocabs[1].to_ids(h.pieces[:3])) for h in plain]
    kept = [models.vocabs[1].encode(begin) == models.vocabs[1].to_ids(h.pieces[:3])
            for begin, h in zip(begins, plain, strict=True)]
    assert any(kept[i] for i in (0, 2, 3, 4))
    (tmp_path / "begin").write_text("".join(f"{begin}\n" for begin in begins), "utf-8")
    assert main("translate", [str(run), "translate.method=greedy", "translate.max_ratio=1.0", "translate.max_extra=4",
                              "--input", str(tmp_path / "in"), "--prefix", str(tmp_path / "begin"),
                              "--output", str(tmp_path / "out")]) == 0
    out = (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    assert [line for line, keep in zip(out, kept, strict=True) if keep] == [
        h.text for h, keep in zip(plain, kept, strict=True) if keep]
    (tmp_path / "begin").write_text("x\n", encoding="utf-8")
    with user_error("has 5 lines and .*begin has 1"):
        translate_files(run, str(tmp_path / "in"), "-", greedy, prefixes=str(tmp_path / "begin"))


# -- ensembles ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def others(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Models without training: with other blocks, depths and width but the run's vocabulary; with another."""
    from deepnmt.checkpoint.checkpoint import Contents, load_model
    from deepnmt.model.init import new_model

    folder, loaded = tmp_path_factory.mktemp("others"), load_model(run)
    tree = loaded.recipe.model.model_dump()
    tree |= {"width": 16, "heads": 2, "max_length": 50}
    tree["encoder"] |= {"block": "pre_ln", "layers": 3}
    tree["decoder"] |= {"block": "post_ln", "layers": 1}
    filters = loaded.recipe.data.filters.model_copy(update={"max_tokens": 40})
    recipe = loaded.recipe.model_copy(update={
        "model": config.Model.model_validate(tree), "run": str(folder / "b"),
        "data": loaded.recipe.data.model_copy(update={"filters": filters})})
    weights = dict(new_model(recipe.model, loaded.src_vocab.size, loaded.trg_vocab.size, 5).named_parameters())
    for weight in weights.values():  # clearly prefers some tokens
        weight.data.mul_(1.5)
    same = tiny_run.save(folder / "b" / "checkpoints", Contents(
        weights, {}, tiny_run.state_of(3), config.dump_recipe(recipe), loaded.files))
    return same, tiny_run.write(tiny_run.recipe_of(folder / "c"), 1)


@pytest.mark.parametrize(("mean", "precision"), [("arithmetic", "fp32"), ("geometric", "fp32"), ("arithmetic", "bf16")])
def test_twice_the_same_is_once_to_the_last_bit(mean: str, precision: str, run: Path) -> None:
    settings = SETTINGS.model_copy(update={"ensemble": mean, "precision": precision})
    lines, found = LINES[: 5 if precision == "fp32" else 1], []
    for folders in (run, [run, run], [run] * 3):
        models = load_models(folders, settings, Ranks.alone())
        scored = score_lines(models.all, models.vocabs, [(line, [Given("ein Hund")]) for line in lines], settings)
        found.append((translate_lines(models.all[0], models.vocabs, lines, settings, stepper=models.stepper),
                      [replace(line[0], loss=0.0) for line in scored]))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("mean", ["arithmetic", "geometric"])
def test_an_ensemble_of_different_models(mean: str, run: Path, others: tuple[Path, Path], tmp_path: Path) -> None:
    """Its probabilities are the mean; a batch changes nothing; its own output has its log-probabilities."""
    settings = SETTINGS.model_copy(update={"ensemble": mean})
    models = load_models([run, others[0]], settings, Ranks.alone())
    assert models.all[0].encoder.input.positions.size(0) == 50
    src, lengths = torch.tensor([[9, 12, 7, 2]]), torch.tensor([4])
    with torch.inference_mode():
        step = models.stepper(models.all[0], src, lengths, 1, 5).step(torch.tensor([1]))
        alone = [model.logits(model.decode(torch.tensor([[1]]), model.encode(src, lengths), lengths))[:, 0].double()
                 .softmax(1) for model in models.all]
    p, q = alone
    expected = (p + q) / 2 if mean == "arithmetic" else (p * q).sqrt() / (p * q).sqrt().sum()
    torch.testing.assert_close(step.double().softmax(1), expected, atol=1e-6, rtol=0)
    together = translate_lines(models.all[0], models.vocabs, LINES, settings, stepper=models.stepper)
    single = [translate_lines(models.all[0], models.vocabs, [line], settings, stepper=models.stepper)[0]
              for line in LINES]
    assert [best[0].score for best in together] == pytest.approx([best[0].score for best in single], abs=1e-4)
    first = translate_lines(models.all[0], models.vocabs, LINES, settings)
    assert all(abs(first[i][0].score - together[i][0].score) > 1e-3 for i in (0, 2, 3, 4))
    pairs = [(line, [Given(h.text, h.pieces, h.ended) for h in best]) for line, best in zip(LINES, together)]
    scored = score_lines(models.all, models.vocabs, pairs, settings)
    for i in (0, 2, 3, 4):
        assert [s.log_prob for s in scored[i]] == pytest.approx([h.log_prob for h in together[i]], abs=1e-5, rel=5e-7)


def test_an_ensemble_from_the_command_line(
    run: Path, others: tuple[Path, Path], texts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    out = str(tmp_path / "out")
    pair = ["--checkpoint", "newest", "--checkpoint", str(others[0])]
    assert main("translate", [str(run), *pair, "--input", str(tmp_path / "in"), "--output", out]) == 0
    assert main("score", [str(run), *pair, "--input", str(tmp_path / "in"), "--translations", out, "--output",
                          str(tmp_path / "scores")]) == 0
    assert len((tmp_path / "scores").read_text().splitlines()) == len(LINES)
    assert main("evaluate", [str(run), *pair, "--test", f"v={texts[0]},{texts[1]}"]) == 0
    files = [file.name for file in run.glob("scores-*.json")]
    assert len(files) == 1 and files[0].startswith("scores-update-00000006-b-update-00000003-v_")
    assert json.loads((run / files[0]).read_text())["ensemble"] == [str(others[0])]
    with user_error("has another source vocabulary than .*; an ensemble needs models of one vocabulary"):
        load_models([run, others[1]], SETTINGS, Ranks.alone())


def test_a_mean_of_certain_models_is_finite() -> None:
    logits = [torch.tensor([[0.0, -200.0, 0.0, -torch.inf]]), torch.tensor([[-300.0, 0.0, 0.0, -torch.inf]])]
    p = mean_logits(logits, "arithmetic").softmax(1)
    torch.testing.assert_close(p, torch.tensor([[0.25, 0.25, 0.5, 0.0]]), atol=1e-6, rtol=0)
