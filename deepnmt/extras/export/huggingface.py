"""Writes a model for the library transformers: Post-LN as MarianMTModel, Pre-LN as PegasusForConditionalGeneration.

Both have deepnmt's position table. Where a stack has another one, because a gain is folded into it or the stack is
norm-free, the table is in the file of the weights; `from_pretrained` reads it from there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from deepnmt.checkpoint.checkpoint import LoadedModel
from deepnmt.config import Translate
from deepnmt.errors import UserError
from deepnmt.extras.export.exported import never_written
from deepnmt.extras.export.plain import Pair, Plain, to_plain
from deepnmt.extras.export.proof import Ids, padded
from deepnmt.model.blocks import SIDES
from deepnmt.tokens import BOS, EOS, PAD

POSITIONS = 1024  # at least
transformers.utils.logging.disable_progress_bar()  # beside deepnmt's own lines
_CLASSES = {"post_ln": ("marian", "MarianMTModel"), "pre_ln": ("pegasus", "PegasusForConditionalGeneration")}


def write_huggingface(loaded: LoadedModel, folder: Path, precision: str) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer's files.

    Raises:
        UserError: one stack is Post-LN and the other is not, or see `to_plain`.
    """
    del precision
    plain, settings = to_plain(loaded, "transformers"), loaded.recipe.model
    kinds = {plain.kind(side) for side in SIDES}
    widths = {plain.width(side) for side in SIDES}
    separate = loaded.src_vocab.bytes != loaded.trg_vocab.bytes
    if len(kinds) + len(widths) > 2 or (separate and "pre_ln" in kinds):
        two = "model.encoder.block is a Pre-LN and the vocabularies are two"
        what = settings.blocks if len(kinds) + len(widths) > 2 else two
        raise UserError(f"{what}, for which transformers has no class; export the model with --to ctranslate2 or onnx")
    model_type, name = _CLASSES[kinds.pop()]
    weights = _weights(plain)
    plain.require_all_used("transformers")
    tied = len(set(settings.tables.values())) == 1 and not any(plain.has_gain(side) for side in SIDES)
    if tied:
        weights["model.shared.weight"] = weights.pop("model.encoder.embed_tokens.weight")
        del weights["model.decoder.embed_tokens.weight"], weights["lm_head.weight"]
    elif model_type == "pegasus":  # computes nothing here, but `from_pretrained` would miss it
        weights["model.shared.weight"] = weights["model.encoder.embed_tokens.weight"].clone()
    rows = max(settings.max_length, POSITIONS)
    for side in SIDES:
        if plain.has_gain(side):
            weights[f"model.{side}.embed_positions.weight"] = _fp32(plain.positions(side, rows))
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "decoder_start_token_id": BOS,
           "forced_eos_token_id": None}
    shapes: dict[str, int] = {}
    for side in SIDES:
        shapes |= {f"{side}_layers": settings.stack(side).layers, f"{side}_attention_heads": plain.heads(side),
                   f"{side}_ffn_dim": settings.shape(side).ffn}
    config: dict[str, Any] = {
        "model_type": model_type, "architectures": [name], "d_model": widths.pop(), **shapes,
        "activation_function": settings.activation, "dropout": settings.dropout,
        "attention_dropout": settings.attention_dropout, "activation_dropout": settings.activation_dropout,
        "scale_embedding": plain.scaled("encoder"), "max_position_embeddings": rows,
        "vocab_size": loaded.src_vocab.size, "tie_word_embeddings": tied, **ids,
    }
    if model_type == "marian":
        config |= {"decoder_vocab_size": loaded.trg_vocab.size, "share_encoder_decoder_embeddings": tied}
    generation = {**ids, "num_beams": 5, "length_penalty": 1.0, "early_stopping": True,
                  "max_length": settings.max_length, "suppress_tokens": never_written(loaded.trg_vocab)}
    data = loaded.recipe.data
    tokenizer = {"tokenizer_class": "MarianTokenizer", "source_lang": data.src_lang, "target_lang": data.trg_lang,
                 "unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>", "separate_vocabs": separate,
                 "model_max_length": settings.max_length, "additional_special_tokens": [*loaded.src_vocab.tags]}
    texts: dict[str, Any] = {"config.json": config, "generation_config.json": generation,
                             "tokenizer_config.json": tokenizer, "vocab.json": _ids(loaded.src_vocab.names())}
    if separate:
        texts["target_vocab.json"] = _ids(loaded.trg_vocab.names())
    for file, content in texts.items():
        (folder / file).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
    (folder / "source.spm").write_bytes(loaded.src_vocab.bytes)
    (folder / "target.spm").write_bytes(loaded.trg_vocab.bytes)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _ids(names: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _weights(plain: Plain) -> dict[str, Tensor]:
    """The weights under the names of both classes."""
    weights: dict[str, Tensor] = {}

    def put(name: str, values: Pair) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = map(_fp32, values)

    for side in SIDES:
        weights[f"model.{side}.embed_tokens.weight"] = _fp32(plain.table(side))
        for index in range(plain.model.stack(side).layers):
            ours, theirs = f"{side}.layers.{index}", f"model.{side}.layers.{index}"
            attentions = [("self_attn", "self_attn", {"qkv": "qkv"})]
            if side == "decoder":
                attentions.append(("cross_attn", "encoder_attn", {"q": "q", "kv": "kv"}))
            for number, (name, their_name, inputs) in enumerate(attentions):
                for matrix, letters in inputs.items():
                    weight, bias = plain.linear(f"{ours}.{name}.{matrix}")
                    width = len(weight) // len(letters)
                    for part, letter in enumerate(letters):
                        rows = slice(part * width, (part + 1) * width)
                        put(f"{theirs}.{their_name}.{letter}_proj", (weight[rows], bias[rows]))
                put(f"{theirs}.{their_name}.out_proj", plain.linear(f"{ours}.{name}.out"))
                put(f"{theirs}.{their_name}_layer_norm", plain.norm(f"{ours}.rule.norms.{number}"))
            put(f"{theirs}.final_layer_norm", plain.norm(f"{ours}.rule.norms.{len(attentions)}"))
            for matrix in ("fc1", "fc2"):
                put(f"{theirs}.{matrix}", plain.linear(f"{ours}.ffn.{matrix}"))
        if plain.kind(side) == "pre_ln":
            put(f"model.{side}.layer_norm", plain.norm(f"{side}.norm"))
    weight, bias = plain.output()
    weights["lm_head.weight"], weights["final_logits_bias"] = _fp32(weight), _fp32(bias[None])
    return weights


def _fp32(values: Any) -> Tensor:
    return torch.from_numpy(values).float().contiguous()


class Engine:
    """The exported model as `proof.py` asks it."""

    def __init__(self, loaded: LoadedModel, folder: Path, precision: str) -> None:
        del precision
        self._model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._model.generation_config.suppress_tokens = None  # the models are compared by all of their tokens

    @torch.inference_mode()
    def score(self, sources: Ids, targets: Ids) -> list[list[float]]:
        src, lengths = padded(sources)
        inputs, _ = padded([[BOS, *target] for target in targets])
        logits = self._model(input_ids=src, attention_mask=_mask(src, lengths), decoder_input_ids=inputs).logits
        logs = logits.float().log_softmax(-1)
        return [row[range(len(target) + 1), [*target, EOS]].tolist() for row, target in zip(logs, targets, strict=True)]

    @torch.inference_mode()
    def search(self, sources: Ids, limit: int, settings: Translate) -> list[list[int]]:
        src, lengths = padded(sources)
        beams = settings.beam if settings.method == "beam" else 1
        best = self._model.generate(
            input_ids=src, attention_mask=_mask(src, lengths), max_length=1 + limit, min_new_tokens=settings.min_length,
            num_beams=beams, do_sample=False, early_stopping=beams > 1, length_penalty=settings.alpha)
        return [_without_end(row) for row in best[:, 1:].tolist()]


def _without_end(tokens: list[int]) -> list[int]:
    for place, token in enumerate(tokens):
        if token in (EOS, PAD):
            return tokens[:place]
    return tokens


def _mask(src: Tensor, lengths: Tensor) -> Tensor:
    return (torch.arange(src.size(1)) < lengths[:, None]).long()
