"""Models of Marian and fairseq, built here, have the same logits once they are imported, and can be fine-tuned."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from refusals import Refused
from torch import Tensor, nn
from torch.nn import functional as F

from deepnmt.checkpoint.checkpoint import load_model
from deepnmt.cli import main

TEXTS = {"de": ["der kleine hund sieht ein rotes haus", "eine katze rennt zum alten baum"] * 4,
         "en": ["the small dog sees a red house", "a cat runs to the old tree"] * 4}


def spm(text: list[str], size: int) -> bytes:
    """As OPUS-MT and fairseq users train it: unk 0, bos 1, eos 2, no pad."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(text), model_writer=model, vocab_size=size,
                                             hard_vocab_limit=False, minloglevel=2)
    return model.getvalue()


def pieces(model: bytes) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]


def ours(run: Path, source: str, target: str) -> tuple[Tensor, list[str]]:
    """Logits without pad's for a pair, teacher forced, by the target's pieces."""
    loaded = load_model(run)
    src = torch.tensor([[*loaded.src_vocab.encode(source), 2]])
    trg, lengths = torch.tensor([[1, *loaded.trg_vocab.encode(target)]]), torch.tensor([src.size(1)])
    with torch.no_grad():
        logits = loaded.model.logits(loaded.model.decode(trg, loaded.model.encode(src, lengths), lengths))[0]
    return logits, loaded.trg_vocab.names()


def test_marian_has_the_same_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the layout of OPUS-MT: two SentencePiece models, one table of ids, an output bias, pickled weights."""
    transformers = pytest.importorskip("transformers", reason="pip install 'deepnmt[huggingface]'")
    folder, models = tmp_path / "opus", [spm(TEXTS[lang], 40) for lang in ("de", "en")]
    folder.mkdir()
    names = dict.fromkeys([*pieces(models[0]), *pieces(models[1])])
    ids = {"</s>": 0, "<unk>": 1, **{name: number for number, name in enumerate(names, start=2)}}
    ids["<pad>"] = len(ids)
    pad = ids["<pad>"]
    config = transformers.MarianConfig(
        vocab_size=len(ids), d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=20, activation_function="swish",
        scale_embedding=True, max_position_embeddings=64, pad_token_id=pad, decoder_start_token_id=pad, eos_token_id=0)
    theirs = transformers.MarianMTModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
        theirs.final_logits_bias.copy_(torch.randn(1, len(ids), generator=torch.Generator().manual_seed(6)))
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if "embed_positions" not in name}
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "normalize_before": False}))
    (folder / "vocab.json").write_text(json.dumps(ids))
    (folder / "tokenizer_config.json").write_text(json.dumps({"source_lang": "de", "target_lang": "en"}))
    for name, model in zip(("source.spm", "target.spm"), models, strict=True):
        (folder / name).write_bytes(model)

    run = tmp_path / "run"
    assert main("import", [str(folder), str(run)]) == 0
    assert "2 encoder and 1 decoder layers (post_ln) of width 16" in capsys.readouterr().out
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    source, target = "der kleine hund rennt", "a small dog runs"
    src, trg = tokenizer(source)["input_ids"], tokenizer(text_target=target)["input_ids"]
    loaded = load_model(run)
    for vocab, text, mine in ((loaded.src_vocab, source, src), (loaded.trg_vocab, target, trg)):
        assert [ids[vocab.names()[i]] for i in vocab.encode(text)] == mine[:-1]
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor([src]), decoder_input_ids=torch.tensor([[pad, *trg[:-1]]])).logits[0]
    logits, known = ours(run, source, target)
    compared = [i for i, name in enumerate(known) if name not in ("<s>", "<pad>")]
    assert len(compared) == len(ids) - 1
    torch.testing.assert_close(logits[:, compared], wanted[:, [ids[known[i]] for i in compared]], rtol=0, atol=1e-5)
    assert loaded.recipe.data.src_lang == "de"


class Fairseq(nn.Module):
    """fairseq's Transformer under its names, written from the papers: the reference, and what writes a checkpoint."""

    def __init__(self, size: int, width: int, pre: bool) -> None:
        super().__init__()
        self.pre, self.width = pre, width
        draw = torch.Generator().manual_seed(3)

        def linear(rows: int, columns: int) -> dict[str, Tensor]:
            return {"weight": torch.randn(rows, columns, generator=draw) / columns**0.5,
                    "bias": 0.1 * torch.randn(rows, generator=draw)}

        def norm() -> dict[str, Tensor]:
            return {"weight": 1 + 0.2 * torch.randn(width, generator=draw),
                    "bias": 0.2 * torch.randn(width, generator=draw)}

        self.w: dict[str, Tensor] = {}
        for side in ("encoder", "decoder"):
            self.w[f"{side}.embed_tokens.weight"] = torch.randn(size, width, generator=draw) * width**-0.5
            self.w[f"{side}.version"] = torch.tensor([3.0])
            self.w[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
            for i in range(2):
                layer = f"{side}.layers.{i}"
                parts: dict[str, dict[str, Tensor]] = {"fc1": linear(24, width), "fc2": linear(width, 24)}
                for attention in ["self_attn", *(["encoder_attn"] if side == "decoder" else [])]:
                    for letter in ("q", "k", "v", "out"):
                        parts[f"{attention}.{letter}_proj"] = linear(width, width)
                    parts[f"{attention}_layer_norm"] = norm()
                parts["final_layer_norm"] = norm()
                self.w |= {f"{layer}.{part}.{kind}": value for part, values in parts.items()
                           for kind, value in values.items()}
            if pre:
                self.w |= {f"{side}.layer_norm.{kind}": value for kind, value in norm().items()}
        self.w["decoder.output_projection.weight"] = torch.randn(size, width, generator=draw) * width**-0.5

    def embed(self, side: str, ids: Tensor) -> Tensor:
        """Positions from 2 on, rates of tensor2tensor (fairseq's SinusoidalPositionalEmbedding documents them)."""
        half = self.width // 2
        rates = torch.exp(torch.arange(half, dtype=torch.float) * -(math.log(10000) / (half - 1)))
        angles = torch.arange(2, len(ids) + 2)[:, None] * rates
        return math.sqrt(self.width) * self.w[f"{side}.embed_tokens.weight"][ids] + torch.cat(
            [angles.sin(), angles.cos()], 1)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def attend(self, name: str, x: Tensor, memory: Tensor, causal: bool) -> Tensor:
        q, k, v = (self.linear(f"{name}.{letter}_proj", y).unflatten(-1, (2, -1)).transpose(0, 1)
                   for letter, y in (("q", x), ("k", memory), ("v", memory)))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.size(-1))
        if causal:
            scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        return self.linear(f"{name}.out_proj", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.width,), self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def stack(self, side: str, x: Tensor, memory: Tensor | None) -> Tensor:
        for i in range(2):
            name = f"{side}.layers.{i}"
            branches: list[tuple[str, Any]] = [
                ("self_attn_layer_norm", lambda h, n=name: self.attend(f"{n}.self_attn", h, h, memory is not None))]
            if memory is not None:
                branches.append(("encoder_attn_layer_norm",
                                 lambda h, n=name: self.attend(f"{n}.encoder_attn", h, memory, False)))
            branches.append(("final_layer_norm",
                             lambda h, n=name: self.linear(f"{n}.fc2", self.linear(f"{n}.fc1", h).relu())))
            for norm, branch in branches:
                x = (x + branch(self.norm(f"{name}.{norm}", x)) if self.pre
                     else self.norm(f"{name}.{norm}", x + branch(x)))
        return self.norm(f"{side}.layer_norm", x) if self.pre else x

    def forward(self, src: list[int], trg: list[int]) -> Tensor:
        memory = self.stack("encoder", self.embed("encoder", torch.tensor(src)), None)
        x = self.stack("decoder", self.embed("decoder", torch.tensor(trg)), memory)
        return x @ self.w["decoder.output_projection.weight"].t()


def fairseq_folder(folder: Path, pre: bool, **settings: Any) -> tuple[Fairseq, list[str]]:
    """A folder as fairseq and its users leave it; the symbols of its dictionary."""
    folder.mkdir(parents=True)
    model = spm(TEXTS["de"] + TEXTS["en"], 60)
    symbols = pieces(model)
    for lang in ("de", "en"):
        (folder / f"dict.{lang}.txt").write_text("".join(f"{symbol} 7\n" for symbol in symbols), encoding="utf-8")
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    theirs = Fairseq(len(symbols) + 4, 16, pre)
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
             (("layers", 2), ("attention_heads", 2), ("ffn_embed_dim", 24), ("embed_dim", 16),
              ("normalize_before", pre), ("learned_pos", False))}
    args = argparse.Namespace(**{"arch": "transformer", "activation_fn": "relu", "dropout": 0.1, "source_lang": "de",
                                 "target_lang": "en", "max_source_positions": 64, "max_target_positions": 64, **sizes,
                                 **settings})
    content = {"args": None, "cfg": {"model": args}, "model": theirs.w, "extra_state": {"epoch": 3},
               "optimizer_history": [], "last_optimizer_state": None}
    torch.save(content if pre else {**content, "args": args, "cfg": None}, folder / "checkpoint_best.pt")
    return theirs, symbols


@pytest.mark.parametrize("pre", [False, True])
def test_fairseq_has_the_same_logits(pre: bool, tmp_path: Path) -> None:
    theirs, symbols = fairseq_folder(tmp_path / "fairseq", pre)
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
    assert loaded.recipe.model.encoder.block == ("pre_ln" if pre else "post_ln")


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
    assert "checkpoint_best.pt cannot be read" in refused("import", "fairseq", "run")
    assert not (tmp_path / "harmed").exists() and not (tmp_path / "run").exists()


def test_models_that_deepnmt_cannot_compute_are_refused(tmp_path: Path, refused: Refused) -> None:
    fairseq_folder(tmp_path / "learned", pre=False, decoder_learned_pos=True)
    assert "was trained with decoder_learned_pos=True" in refused("import", tmp_path / "learned", tmp_path / "run")
    fairseq_folder(tmp_path / "bpe", pre=False)
    (tmp_path / "bpe" / "sentencepiece.bpe.model").unlink()
    assert "has no sentencepiece.bpe.model" in refused("import", tmp_path / "bpe", tmp_path / "run")
    (tmp_path / "bart").mkdir()
    (tmp_path / "bart" / "config.json").write_text('{"model_type": "bart"}')
    assert "is of a bart model" in refused("import", tmp_path / "bart", tmp_path / "run")
    assert "exists already" in refused("import", tmp_path / "bpe", tmp_path / "bart")
    (tmp_path / "empty").mkdir()
    assert "has neither a config.json" in refused("import", tmp_path / "empty", tmp_path / "run")
