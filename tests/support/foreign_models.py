"""Folders of models as fairseq and OPUS-MT leave them, small and written here from their formats."""

from __future__ import annotations

import argparse
import io
import json
import math
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

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


def opus_folder(folder: Path) -> None:
    """A Marian model in the layout of OPUS-MT, with the weights of a `Fairseq`, whose names it shares."""
    theirs, symbols = fairseq_folder(folder, pre=False)
    weights = {f"model.{name}": tensor.contiguous() for name, tensor in theirs.w.items()
               if not name.endswith(("version", "_float_tensor", "output_projection.weight"))}
    weights["lm_head.weight"] = theirs.w["decoder.output_projection.weight"].contiguous()
    weights["final_logits_bias"] = torch.linspace(-1, 1, len(symbols) + 4)[None]
    save_file(weights, folder / "model.safetensors")
    model = (folder / "sentencepiece.bpe.model").read_bytes()
    for file in folder.iterdir():
        if file.name != "model.safetensors":
            file.unlink()
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(model)
    ids = {"</s>": 0, "<unk>": 1, **{name: number for number, name in enumerate(symbols, start=2)}}
    ids |= {"<more>": len(ids), "<pad>": len(ids) + 1}
    config = {"model_type": "marian", "d_model": 16, "activation_function": "swish", "scale_embedding": True,
              "max_position_embeddings": 64, "decoder_start_token_id": ids["<pad>"], "dropout": 0.1}
    for side in ("encoder", "decoder"):
        config |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 24}
    for name, content in (("config.json", config), ("vocab.json", ids),
                          ("tokenizer_config.json", {"source_lang": "de", "target_lang": "en"})):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
