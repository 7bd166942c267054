"""Imports models of Marian (as OPUS-MT publishes them, in Hugging Face's layout) and of fairseq into a run.

Their vocabularies become SentencePiece models with deepnmt's four special ids; a piece that only the other side's text
is segmented into is marked as unused. The three tables are separate (`tied: none`), because both programs begin a
translation with another token than deepnmt, and because an output bias goes into the output table: a LayerNorm's output
h = γ z + β has Σ z = 0, so Σ h / γ = Σ β / γ for every token, and b / (Σ β / γ) · 1 / γ, added to a row, adds b to its
logit. Where that sum is small, a multiple s γ is first added to β, and s times the product of γ and the row taken from
its bias.

No pickle is executed: `torch.load` reads weights only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sentencepiece import sentencepiece_model_pb2
from torch import Tensor

from deepnmt.checkpoint.checkpoint import Contents, TrainingState, write_checkpoint
from deepnmt.config import Recipe, check_recipe, dump_recipe
from deepnmt.data.vocab import Vocabulary
from deepnmt.errors import UserError
from deepnmt.export.exported import FACTS, KIND, read_exported
from deepnmt.files import write_text
from deepnmt.folders import read_json
from deepnmt.model.blocks import SIDES
from deepnmt.model.init import fill
from deepnmt.model.transformer import Transformer

sentencepiece_model: Any = sentencepiece_model_pb2  # its classes are made when it is imported
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu"}


@dataclass(frozen=True)
class Foreign:
    """A model as its folder holds it.

    Attributes:
        weights: under the names that Marian and fairseq share, beginning with encoder. or decoder.
        model: settings of `config.Model`.
        vocabs: the SentencePiece models.
        rows: of each side, the row of its table for each id of ours; the second is that of bos as an input.
        output: the output table and its bias, for the target's rows.
        languages: of source and target.
    """

    weights: dict[str, Tensor]
    model: dict[str, Any]
    vocabs: tuple[bytes, bytes]
    rows: tuple[list[int], list[int]]
    output: tuple[Tensor, Tensor]
    languages: tuple[str, str]


def import_run(folder: Path, run: Path, langs: Sequence[str] | None = None) -> str:
    """Writes a run with the model of a folder as its average; returns a line that describes it.

    Args:
        folder: a Marian model of Hugging Face's, or a fairseq checkpoint with its dictionaries and SentencePiece model.
        run: a new folder.
        langs: of source and target, if the folder does not say.

    Raises:
        UserError: the folder holds no such model, or one that deepnmt cannot compute; or `run` exists.
    """
    if run.exists():
        raise UserError(f"{run} exists already; give a new folder for the run")
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give one with a Marian or fairseq model")
    if (folder / FACTS).is_file() and "files" in read_json(folder, FACTS, KIND):  # deepnmt's own, of 0.3 or newer
        read_exported(folder)
    if (folder / "config.json").is_file():
        foreign = _marian(folder)
    elif list(folder.glob("*.pt")):
        foreign = _fairseq(folder)
    else:
        raise UserError(f"{folder} has neither a config.json, as Marian models of Hugging Face's have, nor a fairseq "
                        "checkpoint (.pt); give the folder of one")
    src_lang, trg_lang = langs or foreign.languages
    text = {"src": [f"train.{src_lang}"], "trg": [f"train.{trg_lang}"]}
    valid = {"src": [f"valid.{src_lang}"], "trg": [f"valid.{trg_lang}"]}
    vocab = {"shared": False, "model": str(run), "kind": Vocabulary(foreign.vocabs[0]).kind}
    recipe = check_recipe({
        "run": str(run), "model": foreign.model, "vocab": vocab,
        "data": {"folder": f"data/{run.name}", "src_lang": src_lang, "trg_lang": trg_lang, "train": text,
                 "valid": valid, "filters": {"max_tokens": min(250, foreign.model["max_length"] - 1)}},
        "train": {"updates": 1},
    }, f"the model in {folder}")
    weights = _renamed(foreign, recipe)
    sizes = (Vocabulary(foreign.vocabs[0]).size, Vocabulary(foreign.vocabs[1]).size)
    model = Transformer(recipe.model, *sizes, recipe.seed)
    try:
        fill(model, weights.__getitem__)
    except (KeyError, ValueError) as error:
        raise UserError(f"{folder} does not hold the model that it describes: {error}; give the whole folder") from None
    if left := weights.keys() - {name for name, _ in model.named_parameters()}:
        raise UserError(f"{folder} has {sorted(left)[0]}, for which deepnmt's model has no place")
    state = TrainingState(0, 0, 0, 0, None, {}, {"imported": str(folder)})
    files = dict(zip(("src.spm", "trg.spm"), foreign.vocabs, strict=True))
    write_checkpoint(run / "averaged", Contents(weights, None, state, dump_recipe(recipe), files))
    write_text(run / "recipe.yaml", dump_recipe(recipe))
    stack = recipe.model.encoder
    return (f"{run}: {stack.layers} encoder and {recipe.model.decoder.layers} decoder layers ({stack.block}) of width "
            f"{recipe.model.width}, {sizes[0]:,} source and {sizes[1]:,} target pieces")


def _renamed(foreign: Foreign, recipe: Recipe) -> dict[str, Tensor]:
    """The weights under deepnmt's names."""
    theirs, found = dict(foreign.weights), {}

    def take(name: str) -> Tensor:
        if name not in theirs:
            raise UserError(f"the model has no weight {name}, as other architectures may; deepnmt imports plain "
                            "Post-LN and Pre-LN Transformers with sinusoids")
        return theirs.pop(name).float()

    for side, use, rows in zip(SIDES, ("src", "trg"), foreign.rows, strict=True):
        found[f"embeddings.{use}.weight"] = take(f"{side}.embed_tokens.weight")[rows]
        for index in range(recipe.model.stack(side).layers):
            ours, their = f"{side}.layers.{index}", f"{side}.layers.{index}"
            for part in ("weight", "bias"):
                def projected(attention: str, letters: str, their: str = their, part: str = part) -> Tensor:
                    return torch.cat([take(f"{their}.{attention}.{letter}_proj.{part}") for letter in letters])

                found[f"{ours}.self_attn.qkv.{part}"] = projected("self_attn", "qkv")
                found[f"{ours}.self_attn.out.{part}"] = take(f"{their}.self_attn.out_proj.{part}")
                norms = ["self_attn_layer_norm"]
                if side == "decoder":
                    found[f"{ours}.cross_attn.q.{part}"] = projected("encoder_attn", "q")
                    found[f"{ours}.cross_attn.kv.{part}"] = projected("encoder_attn", "kv")
                    found[f"{ours}.cross_attn.out.{part}"] = take(f"{their}.encoder_attn.out_proj.{part}")
                    norms.append("encoder_attn_layer_norm")
                for matrix in ("fc1", "fc2"):
                    found[f"{ours}.ffn.{matrix}.{part}"] = take(f"{their}.{matrix}.{part}")
                for number, norm in enumerate([*norms, "final_layer_norm"]):
                    found[f"{ours}.rule.norms.{number}.{part}"] = take(f"{their}.{norm}.{part}")
        if recipe.model.stack(side).facts.exported_as == "pre_ln":
            for part in ("weight", "bias"):
                found[f"{side}.norm.{part}"] = take(f"{side}.layer_norm.{part}")
    if theirs:
        raise UserError(f"the model has a weight {sorted(theirs)[0]}, for which deepnmt's has no place; deepnmt "
                        "imports plain Post-LN and Pre-LN Transformers with sinusoids")
    last = "decoder.norm" if recipe.model.decoder.facts.exported_as == "pre_ln" else (
        f"decoder.layers.{recipe.model.decoder.layers - 1}.rule.norms.2")
    table, bias = (values.double() for values in foreign.output)
    if bool(bias.any()):
        gain, shift = found[f"{last}.weight"].double(), found[f"{last}.bias"].double()
        if not bool((gain.abs() > 1e-6).all()):
            raise UserError("the model has an output bias, and a gain of its last norm is 0, so that the bias has no "
                            "place in deepnmt's model")
        total = (shift / gain).sum()
        scale = 1.0 - total / len(gain)  # so that the sum becomes D
        shift, bias = shift + scale * gain, bias - scale * (table @ gain)
        table = table + (bias / len(gain))[:, None] / gain
        found[f"{last}.bias"] = shift.float()
    found["embeddings.out.weight"] = table.float()
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _vocabulary(model: bytes, names: Sequence[str]) -> bytes:
    """A SentencePiece model that segments as `model` does, with these pieces behind the special ones."""
    old = sentencepiece_model.ModelProto.FromString(model)
    known = {piece.piece: piece for piece in old.pieces}
    kinds = sentencepiece_model.ModelProto.SentencePiece
    new = sentencepiece_model.ModelProto()
    new.CopyFrom(old)
    del new.pieces[:]
    for number, name in enumerate(SPECIAL):
        new.pieces.add(piece=name, score=0.0, type=kinds.CONTROL if number else kinds.UNKNOWN)
    for name in names:
        piece = known.get(name)
        if piece is not None and piece.type in (kinds.NORMAL, kinds.BYTE, kinds.USER_DEFINED):
            new.pieces.add(piece=name, score=piece.score, type=piece.type)
        else:
            new.pieces.add(piece=name, score=0.0, type=kinds.UNUSED)
    spec = new.trainer_spec
    spec.unk_id, spec.bos_id, spec.eos_id, spec.pad_id = range(4)
    spec.unk_piece, spec.bos_piece, spec.eos_piece, spec.pad_piece = SPECIAL
    spec.vocab_size = len(new.pieces)
    return new.SerializeToString()


def _marian(folder: Path) -> Foreign:
    config = _json(folder / "config.json")
    if config.get("model_type") != "marian":
        raise UserError(f"{folder}/config.json is of a {config.get('model_type')} model; deepnmt imports marian "
                        "models, and fairseq checkpoints")
    if config.get("normalize_before") or config.get("normalize_embedding") or not config.get("scale_embedding"):
        raise UserError(f"{folder}/config.json has normalize_before, normalize_embedding or no scale_embedding; "
                        "deepnmt imports Marian models as OPUS-MT trains them")
    weights = (load_file(folder / "model.safetensors") if (folder / "model.safetensors").is_file()
               else _load(folder / "pytorch_model.bin"))
    bias = weights.pop("final_logits_bias", torch.zeros(1))
    weights = {name.removeprefix("model."): tensor for name, tensor in weights.items() if "embed_positions" not in name}
    shared = weights.pop("shared.weight", None)
    if shared is not None:
        for side in SIDES:
            weights.setdefault(f"{side}.embed_tokens.weight", shared)
    output = weights.pop("lm_head.weight", weights["decoder.embed_tokens.weight"])
    separate = (folder / "target_vocab.json").is_file()
    tables = [_json(folder / "vocab.json"), _json(folder / ("target_vocab.json" if separate else "vocab.json"))]
    start, rows, vocabs = config["decoder_start_token_id"], [], []
    for ids, name in zip(tables, ("source.spm", "target.spm"), strict=True):
        names = [piece for piece in sorted(ids, key=lambda piece: ids[piece]) if piece not in SPECIAL]
        rows.append([ids["<unk>"], start, ids["</s>"], ids["<pad>"], *(ids[piece] for piece in names)])
        vocabs.append(_vocabulary(_bytes(folder / name), names))
    bias = bias.flatten().expand(len(output)) if bias.numel() == 1 else bias.flatten()
    bias = bias.clone()
    bias[tables[1]["<pad>"]] = 0  # barred anyway
    tokenizer = _json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    stacks: dict[str, Any] = {
        side: {"block": "post_ln", "layers": config[f"{side}_layers"], "heads": config[f"{side}_attention_heads"],
               "ffn": config[f"{side}_ffn_dim"]} for side in SIDES}
    model = {"width": config["d_model"], "heads": config["encoder_attention_heads"],
             "activation": _activation(config.get("activation_function", "relu")),
             "dropout": config.get("dropout", 0.1), "tied": "none",
             "max_length": config["max_position_embeddings"], **stacks}
    return Foreign(weights, model, (vocabs[0], vocabs[1]), (rows[0], rows[1]), (output[rows[1]], bias[rows[1]]),
                   (tokenizer.get("source_lang") or "src", tokenizer.get("target_lang") or "trg"))


def _fairseq(folder: Path) -> Foreign:
    best = folder / "checkpoint_best.pt"
    file = best if best.is_file() else sorted(folder.glob("*.pt"))[-1]
    checkpoint = _load(file)
    settings = checkpoint.get("args") or (checkpoint.get("cfg") or {}).get("model")
    settings = vars(settings) if isinstance(settings, argparse.Namespace) else settings
    if not isinstance(settings, dict) or "model" not in checkpoint:
        raise UserError(f"{file} is no fairseq checkpoint: it lacks the model or its arguments")
    for name, wanted in (("encoder_learned_pos", False), ("decoder_learned_pos", False),
                         ("no_token_positional_embeddings", False), ("no_scale_embedding", False),
                         ("layernorm_embedding", False), ("adaptive_softmax_cutoff", None)):
        if (settings.get(name) or None) != (wanted or None):
            raise UserError(f"{file} was trained with {name}={settings[name]}; deepnmt imports plain Post-LN and "
                            "Pre-LN Transformers with sinusoids")
    weights = {name: tensor for name, tensor in checkpoint["model"].items()
               if not name.endswith((".version", "_float_tensor"))}
    for name in [name for name in weights if name.endswith(("in_proj_weight", "in_proj_bias"))]:  # before 0.8
        for letter, part in zip("qkv", weights.pop(name).chunk(3), strict=True):
            weights[name.replace("in_proj_", f"{letter}_proj.")] = part
    output = weights.pop("decoder.output_projection.weight", weights["decoder.embed_tokens.weight"])
    langs = [settings.get("source_lang") or "src", settings.get("target_lang") or "trg"]
    model = next((found for name in ("sentencepiece.bpe.model", "spm.model", "sentencepiece.model")
                  if (found := folder / name).is_file()), None)
    if model is None:
        raise UserError(f"{folder} has no sentencepiece.bpe.model; copy the SentencePiece model of the text there "
                        "(deepnmt cannot import models of other subwords, such as subword-nmt's)")
    vocabs, rows = [], []
    for lang, count in zip(langs, (len(weights["encoder.embed_tokens.weight"]), len(output)), strict=True):
        dictionary = folder / (f"dict.{lang}.txt" if (folder / f"dict.{lang}.txt").is_file() else "dict.txt")
        names = [line.rpartition(" ")[0] for line in _bytes(dictionary).decode("utf-8").split("\n") if line.strip()]
        if len(names) + 4 > count:
            raise UserError(f"{dictionary} has {len(names)} symbols, but the model {count - 4}; give the model's own")
        names += [f"<unused{number}>" for number in range(count - 4 - len(names))]
        vocabs.append(_vocabulary(_bytes(model), names))
        rows.append([3, 2, 2, 1, *range(4, count)])  # theirs: <s> 0, <pad> 1, </s> 2, <unk> 3; they begin with </s>
    out_rows = [3, 0, *rows[1][2:]]
    stacks: dict[str, Any] = {
        side: {"block": "pre_ln" if settings.get(f"{side}_normalize_before") else "post_ln",
               "layers": int(settings[f"{side}_layers"]), "heads": int(settings[f"{side}_attention_heads"]),
               "ffn": int(settings[f"{side}_ffn_embed_dim"]), "width": int(settings[f"{side}_embed_dim"])}
        for side in SIDES}
    longest = min(int(settings.get("max_source_positions") or 1024), int(settings.get("max_target_positions") or 1024))
    shapes = {"width": stacks["encoder"]["width"], "heads": stacks["encoder"]["heads"], "positions": "fairseq",
              "activation": _activation(settings.get("activation_fn") or "relu"),
              "dropout": float(settings.get("dropout") or 0.0), "tied": "none", "max_length": longest, **stacks}
    return Foreign(weights, shapes, (vocabs[0], vocabs[1]), (rows[0], rows[1]),
                   (output[out_rows], torch.zeros(len(out_rows))), (langs[0], langs[1]))


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise UserError(f"the model's activation is {name}; deepnmt imports {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _load(file: Path) -> Any:
    """A file of `torch.save`, of which nothing is executed."""
    return _read(file, lambda: _load_weights(file))


def _load_weights(file: Path) -> Any:
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(file, map_location="cpu", weights_only=True)


def _json(file: Path) -> dict[str, Any]:
    return _read(file, lambda: json.loads(file.read_bytes()))


def _bytes(file: Path) -> bytes:
    return _read(file, file.read_bytes)


def _read(file: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # of many libraries
        reason = str(error).split("\n")[0]
        raise UserError(f"{file} cannot be read ({reason}); give the whole folder of the model") from None
