"""Masked language models: masks, prepared text, the same updates in every layout, resuming, and users' mistakes."""

from __future__ import annotations

import json
import math
import re
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
from deepnmt.config import check_recipe, load_recipe
from deepnmt.config.encoders import EncoderModel
from deepnmt.files import read_log
from deepnmt.model.init import fill
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.masked_lm.masking import FIXED, MASK, count_masked, mask
from deepnmt.tasks.masked_lm.model import build_of
from deepnmt.tasks.masked_lm.prepare import PreparedText
from deepnmt.tasks.masked_lm.settings import MaskedRecipe, Masking
from deepnmt.tasks.masked_lm.task import TASK, text_of, validate
from deepnmt.tokens import BOS, EOS, PAD

TEXT = Path(__file__).resolve().parents[2] / "fixtures" / "text"
VOCAB, MASK_ID = 1000, 4


def tree(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    own: dict[str, dict[str, Any]] = {
        "data": {"folder": str(folder / "data"), "train": str(TEXT / "train.en"), "valid": str(TEXT / "valid.en"),
                 "length": 24},
        "vocab": {"size": 300},
        "batch": {"tokens": 256, "accumulation": 1},
        "model": {"width": 16, "heads": 2, "ffn": 24, "max_length": 32, "dropout": 0.1,
                  "encoder": {"layers": 2, "block": "pre_ln"}, "decoder": None},
        "optimizer": {"lr": 5e-3},
        "schedule": {"name": "linear", "warmup": 0},
        "train": {"updates": 8, "log_every": 1, "validate_every": 4, "save_every": 4},
        "parallel": {"ds_config": None, "threads": 1},
    }
    for name, settings in sections.items():
        own[name] = {**own.get(name, {}), **settings}
    return {"run": str(folder / "run"), "seed": 3, "task": "masked_lm", "average_last": 1, **own}


def recipe_in(folder: Path, **sections: dict[str, Any]) -> MaskedRecipe:
    return cast(MaskedRecipe, check_recipe(tree(folder, **sections), "test"))


def write(folder: Path, name: str = "recipe.yaml", **sections: dict[str, Any]) -> str:
    (folder / name).write_text(json.dumps(tree(folder, **sections)), encoding="utf-8")
    return str(folder / name)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked")
    PreparedText.prepare(recipe_in(folder))
    return folder


def within(found: int, count: int, share: float) -> bool:
    """Whether a binomial count is within three standard deviations."""
    return abs(found - count * share) <= 3 * math.sqrt(count * share * (1 - share))


def test_the_shares_of_a_mask() -> None:
    """80 % of the chosen are masked, 10 % replaced by any ordinary piece, 10 % stay; places are drawn evenly."""
    tokens = np.arange(100, 200)
    chosen = masked = kept = other = 0
    places = np.zeros(len(tokens))
    pieces: list[int] = []
    for number in range(400):
        read, targets = mask(tokens, Masking(), MASK_ID, VOCAB, seed=5, epoch=2, number=number)
        at = targets != PAD
        assert (targets[at] == tokens[at]).all() and (read[~at] == tokens[~at]).all() and at.sum() == 15
        places += at
        chosen += int(at.sum())
        masked += int((read[at] == MASK_ID).sum())
        kept += int((read[at] == tokens[at]).sum())
        changed = read[at & (read != MASK_ID) & (read != tokens)]
        other += len(changed)
        pieces += changed.tolist()
    assert chosen == masked + kept + other == 6000
    assert within(masked, chosen, 0.8) and within(kept, chosen, 0.1) and within(other, chosen, 0.1)
    assert not {0, BOS, EOS, PAD, MASK_ID} & set(pieces) and min(pieces) > 4 and max(pieces) < VOCAB
    assert within(sum(piece < 502 for piece in pieces), other, 0.5)
    spread = ((places - 60) ** 2 / (400 * 0.15 * 0.85)).sum()  # about chi² of 100
    assert abs(spread - 100) < 3 * math.sqrt(200)


def test_a_mask_depends_on_seed_epoch_and_sequence_alone() -> None:
    tokens = np.arange(10, 50)
    first = [mask(tokens, Masking(), MASK_ID, VOCAB, *key).read.tolist()
             for key in ((1, 0, 0), (1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1, FIXED, 0))]
    assert first[0] == first[1]
    assert len({tuple(each) for each in first}) == 5
    assert count_masked(np.array([1, 3, 10, 40]), 0.15).tolist() == [1, 1, 2, 6]


def test_the_recipes_mask_is_another_one_in_each_epoch(prepared: Path) -> None:
    recipe = recipe_in(prepared, masking={"share": 0.4, "mask": 1.0, "random": 0.0})
    data = PreparedText.open(recipe)
    text = text_of(recipe, data, "train")
    one, two = (text.batch([0, 1, 2], epoch << 32, torch.device("cpu")) for epoch in range(2))
    assert not torch.equal(one["targets"], two["targets"])
    chosen = one["targets"] != PAD
    assert (one["src"][chosen] == data.vocab.tags["<mask>"]).all()
    assert int(chosen.sum()) == count_masked(one["src_lengths"].numpy() - 2, 0.4).sum()


def test_sequences_are_lines_or_pieces_of_documents(tmp_path: Path) -> None:
    """Nothing is lost, no sequence has two documents, and the marks are bos and eos."""
    lines = ["a man walks .", "two dogs run .", "", "the woman sleeps ."]
    texts = {"train": str(tmp_path / "a.txt"), "valid": str(tmp_path / "a.txt"), "unit": "documents", "length": 8}
    (tmp_path / "a.txt").write_text("\n".join(lines).title() + "\n", encoding="utf-8")
    recipe = recipe_in(tmp_path, data={**texts, "lowercase": True}, vocab={"size": 40})
    PreparedText.prepare(recipe)
    data = PreparedText.open(recipe)
    side = data.sequences("train")
    whole = [data.vocab.encode(lines[0]) + data.vocab.encode(lines[1]), data.vocab.encode(lines[3])]
    pieces = [document[start:start + 6] for document in whole for start in range(0, len(document), 6)]
    assert [side[i].tolist() for i in range(len(side.lengths))] == pieces
    text = text_of(recipe, data, "train")
    for name in ("src_lengths", "trg_lengths"):
        assert getattr(text, name) is getattr(text, name), "which is asked for in every micro-batch"
    batch = text.batch([0, len(pieces) - 1], 7, torch.device("cpu"))
    assert batch["src_lengths"].tolist() == [8, len(pieces[-1]) + 2] and batch.key == 7
    for row, piece in ((0, pieces[0]), (1, pieces[-1])):
        read, targets = (batch[name][row, :len(piece) + 2].tolist() for name in ("src", "targets"))
        assert (read[0], read[-1], targets[0], targets[-1]) == (BOS, EOS, PAD, PAD)
        assert [t if t != PAD else r for r, t in zip(read, targets, strict=True)][1:-1] == piece
    assert batch.tokens == int((batch["targets"] != PAD).sum()) == int(text.trg_lengths[[0, -1]].sum())


def test_long_lines_are_learned_from(tmp_path: Path) -> None:
    """SentencePiece passes by lines over 4,192 bytes, such as documents of one line are; here it would have none."""
    words = (TEXT / "train.en").read_text(encoding="utf-8").split()
    lines = [" ".join(words[start:start + 1500]) for start in range(0, len(words) - 1500, 1500)]
    assert min(map(len, lines)) > 4192
    (tmp_path / "long.txt").write_text("\n".join(lines), encoding="utf-8")
    recipe = recipe_in(tmp_path, data={"train": str(tmp_path / "long.txt")}, vocab={"size": 200})
    PreparedText.prepare(recipe)
    assert PreparedText.open(recipe).vocab.size == 200


def test_a_mask_in_the_text_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{MASK} a man walks .\na {MASK}\n{MASK}\n", encoding="utf-8")
    recipe = recipe_in(tmp_path, data={"valid": str(tmp_path / "a.txt")})
    PreparedText.prepare(recipe)
    data = PreparedText.open(recipe)
    side = data.sequences("valid")
    assert not any(data.vocab.tags[MASK] in side[i] for i in range(3)) and len(side[0]) > len(side[2]) > 3


def test_loss_and_gradients_are_those_of_the_formula(prepared: Path) -> None:
    """Logits from plain tensors: BERT's input, its head over the tied table; the loss over masked tokens alone."""
    recipe = recipe_in(prepared, model={"dropout": 0.0, "attention_dropout": 0.0})
    data = PreparedText.open(recipe)
    build = build_of(recipe, data.vocab.size)
    model = build(lambda part: None)
    generator, shapes = torch.Generator().manual_seed(1), shapes_by_name(build)
    weights = {name: torch.randn(shape, generator=generator) / 3 for name, shape in shapes.items()}
    fill(model, weights.__getitem__)
    text = text_of(recipe, data, "valid")
    batch = text.fixed_batch(range(len(text)), torch.device("cpu"))
    w = dict(model.named_parameters())
    src = batch["src"]
    x = w["embeddings.tokens.weight"][src] + w["encoder.input.positions.weight"][:src.size(1)]
    x = x + w["encoder.input.segments.weight"][0]
    x = F.layer_norm(x, (16,), w["encoder.input.norm.weight"], w["encoder.input.norm.bias"], 1e-12)
    keep = torch.arange(src.size(1)) < batch["src_lengths"][:, None]
    for layer in model.encoder.layers:
        x = layer(x, keep[:, None, None, :], 0)
    x = F.layer_norm(x, (16,), w["encoder.norm.weight"], w["encoder.norm.bias"], 1e-12)
    h = F.gelu(x @ w["head.dense.weight"].t() + w["head.dense.bias"])
    h = F.layer_norm(h, (16,), w["head.norm.weight"], w["head.norm.bias"], 1e-12)
    logits = h @ w["embeddings.tokens.weight"].t() + w["head.bias"]
    expected = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=PAD, reduction="sum")
    engine = TASK.start(recipe, layout_of(recipe, 1), data, Ranks.alone(), False)
    engine.fill(weights.__getitem__)
    result = validate(recipe, data, engine, Ranks.alone())
    at = batch["targets"] != PAD
    right = float((logits.argmax(-1)[at] == batch["targets"][at]).float().mean())
    assert math.isclose(result.loss, float(expected.detach()) / batch.tokens, rel_tol=1e-5)
    assert math.isclose(float(result.figures["accuracy"]), right, rel_tol=1e-6)
    found = model(batch)
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.nll, expected.detach(), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(found.loss, list(w.values())),
                            torch.autograd.grad(expected, list(w.values())), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_initial_weights_are_berts(prepared: Path) -> None:
    recipe = recipe_in(prepared, model={"width": 64, "ffn": 128})
    build = build_of(recipe, 500)
    engine = TASK.start(recipe, layout_of(recipe, 1), PreparedText.open(recipe), Ranks.alone(), True)
    for name, p in ((name, p.detach()) for name, p in engine.module.named_parameters()):
        if p.ndim > 1 and name != "encoder.input.segments.weight":
            own = p[torch.arange(len(p)) != PAD] if name == "embeddings.tokens.weight" else p
            assert abs(float(own.std()) / (0.02 * 0.8796) - 1) < 0.1 and float(own.abs().max()) <= 0.04, name
        elif p.ndim == 1:
            assert p.eq(1.0 if name.endswith(".weight") else 0.0).all(), name
    assert set(shapes_by_name(build)) == {name for name, _ in engine.module.named_parameters()}


def test_every_layout_takes_the_same_updates(prepared: Path, warm: Warm) -> None:
    alone, = four_updates(warm, 1, prepared, [tree(prepared, batch={"accumulation": 2})])
    layouts = ["zero0_fp32", "zero1_fp32", "zero2_fp32", "zero3_fp32"]
    both = four_updates(warm, 2, prepared, [tree(prepared, parallel=parallel(layout, threads=1)) for layout in layouts])
    for layout, found in zip(layouts, both, strict=True):
        np.testing.assert_allclose(found, alone, rtol=1e-6, atol=1e-6, err_msg=layout)
    assert alone[0] > alone[3] > 0


def test_a_run_resumes_to_the_bit(prepared: Path) -> None:
    """Stopped after half of its updates, in the middle of an epoch, and run again, it is as if it had never stopped."""
    whole, broken = prepared / "whole", prepared / "broken"
    file = write(prepared)
    assert main("train", [file, f"run={whole}"]) == 0
    for ends in (4, 8):
        assert main("train", [file, f"run={broken}", f"train.updates={ends}", "schedule.name=constant"]) == 0
    assert main("train", [file, f"run={whole}-constant", "schedule.name=constant"]) == 0
    ours, theirs = (load_weights(cast(Path, newest_checkpoint(run / "checkpoints")))
                    for run in (broken, prepared / "whole-constant"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and len(ours) == len(theirs) > 20
    [first, last] = [line for line in read_log(whole / "log.jsonl") if line["type"] == "valid"]
    assert last["loss"] < first["loss"] and 0 <= last["accuracy"] < 1
    assert math.isclose(last["perplexity"], math.exp(last["loss"]))


def test_a_run_begins_with_a_trained_one(prepared: Path, refused: Refused) -> None:
    file = write(prepared)
    run = prepared / "begun"
    assert main("train", [file, f"run={run}", "train.updates=4"]) == 0
    recipe = recipe_in(prepared, train={"init_from": str(run)})
    engine = TASK.start(recipe, layout_of(recipe, 1), PreparedText.open(recipe), Ranks.alone(), True)
    trained = load_weights(cast(Path, newest_checkpoint(run / "checkpoints")))
    assert all(torch.equal(p, trained[name]) for name, p in engine.module.named_parameters())
    said = refused("train", file, f"train.init_from={run}", "model.ffn=48", f"run={prepared}/other")
    assert "model.ffn is 48 and was 24" in said and "set model.ffn=24" in said


@pytest.mark.parametrize("changes, expected", [
    (["parallel.pipeline_stages=2", "parallel.ds_config=ds_configs/zero1.json"], "parallel.pipeline_stages (2) is not"),
    (["model.decoder={layers: 2}"], "this task trains an encoder alone; set decoder: null"),
    (["data.length=64"], "data.length (64) must not be above model.max_length (32)"),
    (["batch.tokens=20"], "batch.tokens (20) must not be below data.length (24)"),
    (["masking.mask=0.95"], "mask (0.95) and random (0.1) are more than 1 together"),
    (["model.encoder.block=admin"], "encoder.block (admin) needs a profile"),
    (["train.r_drop=1"], "train.r_drop (1.0) is not offered with task: masked_lm"),
    (["model.tied=none"], "tied (none) has no effect"),
    (["train.best_by=accuracy"], "train.best_by: is 'accuracy', must be loss"),
    (["model.bands=[8]"], "bands ([8]) are for language models"),
    (["translate.beam=7"], "translate has no effect with task: masked_lm"),
    (["metrics={comet: {command: 'x {hyp}'}}"], "metrics has no effect with task: masked_lm"),
    (["vocab.shared=false"], "vocab.shared: false and vocab.tags are of translation"),
    (["vocab.tags=[<x>]"], "vocab.shared: false and vocab.tags are of translation"),
    (["admin.profile=omega.json"], "admin.profile (omega.json) needs block: admin"),
    (["model.encoder.ramp=5", "train.init_from=other"], "model.encoder.ramp (5) would begin with a trained model"),
    (["train.freeze=[decoder]"], "train.freeze names 'decoder', but no parameter"),
    (["optimizer.lr_factors={decoder: 0.1}"], "optimizer.lr_factors names 'decoder', but no parameter"),
])
def test_settings_that_are_refused(changes: list[str], expected: str, prepared: Path, refused: Refused) -> None:
    assert expected in refused("train", write(prepared), "--dry-run", *changes)


@pytest.mark.parametrize("text, unit, expected", [
    ("a b\n\nc d\n", "lines", "train.txt, line 2: the line is empty"),
    ("a b\n\n\nc d\n", "documents", "train.txt, line 3: an empty document"),
    ("", "lines", "there is no text in"),
    ("a\xff b\n", "lines", "train.txt, line 1: not valid UTF-8"),
])
def test_faulty_texts(text: str, unit: str, expected: str, tmp_path: Path, refused: Refused) -> None:
    """A sentence with file and line, and no folder."""
    (tmp_path / "train.txt").write_bytes(text.encode("latin-1"))
    file = write(tmp_path, data={"train": str(tmp_path / "train.txt"), "unit": unit})
    assert expected in refused("prepare", file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", "train.txt"]


def test_a_vocabulary_without_a_mask(prepared: Path, tmp_path: Path, refused: Refused) -> None:
    from deepnmt.config import Vocab
    from deepnmt.data.vocab import train_vocabulary

    (tmp_path / "plain.spm").write_bytes(train_vocabulary(["a b c", "b c d"], Vocab(size=12)))
    said = refused("prepare", write(tmp_path, vocab={"model": str(tmp_path / "plain.spm")}))
    assert f"'{MASK}' is not a piece of the vocabulary" in said and "set vocab.model to null" in said
    assert not (tmp_path / "data").exists()
    given = write(tmp_path, vocab={"model": str(prepared / "data")})
    assert main("prepare", [given]) == 0
    ours, theirs = (PreparedText.open(recipe).vocab for recipe in (load_recipe(given), recipe_in(prepared)))
    assert ours.bytes == theirs.bytes


def test_a_dry_run_has_the_size_of_the_given_vocabulary(prepared: Path, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """Before and after data are prepared, in a folder that is there."""
    file = write(tmp_path, vocab={"model": str(prepared / "data"), "size": 8000})
    (tmp_path / "data").mkdir()
    said = []
    for command in (["--dry-run"], [], ["--dry-run"]):
        assert main("train" if command else "prepare", [file, *command]) == 0
        said.append(re.findall("# parameters +(.*)", capsys.readouterr().out))
    shapes = shapes_by_name(build_of(recipe_in(prepared), 300)).values()
    assert said[0] == said[2] == [f"{sum(map(math.prod, shapes)):,}"]


def test_prepared_text_is_compared(prepared: Path, refused: Refused) -> None:
    assert "data.length 24, but the recipe has 20" in refused("train", write(prepared), "data.length=20")
    assert "--part is 1/2" in refused("prepare", write(prepared), "--part", "1/2")
    assert "there is no prepared data in" in refused("train", write(prepared), "data.folder=nowhere")
    assert main("prepare", [write(prepared)]) == 0
    assert EncoderModel().decoder.layers == 0


RECIPES = sorted(file for file in (TEXT.parents[2] / "recipes" / "bert").glob("*.yaml")
                 if "task: masked_lm" in file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipes_pass_the_dry_run(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    """Each line of a recipe has a comment; the file's name ends with the depth."""
    for name in ("BERT_TEXT", "DEEPNMT_CORPORA"):
        monkeypatch.setenv(name, str(tmp_path))
    text = file.read_text(encoding="utf-8")
    assert all("# " in line for line in text.splitlines() if line.strip())
    assert main("train", [str(file), "--dry-run", f"data.folder={tmp_path}/none"]) == 0
    said = capsys.readouterr().out
    parameters = int(said.partition("# parameters")[2].split()[0].replace(",", ""))
    layers = load_recipe(file).model.encoder.layers
    assert file.stem.endswith(f"_{layers}l") and "not prepared yet" in said
    assert parameters > 100e6 if layers == 12 else parameters < 1e6
