"""BERT of Hugging Face: exported and imported with equal logits; other models are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from refusals import Refused
from safetensors.torch import load_file, save_file

from deepnmt.checkpoint.checkpoint import (
    Contents,
    TrainingState,
    load_weights,
    read_task_files,
    shapes_by_name,
    write_checkpoint,
)
from deepnmt.cli import main
from deepnmt.config import Vocab, check_recipe, dump_recipe, load_recipe
from deepnmt.data.vocab import Vocabulary, train_vocabulary
from deepnmt.extras.export import bert
from deepnmt.model.blocks import Block
from deepnmt.tasks.masked_lm.model import build_of
from deepnmt.tasks.masked_lm.settings import MaskedRecipe
from deepnmt.training.encoders import load_encoder

TEXT = Path(__file__).resolve().parents[2] / "fixtures" / "text" / "train.en"


def write_run(run: Path, **model: Any) -> None:
    """A run with random weights, as if it had been trained."""
    model = {"width": 16, "heads": 2, "ffn": 24, "max_length": 20, "encoder": {"layers": 2}, "decoder": None, **model}
    recipe = cast(MaskedRecipe, check_recipe({
        "run": str(run), "task": "masked_lm", "data": {"folder": "none", "train": "a", "valid": "a", "length": 20},
        "vocab": {"size": 100}, "model": model, "train": {"updates": 1}}, "test"))
    lines = TEXT.read_text(encoding="utf-8").splitlines()[:100]
    vocab = train_vocabulary(lines, Vocab(size=100), ["<mask>"])
    generator = torch.Generator().manual_seed(2)
    weights = {name: torch.randn(shape, generator=generator) / 2
               for name, shape in shapes_by_name(build_of(recipe, 100)).items()}
    state = TrainingState(1, 0, 0, 1, None, {}, {})
    files = {"src.spm": vocab, "trg.spm": vocab}
    write_checkpoint(run / "averaged", Contents(weights, None, state, dump_recipe(recipe), files))
    (run / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")


def test_export_and_import_are_inverse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The proof is printed; the folder imports into the same weights, vocabulary and model."""
    write_run(tmp_path / "run", activation="silu", norm_eps=1e-6, dropout=0.2, attention_dropout=0.0,
              initial_std=0.01)
    assert main("export", [str(tmp_path / "run"), "--to", "bert"]) == 0
    said = capsys.readouterr().out
    facts = json.loads((tmp_path / "run" / "bert" / "deepnmt.json").read_text())
    assert facts["proof"]["largest_difference"] < 1e-5 < 1 < facts["proof"]["largest_logit"] and "differ by" in said
    assert main("import", [str(tmp_path / "run" / "bert"), str(tmp_path / "again")]) == 0
    ours, theirs = (load_weights(tmp_path / name / "averaged") for name in ("run", "again"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert read_task_files(tmp_path / "run" / "averaged") == read_task_files(tmp_path / "again" / "averaged")
    models = [load_recipe(tmp_path / name).model.model_dump() for name in ("run", "again")]
    assert models[0] == models[1]


def test_layers_that_ramp_holds_back(tmp_path: Path, refused: Refused) -> None:
    """At update 1 of 10 a branch has a tenth of its weight, in what is loaded, too; transformers knows none."""
    write_run(tmp_path / "run", encoder={"layers": 1, "ramp": 10})
    model, _, _ = load_encoder(tmp_path / "run", cast(Any, build_of))
    assert [part.share for part in model.modules() if isinstance(part, Block)] == [0.1]
    assert "model.encoder.ramp is 10, so its 1 layers are whole from update 10 on" in refused(
        "export", tmp_path / "run", "--to", "bert")


def test_a_model_of_transformers_has_equal_logits(tmp_path: Path) -> None:
    """As published: eps 1e-12, a vocab.txt in another order, a next-sentence head beside it."""
    pieces = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##a", "##c", "the", "cat", "##s"]
    config = transformers.BertConfig(vocab_size=len(pieces), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                     intermediate_size=24, max_position_embeddings=12)
    torch.manual_seed(4)
    theirs = transformers.BertForPreTraining(config).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    assert main("import", [str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    model, _, vocab = load_encoder(tmp_path / "run", cast(Any, build_of))
    names = vocab.names()
    place = {"[UNK]": "<unk>", "[CLS]": "<s>", "[SEP]": "</s>", "[PAD]": "<pad>", "[MASK]": "<mask>",
             "[unused0]": "[1]"}
    for piece in pieces[6:]:
        place[piece] = piece[2:] if piece.startswith("##") else f"\u2581{piece}"
    order = torch.tensor([names.index(place[piece]) for piece in pieces])
    ids = torch.tensor([[3, 6, 8, 5, 11, 12, 4, 0], [3, 10, 4, 7, 4, 0, 0, 0]])
    lengths, segments = torch.tensor([7, 5]), torch.tensor([[0] * 8, [0, 0, 0, 1, 1, 0, 0, 0]])
    keep = torch.arange(8) < lengths[:, None]
    with torch.inference_mode():
        expected = theirs(input_ids=ids, attention_mask=keep.long(), token_type_ids=segments).prediction_logits
        found = bert.bert_logits(model, order[ids], lengths, segments)[..., order]
    torch.testing.assert_close(found[keep], expected[keep], rtol=0, atol=1e-5)
    assert Vocabulary(vocab.bytes).to_pieces(vocab.encode("the cats")) == ["\u2581the", "\u2581cat", "s"]


@pytest.mark.parametrize("uncased", [True, False])
def test_a_text_is_split_as_bert_splits_it(uncased: bool, tmp_path: Path) -> None:
    """Punctuation, Chinese, letters with accents, and capitals of which an uncased model knows none."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789ßé中国.,!?-—'$`|«»。"] + ([] if uncased else list("ATDCPÉÇ\u0301"))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    if not uncased:
        (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}', encoding="utf-8")
    theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=uncased)
    made, order = bert._vocabulary(tmp_path)
    ours = Vocabulary(made)
    for text in ("The cat sat.", "Don't pay $5, Élan!", "é e\u0301 ÇA — «straße»", "中国 a中b", "x`y|z \u00a0 a\tb",
                 "。Ç\u200ba?"):
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert [order[number] for number in ours.encode(text)] == expected, text


@pytest.mark.parametrize("model, expected", [
    ({"encoder": {"layers": 1, "block": "pre_ln"}}, "model.encoder.block is pre_ln, not post_ln"),
    ({"encoder": {"layers": 1, "block": "deepnorm"}}, "model.encoder.block is deepnorm"),
    ({"input_norm": False}, "model.input_norm is false"),
    ({"activation": "swiglu"}, "model.activation is swiglu, which Bert"),
])
def test_other_models_are_refused(model: dict[str, Any], expected: str, tmp_path: Path, refused: Refused) -> None:
    write_run(tmp_path / "run", **model)
    said = refused("export", tmp_path / "run", "--to", "bert")
    assert expected in said and "BertForMaskedLM of transformers does not compute" in said
    assert not (tmp_path / "run" / "bert").exists()


def test_weights_that_are_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    """An import has none, nor other things in their place, and a difference that is none is no proof."""
    write_run(tmp_path / "run")
    assert main("export", [str(tmp_path / "run"), "--to", "bert"]) == 0
    folder = tmp_path / "run" / "bert"
    (folder / "deepnmt.json").unlink()  # as if from elsewhere
    assert "--langs de en has no effect" in refused("import", folder, tmp_path / "again", "--langs", "de", "en")
    weights = load_file(folder / "model.safetensors")
    weights["cls.predictions.bias"][7] = float("nan")
    save_file(weights, folder / "model.safetensors")
    assert "has weights that are no numbers, in head.bias" in refused("import", folder, tmp_path / "again")
    (folder / "model.safetensors").unlink()
    one = torch.tensor(1.0)  # which has no shape
    key = {**weights, "bert.encoder.layer.0.attention.self.key.bias": one}
    for content in ([1], {1: one}, key, {**weights, "cls.predictions.bias": one}):
        torch.save(content, folder / "pytorch_model.bin")
        refused("import", folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    monkeypatch.setattr(bert, "_compare", lambda *_: (float("nan"), 1.0))
    assert "differ by nan" in refused("export", tmp_path / "run", "--to", "bert", "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_wrong_weight_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    write_run(tmp_path / "run")
    right = bert.to_bert

    def wrong(*arguments: Any) -> dict[str, torch.Tensor]:
        weights = right(*arguments)
        weights["cls.predictions.bias"][50] += 1e-3
        return weights

    monkeypatch.setattr(bert, "to_bert", wrong)
    assert "differ by" in refused("export", tmp_path / "run", "--to", "bert")
    assert not (tmp_path / "run" / "bert").exists()

    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    assert "has no number for 'hidden_size'" in refused("import", tmp_path / "hf", tmp_path / "new")
    assert "run/recipe.yaml cannot be written: File exists; set RUN to" in refused(
        "import", tmp_path / "hf", tmp_path / "run" / "recipe.yaml" / "new")
