"""Models of Marian and fairseq, built here, have the same logits once they are imported, and can be fine-tuned."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import TEXTS, fairseq_folder, opus_folder, pieces, spm
from refusals import Refused
from safetensors.torch import load_file, save_file
from test_export import loaded_of, target
from test_folding import shapes
from torch import Tensor

from deepnmt.checkpoint.checkpoint import load_model
from deepnmt.cli import main
from deepnmt.config import with_settings


def ours(run: Path, source: str, target: str) -> tuple[Tensor, list[str]]:
    """Logits without pad's for a pair, teacher forced, by the target's pieces."""
    loaded = load_model(run)
    src = torch.tensor([[*loaded.src_vocab.encode(source), 2]])
    trg, lengths = torch.tensor([[1, *loaded.trg_vocab.encode(target)]]), torch.tensor([src.size(1)])
    with torch.no_grad():
        logits = loaded.model.logits(loaded.model.decode(trg, loaded.model.encode(src, lengths), lengths))[0]
    return logits, loaded.trg_vocab.names()


def marian_folder(folder: Path, separate: bool = False) -> tuple[Any, tuple[dict[str, int], dict[str, int]]]:
    """A folder in the layout of OPUS-MT: two SentencePiece models, ids, an output bias, pickled weights; the model, and
    the ids of source and target. `separate`: with two vocabularies, and a start that is no id of the source."""
    transformers = pytest.importorskip("transformers", reason="pip install 'deepnmt[huggingface]'")
    models = [spm(TEXTS[lang], 40) for lang in ("de", "en")]
    folder.mkdir()
    names = [dict.fromkeys(pieces(model)) for model in models]
    if not separate:
        names = [names[0] | names[1]] * 2
    source, target = ({"</s>": 0, "<unk>": 1, **{name: number for number, name in enumerate(some, start=2)}}
                      for some in names)
    for number in range((len(source) - len(target) + 3) * separate):
        target[f"more{number}"] = len(target)
    source["<pad>"], target["<pad>"] = len(source), len(target)
    more = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": len(target)} if separate else {}
    config = transformers.MarianConfig(
        vocab_size=len(source), d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=20, activation_function="swish",
        attention_dropout=0.2, activation_dropout=0.3, scale_embedding=True, max_position_embeddings=64,
        pad_token_id=source["<pad>"], decoder_start_token_id=target["<pad>"], eos_token_id=0,
        tie_word_embeddings=not separate, **more)
    theirs = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
        theirs.final_logits_bias.copy_(torch.randn(1, len(target), generator=torch.Generator().manual_seed(6)))
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if "embed_positions" not in name}
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "normalize_before": False}))
    (folder / "vocab.json").write_text(json.dumps(source))
    if separate:
        (folder / "target_vocab.json").write_text(json.dumps(target))
    (folder / "tokenizer_config.json").write_text(json.dumps({"source_lang": "de", "target_lang": "en",
                                                              "separate_vocabs": separate}))
    for name, model in zip(("source.spm", "target.spm"), models, strict=True):
        (folder / name).write_bytes(model)
    return theirs, (source, target)


@pytest.mark.parametrize("separate", [False, True])
def test_marian_has_the_same_logits(separate: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one table of ids, and with two, where translations begin with an id that the source's table lacks."""
    folder, run = tmp_path / "opus", tmp_path / "run"
    theirs, ids = marian_folder(folder, separate)
    start = ids[1]["<pad>"]
    assert not separate or start >= len(ids[0])
    assert main("import", [str(folder), str(run)]) == 0
    assert "2 encoder and 1 decoder layers (post_ln) of width 16" in capsys.readouterr().out
    source, target = "der kleine hund rennt", "a small dog runs"
    loaded = load_model(run)
    src, trg = ([by_name[vocab.names()[i]] for i in vocab.encode(text)] for by_name, vocab, text in
                zip(ids, loaded.vocabs, (source, target), strict=True))
    if not separate:
        transformers = pytest.importorskip("transformers")
        tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
        assert tokenizer(source)["input_ids"] == [*src, 0]
        assert tokenizer(text_target=target)["input_ids"] == [*trg, 0]
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor([[*src, 0]]), decoder_input_ids=torch.tensor([[start, *trg]])).logits[0]
    logits, known = ours(run, source, target)
    compared = [i for i, name in enumerate(known) if name not in ("<s>", "<pad>")]
    assert len(compared) == len(ids[1]) - 1
    torch.testing.assert_close(logits[:, compared], wanted[:, [ids[1][known[i]] for i in compared]], rtol=0, atol=1e-5)
    assert loaded.recipe.data.src_lang == "de"
    assert (loaded.recipe.model.attention_dropout, loaded.recipe.model.activation_dropout) == (0.2, 0.3)


def test_languages_and_tags_of_a_marian_model_are_tags(tmp_path: Path) -> None:
    """As in OPUS-MT's models of several languages, in a model's own list, and in what deepnmt exported."""
    folder = tmp_path / "opus"
    _, (ids, _) = marian_folder(folder)
    names = list(ids)
    renamed = {">>fra<<": ids.pop(names[-3]), "<2de>": ids.pop(names[-2])}  # two pieces of the shared table
    (folder / "vocab.json").write_text(json.dumps({**ids, **renamed}))
    told = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**told, "additional_special_tokens": ["<2de>"]}))
    assert main("import", [str(folder), str(tmp_path / "run")]) == 0
    loaded = load_model(tmp_path / "run")
    for vocab in loaded.vocabs:
        assert vocab.tags.keys() == renamed.keys()
        plain = vocab.encode("der kleine hund")
        assert vocab.encode(">>fra<< <2de> der kleine hund") == [vocab.tags[">>fra<<"], vocab.tags["<2de>"], *plain]
    exported = tmp_path / "exported"
    exported.mkdir()
    target("huggingface").write(loaded, exported, "fp32")
    assert json.loads((exported / "generation_config.json").read_text())["suppress_tokens"] == [
        0, 1, 3, *loaded.trg_vocab.tags.values()]
    assert main("import", [str(exported), str(tmp_path / "again")]) == 0
    assert load_model(tmp_path / "again").trg_vocab.tags == loaded.trg_vocab.tags


@pytest.mark.parametrize(("block", "settings"), [
    ("post_ln", {}), ("admin", {}), ("post_ln", {"positions": "fairseq"}),
    ("deepnorm", {"positions": "fairseq", "encoder.input_gain": True})])
def test_an_export_of_deepnmts_own_has_the_same_logits(
    block: str, settings: dict[str, Any], tmp_path: Path, refused: Refused
) -> None:
    """Positions and ω_1 are in the file's tables of positions; other tables are refused."""
    loaded = loaded_of(with_settings(shapes(block, block), settings), tmp_path)
    folder, run = tmp_path / "exported", tmp_path / "again"
    folder.mkdir()
    target("huggingface").write(loaded, folder, "fp32")
    assert main("import", [str(folder), str(run)]) == 0
    again = load_model(run)
    src, trg, lengths = torch.tensor([[9, 5, 31, 2]]), torch.tensor([[1, 8, 8, 30]]), torch.tensor([4])
    with torch.no_grad():
        wanted, found = (model.logits(model.decode(trg, model.encode(src, lengths), lengths))
                         for model in (loaded.model, again.model))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    if settings:
        weights = load_file(folder / "model.safetensors")
        weights["model.encoder.embed_positions.weight"][3, 5] += 0.1
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        assert "the model's position vectors are no sinusoids" in refused("import", folder, tmp_path / "other")


@pytest.mark.parametrize("pre", [False, True])
def test_fairseq_has_the_same_logits(pre: bool, tmp_path: Path) -> None:
    inside = "activation_dropout" if pre else "relu_dropout"
    theirs, symbols = fairseq_folder(tmp_path / "fairseq", pre, **{"attention_dropout": 0.2, inside: 0.3})
    run = tmp_path / "run"
    assert main("import", [str(tmp_path / "fairseq"), str(run)]) == 0
    number = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **{name: i for i, name in enumerate(symbols, start=4)}}
    loaded = load_model(run)
    source, target = "der kleine hund rennt zum haus", "a small dog runs"
    src, trg = ([number[vocab.names()[i]] for i in vocab.encode(text)]
                for vocab, text in zip(loaded.vocabs, (source, target), strict=True))
    wanted = theirs([*src, 2], [2, *trg])  # fairseq begins with </s>
    logits, known = ours(run, source, target)
    compared = [i for i, name in enumerate(known) if name != "<pad>"]
    torch.testing.assert_close(logits[:, compared], wanted[:, [number[known[i]] for i in compared]], rtol=0, atol=1e-5)
    model = loaded.recipe.model
    assert model.encoder.block == ("pre_ln" if pre else "post_ln")
    assert (model.dropout, model.attention_dropout, model.activation_dropout) == (0.1, 0.2, 0.3)
    best = tmp_path / "fairseq" / "checkpoint_best.pt"
    (tmp_path / "fairseq" / "checkpoint9.pt").write_bytes(b"older")
    for number, name in enumerate(("checkpoint10.pt", "checkpoint_last.pt")):  # without the best, the last
        best = best.rename(best.with_name(name))
        assert main("import", [str(tmp_path / "fairseq"), str(tmp_path / f"again{number}")]) == 0


def test_dictionaries_that_a_fairseq_checkpoint_does_not_name(
    tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = tmp_path / "fairseq", tmp_path / "run"
    fairseq_folder(folder, pre=False, source_lang=None, target_lang=None)
    assert "neither dict.src.txt nor dict.txt; give the whole folder, with --langs" in refused("import", folder, run)
    short = (folder / "dict.en.txt").read_text("utf-8").splitlines(True)[5:]
    (folder / "dict.en.txt").write_text("".join(short), "utf-8")
    assert main("import", [str(folder), str(run), "--langs", "de", "en"]) == 0
    assert "dict.en.txt has 32 symbols, but the model 37; the others are never used" in capsys.readouterr().err


def test_an_imported_model_is_fine_tuned_translated_with_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fairseq_folder(tmp_path / "fairseq", pre=False)
    assert main("import", ["fairseq", "old"]) == 0
    for split in ("train", "valid"):
        for lang, lines in TEXTS.items():
            Path(f"{split}.{lang}").write_text("".join(f"{line} {i}\n" for i, line in enumerate(lines)), "utf-8")
    words = ["old/recipe.yaml", "run=new", "train.init_from=old", "data.workers=1"]
    assert main("prepare", words) == 0
    assert main("train", [*words, "train.updates=2", "train.save_every=2", "train.valid_bleu=false",
                          "schedule.warmup=1", "parallel.threads=1"]) == 0
    old, new = (load_model(Path(name)).model.get_parameter("encoder.layers.0.ffn.fc1.weight") for name in
                ("old", "new"))
    assert 0 < (old - new).abs().max() < 0.05
    assert main("translate", ["old", "--input", "train.de", "--output", "out"]) == 0
    assert len(Path("out").read_text("utf-8").splitlines()) == 8
    pytest.importorskip("ctranslate2", reason="pip install 'deepnmt[ctranslate2]'")
    assert main("export", ["old", "--to", "ctranslate2", "--lines", "8"]) == 0


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch harmed",)


def test_no_pickle_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.chdir(tmp_path)
    fairseq_folder(tmp_path / "fairseq", pre=False)
    torch.save({"model": {}, "args": Harm()}, tmp_path / "fairseq" / "checkpoint_best.pt")
    said = refused("import", "fairseq", "run")
    assert "checkpoint_best.pt cannot be read (it is damaged, or its pickle holds more than weights" in said
    assert "weights_only" not in said and "trust" not in said
    assert not (tmp_path / "harmed").exists() and not (tmp_path / "run").exists()


def test_models_that_deepnmt_cannot_compute_are_refused(tmp_path: Path, refused: Refused) -> None:
    fairseq_folder(tmp_path / "learned", pre=False, decoder_learned_pos=True)
    assert "was trained with decoder_learned_pos=True" in refused("import", tmp_path / "learned", tmp_path / "run")
    fairseq_folder(tmp_path / "many", pre=True, decoder_langtok=True)
    assert "was trained with decoder_langtok=True" in refused("import", tmp_path / "many", tmp_path / "run")
    fairseq_folder(tmp_path / "bpe", pre=False)
    (tmp_path / "bpe" / "sentencepiece.bpe.model").unlink()
    assert "has no sentencepiece.bpe.model" in refused("import", tmp_path / "bpe", tmp_path / "run")
    (tmp_path / "bart").mkdir()
    (tmp_path / "bart" / "config.json").write_text('{"model_type": "bart"}')
    assert "is of a bart model" in refused("import", tmp_path / "bart", tmp_path / "run")
    (tmp_path / "bart" / "config.json").write_text('{"bos_token": "<s>"}')  # as of CTranslate2
    assert "config.json has no model_type" in refused("import", tmp_path / "bart", tmp_path / "run")
    assert "exists already" in refused("import", tmp_path / "bpe", tmp_path / "bart")
    (tmp_path / "empty").mkdir()
    assert "has neither a config.json" in refused("import", tmp_path / "empty", tmp_path / "run")


def refused_with(content: Any, file: Path, refused: Refused) -> None:
    """A folder is no model any more, and no run comes of it, if one of its files has this content."""
    if isinstance(content, str):
        file.write_bytes(content.encode("latin-1"))
    else:
        torch.save(content, file)
    run = file.parent.with_name("run")
    refused("import", file.parent, run)
    assert not run.exists()


CONFIG_FAULTS = ["[]", "null", "3", "{}", '{"model_type": "marian"}', "{", "\xff"]
VOCAB_FAULTS = ["[]", '{"a": "1"}x', '{"<unk>": "one"}', '{"</s>": 0, "<pad>": 2}',
                '{"</s>": 0, "<unk>": 1, "<pad>": 2, "x": 900}', '{"</s>": 0, "<unk>": 1, "<pad>": -2}']


@pytest.mark.parametrize(("file", "content"), [
    *[("config.json", text) for text in CONFIG_FAULTS], *[("vocab.json", text) for text in VOCAB_FAULTS],
    ("source.spm", "garbage"), ("target.spm", ""), ("tokenizer_config.json", "[]"),
    ("tokenizer_config.json", '{"source_lang": "../../x"}'), ("model.safetensors", "garbage"),
    ("pytorch_model.bin", []), ("pytorch_model.bin", {}), ("pytorch_model.bin", {"a": 3}), ("pytorch_model.bin", 3),
    ("pytorch_model.bin", {"lm_head.weight": torch.ones(3)}), ("pytorch_model.bin", {"a": torch.ones(1).int()}),
    ("pytorch_model.bin", {"lm_head.weight": torch.ones(1, 1).expand(10**9, 10**3)}),
], ids=range(25))
def test_a_marian_folder_that_is_none(tmp_path: Path, refused: Refused, file: str, content: Any) -> None:
    opus_folder(tmp_path / "opus")
    if file == "pytorch_model.bin":
        (tmp_path / "opus" / "model.safetensors").unlink()
    refused_with(content, tmp_path / "opus" / file, refused)


@pytest.mark.parametrize(("file", "content"), [
    ("checkpoint_best.pt", []), ("checkpoint_best.pt", {"args": {"encoder_layers": 2}, "model": {}}),
    ("checkpoint_best.pt", {"args": {"encoder_layers": 2}, "model": torch.ones(1)}), ("checkpoint_best.pt", "garbage"),
    ("checkpoint_best.pt", {"cfg": [], "model": {}}), ("dict.de.txt", "\xff\xfe 7\n"),
    ("sentencepiece.bpe.model", "garbage"),
], ids=range(7))
def test_a_fairseq_folder_that_is_none(tmp_path: Path, refused: Refused, file: str, content: Any) -> None:
    fairseq_folder(tmp_path / "fairseq", pre=False)
    refused_with(content, tmp_path / "fairseq" / file, refused)
