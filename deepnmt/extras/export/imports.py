"""Imports models of Marian (as OPUS-MT publishes them, in Hugging Face's layout) and of fairseq into a run.

Their vocabularies become SentencePiece models with deepnmt's four special ids; a piece that only the other side's text
is segmented into is marked as unused. The three tables are separate (`tied: none`), because both programs begin a
translation with another token than deepnmt, and because an output bias goes into the output table: a LayerNorm's output
h = γ z + β has Σ z = 0, so Σ h / γ = Σ β / γ for every token, and b / (Σ β / γ) · 1 / γ, added to a row, adds b to its
logit. Where that sum is small, a multiple s γ is first added to β, and s times the product of γ and the row taken from
its bias.

No pickle is executed: `torch.load` reads weights only. Settings and ids are checked by their types, and weights by
their shapes, before a model is built: these folders come from elsewhere.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, StringConstraints, TypeAdapter, ValidationError
from safetensors.torch import load_file
from sentencepiece import sentencepiece_model_pb2
from torch import Tensor

from deepnmt.checkpoint.checkpoint import Contents, TrainingState, shapes_differ, shapes_of, write_checkpoint
from deepnmt.config import Recipe, check_recipe, dump_recipe
from deepnmt.data.prepared import is_free
from deepnmt.data.vocab import Vocabulary
from deepnmt.errors import UserError
from deepnmt.extras.export.exported import FACTS, KIND, read_exported, require_finite
from deepnmt.files import make_run_folder, reporting, write_text
from deepnmt.folders import read_json
from deepnmt.model.blocks import SIDES, Side
from deepnmt.model.positions import POSITIONS
from deepnmt.progress import print_status

sentencepiece_model: Any = sentencepiece_model_pb2  # its classes are made when it is imported
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
_COUNTERS = ("bert.embeddings.position_ids",)  # whole numbers that nobody reads
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu"}

Count = Annotated[int, Field(ge=1, lt=2**31)]
Id = Annotated[int, Field(ge=0, lt=2**31)]
Lang = Annotated[str, StringConstraints(pattern=r"^[\w.-]*$", max_length=50)]


class Marian(BaseModel):
    """What is read of a Marian model's config.json."""

    d_model: Count
    encoder_layers: Count
    decoder_layers: Count
    encoder_attention_heads: Count
    decoder_attention_heads: Count
    encoder_ffn_dim: Count
    decoder_ffn_dim: Count
    max_position_embeddings: Count
    decoder_start_token_id: Id
    activation_function: str = "relu"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    scale_embedding: bool = False
    normalize_before: bool = False
    normalize_embedding: bool = False


class Tokenizer(BaseModel):
    """What is read of a Marian model's tokenizer_config.json."""

    source_lang: Lang | None = None
    target_lang: Lang | None = None
    additional_special_tokens: list[Any] | None = None


class Fairseq(BaseModel):
    """What is read of a fairseq checkpoint's arguments."""

    encoder_layers: Count
    decoder_layers: Count
    encoder_attention_heads: Count
    decoder_attention_heads: Count
    encoder_ffn_embed_dim: Count
    decoder_ffn_embed_dim: Count
    encoder_embed_dim: Count
    decoder_embed_dim: Count
    encoder_normalize_before: bool | None = False
    decoder_normalize_before: bool | None = False
    max_source_positions: Count | None = None
    max_target_positions: Count | None = None
    activation_fn: str | None = None
    dropout: float | None = None
    attention_dropout: float | None = None
    activation_dropout: float | None = None
    relu_dropout: float | None = None  # its name before
    source_lang: Lang | None = None
    target_lang: Lang | None = None


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
        gains: of the sides that have one, by which the tables of tokens and positions are multiplied [D].
    """

    weights: dict[str, Tensor]
    model: dict[str, Any]
    vocabs: tuple[bytes, bytes]
    rows: tuple[list[int], list[int]]
    output: tuple[Tensor, Tensor]
    languages: tuple[str, str]
    gains: dict[Side, Tensor] = field(default_factory=dict)


def import_run(folder: Path, run: Path, langs: Sequence[str] | None = None) -> str:
    """Writes a run with the model of a folder as its average; returns a line that describes it.

    Args:
        folder: a Marian model of Hugging Face's, or a fairseq checkpoint with its dictionaries and SentencePiece model.
        run: a new folder.
        langs: of source and target, if the folder does not say.

    Raises:
        UserError: the folder holds no such model, or one that deepnmt cannot compute; or `run` holds something, or
            cannot be written.
    """
    if not is_free(run):
        raise UserError(f"{run} exists already; give a new folder for the run")
    make_run_folder(run.parent, "RUN")
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give one with a Marian or fairseq model")
    if (folder / FACTS).is_file() and "files" in read_json(folder, FACTS, KIND):  # deepnmt's own, of 0.3 or newer
        read_exported(folder)
    if (folder / "config.json").is_file():
        config = _json(folder / "config.json", dict[str, Any])
        if config.get("model_type") == "bert":
            from deepnmt.extras.export.bert import import_bert

            if langs:
                raise UserError(f"--langs {' '.join(langs)} has no effect with {folder}, a BERT model, which does not "
                                "translate; remove it")
            return import_bert(folder, run, config)
        foreign = _marian(folder)
    elif list(folder.glob("*.pt")):
        foreign = _fairseq(folder, langs)
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
    difference = shapes_differ(recipe.model, *sizes, shapes_of(weights))
    if difference:
        raise UserError(f"{folder} does not hold the model that it describes: {difference}; give the whole folder")
    write_import(folder, run, weights, recipe, foreign.vocabs)
    stack = recipe.model.encoder
    return (f"{run}: {stack.layers} encoder and {recipe.model.decoder.layers} decoder layers ({stack.block}) of width "
            f"{recipe.model.width}, {sizes[0]:,} source and {sizes[1]:,} target pieces")


def write_import(
    folder: Path, run: Path, weights: Mapping[str, Tensor], recipe: Recipe, vocabs: tuple[bytes, bytes]
) -> None:
    """Writes a run whose average is the model of a folder. Raises `UserError` if a weight is NaN or infinite."""
    require_finite(weights, folder)
    state = TrainingState(0, 0, 0, 0, None, {}, {"imported": str(folder)})
    files = dict(zip(("src.spm", "trg.spm"), vocabs, strict=True))
    write_checkpoint(run / "averaged", Contents(weights, None, state, dump_recipe(recipe), files))
    with reporting(str(run / "recipe.yaml"), f"free disk space, remove {run}, and import again"):
        write_text(run / "recipe.yaml", dump_recipe(recipe))


def _renamed(foreign: Foreign, recipe: Recipe) -> dict[str, Tensor]:
    """The weights under deepnmt's names."""
    theirs, renamed = dict(foreign.weights), {}

    def take(name: str) -> Tensor:
        if name not in theirs:
            raise UserError(f"the model has no weight {name}, as other architectures may; deepnmt imports plain "
                            "Post-LN and Pre-LN Transformers with sinusoids")
        return theirs.pop(name).float()

    def projected(attention: str, letters: str, part: str) -> Tensor:
        return joined([take(f"{attention}.{letter}_proj.{part}") for letter in letters], attention)

    for side, use, rows in zip(SIDES, ("src", "trg"), foreign.rows, strict=True):
        table = _rows(take(f"{side}.embed_tokens.weight"), rows, f"{side}'s table")
        if side in foreign.gains:
            gain = renamed[f"{side}.input.gain"] = foreign.gains[side]
            if table.shape[1:] != gain.shape:
                raise UserError(f"the {side}'s tables of tokens and positions have rows of {list(table.shape[1:])} and "
                                f"{list(gain.shape)}, which must be equal")
            table = table / gain
        renamed[f"embeddings.{use}.weight"] = table
        for index in range(recipe.model.stack(side).layers):
            layer = f"{side}.layers.{index}"  # in both
            for part in ("weight", "bias"):
                renamed[f"{layer}.self_attn.qkv.{part}"] = projected(f"{layer}.self_attn", "qkv", part)
                renamed[f"{layer}.self_attn.out.{part}"] = take(f"{layer}.self_attn.out_proj.{part}")
                norms = ["self_attn_layer_norm"]
                if side == "decoder":
                    renamed[f"{layer}.cross_attn.q.{part}"] = projected(f"{layer}.encoder_attn", "q", part)
                    renamed[f"{layer}.cross_attn.kv.{part}"] = projected(f"{layer}.encoder_attn", "kv", part)
                    renamed[f"{layer}.cross_attn.out.{part}"] = take(f"{layer}.encoder_attn.out_proj.{part}")
                    norms.append("encoder_attn_layer_norm")
                for matrix in ("fc1", "fc2"):
                    renamed[f"{layer}.ffn.{matrix}.{part}"] = take(f"{layer}.{matrix}.{part}")
                for number, norm in enumerate([*norms, "final_layer_norm"]):
                    renamed[f"{layer}.rule.norms.{number}.{part}"] = take(f"{layer}.{norm}.{part}")
        if recipe.model.stack(side).facts.exported_as == "pre_ln":
            for part in ("weight", "bias"):
                renamed[f"{side}.norm.{part}"] = take(f"{side}.layer_norm.{part}")
    if theirs:
        raise UserError(f"the model has a weight {sorted(theirs)[0]}, for which deepnmt's has no place; deepnmt "
                        "imports plain Post-LN and Pre-LN Transformers with sinusoids")
    last = f"decoder.layers.{recipe.model.decoder.layers - 1}.rule.norms.2"
    if recipe.model.decoder.facts.exported_as == "pre_ln":
        last = "decoder.norm"
    table, bias = (values.double() for values in foreign.output)
    gain, shift = renamed[f"{last}.weight"].double(), renamed[f"{last}.bias"].double()
    if not table.shape[1:] == gain.shape == shift.shape:
        raise UserError(f"the model's output table has rows of {list(table.shape[1:])} and its last norm "
                        f"{list(gain.shape)} and {list(shift.shape)}, which must be equal")
    if bool(bias.any()):
        if not bool((gain.abs() > 1e-6).all()):
            raise UserError("the model has an output bias, and a gain of its last norm is 0, so that the bias has no "
                            "place in deepnmt's model")
        total = (shift / gain).sum()
        scale = 1.0 - total / len(gain)  # so that the sum becomes D
        shift, bias = shift + scale * gain, bias - scale * (table @ gain)
        table = table + (bias / len(gain))[:, None] / gain
        renamed[f"{last}.bias"] = shift.float()
    renamed["embeddings.out.weight"] = table.float()
    return {name: tensor.contiguous() for name, tensor in renamed.items()}


def joined(projections: Sequence[Tensor], name: str) -> Tensor:
    """The matrices, or biases, of an attention's queries, keys and values in one."""
    first = projections[0].shape
    if not first or any(projection.shape != first for projection in projections):
        raise UserError(f"the model's {name} has projections of different shapes; give the whole folder of the model")
    return torch.cat(list(projections))


def _rows(table: Tensor, rows: Sequence[int], name: str) -> Tensor:
    """Rows of a table. Raises `UserError` where it has no such rows."""
    if table.dim() != 2 or max(rows) >= len(table):
        raise UserError(f"the {name} is of shape {list(table.shape)}, but the vocabulary has the id {max(rows):,}; "
                        "give the model's own vocabulary")
    return table[list(rows)]


def name_special(model: Any) -> None:
    """Tells a SentencePiece model that its first pieces are `SPECIAL`, and how many it has."""
    spec = model.trainer_spec
    spec.unk_id, spec.bos_id, spec.eos_id, spec.pad_id = range(4)
    spec.unk_piece, spec.bos_piece, spec.eos_piece, spec.pad_piece = SPECIAL
    spec.vocab_size = len(model.pieces)


def _vocabulary(file: Path, names: Sequence[str], special: Collection[str] = ()) -> bytes:
    """A SentencePiece model that segments as that in `file` does, with these pieces behind the special ones. Its tags
    are the names in `special`, those of the form >>fra<<, in which OPUS-MT names a language, and its own."""
    old = _read(file, lambda: sentencepiece_model.ModelProto.FromString(file.read_bytes()))
    kinds = sentencepiece_model.ModelProto.SentencePiece
    known = {piece.piece: piece for piece in old.pieces if piece.type in (kinds.NORMAL, kinds.BYTE, kinds.USER_DEFINED)}
    tags = {*special, *(piece.piece for piece in old.pieces if piece.type == kinds.CONTROL)}
    if known.keys().isdisjoint(names):
        raise UserError(f"{file} segments text into none of the model's pieces; give the model's own")
    new = sentencepiece_model.ModelProto()
    new.CopyFrom(old)
    del new.pieces[:]
    for number, name in enumerate(SPECIAL):
        new.pieces.add(piece=name, score=0.0, type=kinds.CONTROL if number else kinds.UNKNOWN)
    for name in names:
        piece = known.get(name)
        if piece is not None:
            new.pieces.add(piece=name, score=piece.score, type=piece.type)
        elif name in tags or re.fullmatch(">>.+<<", name):
            new.pieces.add(piece=name, score=0.0, type=kinds.CONTROL)
        else:
            new.pieces.add(piece=name, score=0.0, type=kinds.UNUSED)
    name_special(new)
    made: bytes = _read(file, new.SerializeToString)
    _read(file, lambda: Vocabulary(made))
    return made


def _marian(folder: Path) -> Foreign:
    tree = _json(folder / "config.json", dict[str, Any])
    kind = tree.get("model_type")
    if kind != "marian":
        what = f"is of a {kind} model" if kind else "has no model_type"
        raise UserError(f"{folder}/config.json {what}; deepnmt imports marian and bert models, and fairseq checkpoints")
    config = _checked(Marian, tree, folder / "config.json")
    if config.normalize_before or config.normalize_embedding or not config.scale_embedding:
        raise UserError(f"{folder}/config.json has normalize_before, normalize_embedding or no scale_embedding; "
                        "deepnmt imports Marian models as OPUS-MT trains them")
    weights = weights_in(folder)
    bias = weights.pop("final_logits_bias", torch.zeros(1)).flatten()
    weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    tables = {side: weights.pop(name) for side in SIDES if (name := f"{side}.embed_positions.weight") in weights}
    positions, gains = _positions(tables)
    shared = weights.pop("shared.weight", None)
    if shared is not None:
        for side in SIDES:
            weights.setdefault(f"{side}.embed_tokens.weight", shared)
    output = _output(weights, "lm_head.weight")
    if bias.numel() not in (1, len(output)):
        raise UserError(f"{folder} has final_logits_bias of {bias.numel():,} numbers, must be {len(output):,}")
    separate = (folder / "target_vocab.json").is_file()
    source, target = (folder / "vocab.json", folder / ("target_vocab.json" if separate else "vocab.json"))
    tokenizer = Tokenizer()
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = _json(folder / "tokenizer_config.json", Tokenizer)
    further = [name for name in tokenizer.additional_special_tokens or () if isinstance(name, str)]
    rows, vocabs = [], []
    for file, model in ((source, "source.spm"), (target, "target.spm")):
        ids = _json(file, dict[str, Id])
        missing = [name for name in ("<unk>", "</s>", "<pad>") if name not in ids]
        if missing:
            raise UserError(f"{file} has no {missing[0]}; give the vocabulary of a Marian model")
        # a source begins with no token of its own, and the target's may have an id that the source's table lacks
        first = config.decoder_start_token_id if model == "target.spm" else ids["<pad>"]
        names = [piece for piece in sorted(ids, key=lambda piece: ids[piece]) if piece not in SPECIAL]
        rows.append([ids["<unk>"], first, ids["</s>"], ids["<pad>"], *(ids[piece] for piece in names)])
        vocabs.append(_vocabulary(folder / model, names, further))
    bias = bias.expand(len(output)).clone()
    out = _rows(output, rows[1], "output table")
    bias[rows[1][3]] = 0  # of padding, which is barred anyway
    stacks: dict[str, Any] = {}
    for side in SIDES:
        stacks[side] = {"block": "post_ln", "layers": getattr(config, f"{side}_layers"),
                        "heads": getattr(config, f"{side}_attention_heads"), "ffn": getattr(config, f"{side}_ffn_dim"),
                        "input_gain": side in gains}
    shapes = {"width": config.d_model, "heads": config.encoder_attention_heads,
              "activation": _activation(config.activation_function), "dropout": config.dropout,
              "attention_dropout": config.attention_dropout, "activation_dropout": config.activation_dropout,
              "positions": positions, "tied": "none", "max_length": config.max_position_embeddings, **stacks}
    return Foreign(weights, shapes, (vocabs[0], vocabs[1]), (rows[0], rows[1]), (out, bias[rows[1]]),
                   (tokenizer.source_lang or "src", tokenizer.target_lang or "trg"), gains)


def _positions(tables: Mapping[Side, Tensor]) -> tuple[str, dict[Side, Tensor]]:
    """The name of position tables [T, D], and the input gains [D] of those that are multiplied by one, as `deepnmt
    export` writes them. 16 bits are close enough. Raises `UserError` for others."""
    for name in ("sinusoidal", "fairseq"):
        gains = {}
        for side, table in tables.items():
            if table.dim() != 2:
                continue
            ours = POSITIONS[name].table(*table.shape)
            gain = (table.float() * ours).sum(0) / ours.square().sum(0)
            if bool((table - gain * ours).abs().max() <= 5e-3 * gain.abs().max()):
                gains[side] = gain
        if gains.keys() == tables.keys():
            return name, {side: gain for side, gain in gains.items() if float((gain - 1).abs().max()) > 5e-3}
    raise UserError("the model's position vectors are no sinusoids, and deepnmt's models have no others; give a Marian "
                    "model as OPUS-MT trains them")


def _fairseq(folder: Path, given: Sequence[str] | None) -> Foreign:
    by_number = sorted(folder.glob("*.pt"), key=lambda file: [int(n) for n in re.findall(r"\d+", file.name)])
    named = [folder / "checkpoint_best.pt", folder / "checkpoint_last.pt"]
    file = next((file for file in named if file.is_file()), by_number[-1])
    checkpoint = _read(file, lambda: _load(file))
    tree = None
    if isinstance(checkpoint, dict):
        tree = checkpoint.get("args") or (_mapping(checkpoint.get("cfg")) or {}).get("model")
    tree = _mapping(tree)
    if not tree or "model" not in checkpoint:
        raise UserError(f"{file} is no fairseq checkpoint: it lacks the model or its arguments")
    for name in ("encoder_learned_pos", "decoder_learned_pos", "no_token_positional_embeddings", "no_scale_embedding",
                 "layernorm_embedding", "adaptive_softmax_cutoff", "encoder_langtok", "decoder_langtok"):
        if tree.get(name):
            raise UserError(f"{file} was trained with {name}={tree[name]}; deepnmt imports plain Post-LN and Pre-LN "
                            "Transformers with sinusoids")
    settings = _checked(Fairseq, tree, file)
    weights = {}
    for name, tensor in _weights(file, lambda _: checkpoint["model"]).items():
        if not name.endswith((".version", "_float_tensor")):
            weights[name] = tensor
    for name in list(weights):
        if not name.endswith(("in_proj_weight", "in_proj_bias")):  # before 0.8
            continue
        if not weights[name].dim() or len(weights[name]) % 3:
            raise UserError(f"{file} has {name} of shape {list(weights[name].shape)}, which is not three matrices")
        for letter, part in zip("qkv", weights.pop(name).chunk(3), strict=True):
            weights[name.replace("in_proj_", f"{letter}_proj.")] = part
    output = _output(weights, "decoder.output_projection.weight")
    source, target = given or ("src", "trg")
    langs = [settings.source_lang or source, settings.target_lang or target]
    files = [folder / name for name in ("sentencepiece.bpe.model", "spm.model", "sentencepiece.model")]
    models = [file for file in files if file.is_file()]
    if not models:
        raise UserError(f"{folder} has no sentencepiece.bpe.model; copy the SentencePiece model of the text there "
                        "(deepnmt cannot import models of other subwords, such as subword-nmt's)")
    vocabs, rows = [], []
    for lang, count in zip(langs, (len(_embedding(weights, "encoder")), len(output)), strict=True):
        dictionary = folder / (f"dict.{lang}.txt" if (folder / f"dict.{lang}.txt").is_file() else "dict.txt")
        if not dictionary.is_file():
            raise UserError(f"{folder} has neither dict.{lang}.txt nor dict.txt; give the whole folder, with --langs "
                            "SRC TRG if its dictionaries are named after other languages")
        text = _read(dictionary, partial(str, _read(dictionary, dictionary.read_bytes), "utf-8"))
        names = [line.rpartition(" ")[0] for line in text.split("\n") if line.strip()]
        if len(names) + 4 > count:
            raise UserError(f"{dictionary} has {len(names)} symbols, but the model {count - 4}; give the model's own")
        if len(names) + 4 < count:
            print_status(f"warning: {dictionary} has {len(names)} symbols, but the model {count - 4}; the others are "
                         "never used; if they are not tokens of a task of fairseq's, give the model's own")
        names += [f"<unused{number}>" for number in range(count - 4 - len(names))]
        vocabs.append(_vocabulary(models[0], names))
        rows.append([3, 2, 2, 1, *range(4, count)])  # theirs: <s> 0, <pad> 1, </s> 2, <unk> 3; they begin with </s>
    out_rows = [3, 0, *rows[1][2:]]
    stacks: dict[str, Any] = {}
    for side in SIDES:
        stacks[side] = {"block": "pre_ln" if getattr(settings, f"{side}_normalize_before") else "post_ln",
                        "layers": getattr(settings, f"{side}_layers"), "width": getattr(settings, f"{side}_embed_dim"),
                        "heads": getattr(settings, f"{side}_attention_heads"),
                        "ffn": getattr(settings, f"{side}_ffn_embed_dim")}
    shapes = {"width": settings.encoder_embed_dim, "heads": settings.encoder_attention_heads, "positions": "fairseq",
              "activation": _activation(settings.activation_fn or "relu"), "dropout": settings.dropout or 0.0,
              "attention_dropout": settings.attention_dropout or 0.0,
              "activation_dropout": settings.activation_dropout or settings.relu_dropout or 0.0,
              "tied": "none", "max_length": min(settings.max_source_positions or 1024,
                                                settings.max_target_positions or 1024), **stacks}
    return Foreign(weights, shapes, (vocabs[0], vocabs[1]), (rows[0], rows[1]),
                   (_rows(output, out_rows, "output table"), torch.zeros(len(out_rows))), (langs[0], langs[1]))


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise UserError(f"the model's activation is {name}; deepnmt imports {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


# -- files of any content ----------------------------------------------------------------------------------------------


def _embedding(weights: dict[str, Tensor], side: str) -> Tensor:
    """A side's table of input embeddings. Raises `UserError` if there is none."""
    table = weights.get(f"{side}.embed_tokens.weight")
    if table is None or table.dim() != 2:
        raise UserError(f"the model has no matrix {side}.embed_tokens.weight; give a whole Marian or fairseq model")
    return table


def _output(weights: dict[str, Tensor], name: str) -> Tensor:
    """The output table, which is taken out of the weights, or the decoder's embeddings where there is none."""
    table = weights.pop(name, None)
    if table is None:
        return _embedding(weights, "decoder")
    if table.dim() != 2:
        raise UserError(f"the model's {name} is of shape {list(table.shape)}, must be a matrix")
    return table


def weights_in(folder: Path) -> dict[str, Tensor]:
    """The weights of a model in Hugging Face's layout, by their names there."""
    file = folder / "model.safetensors"
    if file.is_file():
        return _weights(file, load_file)
    return _weights(folder / "pytorch_model.bin", _load)


def _weights(file: Path, load: Callable[[Path], Any]) -> dict[str, Tensor]:
    """The tensors of a file by name. Raises `UserError` if it holds anything else."""
    weights = _read(file, lambda: load(file))
    whole = isinstance(weights, dict) and bool(weights)
    if whole:
        whole = all(isinstance(name, str) and (name in _COUNTERS or _is_weight(tensor))
                    for name, tensor in weights.items())
    if not whole:
        raise UserError(f"{file} does not hold a model's weights: tensors of floating-point numbers by their names; "
                        "give the whole folder of the model")
    return weights


def _is_weight(value: Any) -> bool:
    """Whether this is a dense tensor of floating-point numbers, each of which takes memory already."""
    return (isinstance(value, Tensor) and value.layout == torch.strided and value.is_floating_point()
            and value.numel() * value.element_size() <= value.untyped_storage().nbytes())


def _load(file: Path) -> Any:
    """A file of `torch.save`, of which nothing is executed."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # whose text tells how to execute it all the same
        raise UserError("it is damaged, or its pickle holds more than weights, and code in it would run; save the "
                        "model's weights as safetensors") from None


def _mapping(value: Any) -> dict[str, Any] | None:
    if isinstance(value, argparse.Namespace):
        return vars(value)
    return value if isinstance(value, dict) else None


def _checked(kind: Any, tree: Any, file: Path) -> Any:
    """A tree as a type of pydantic's. Raises `UserError` with what does not fit."""
    try:
        return TypeAdapter(kind).validate_python(tree)
    except ValidationError as error:
        return _refuse(file, error)


def _json(file: Path, kind: Any) -> Any:
    """A JSON file as a type of pydantic's. Raises `UserError` with what does not fit."""
    content = _read(file, file.read_bytes)
    try:
        return TypeAdapter(kind).validate_json(content)
    except ValidationError as error:
        return _refuse(file, error)


def _refuse(file: Path, error: ValidationError) -> Any:
    first = error.errors()[0]
    fault = first["msg"]
    if first["loc"]:
        fault = f"{'.'.join(map(str, first['loc']))}: {fault}"
    raise UserError(f"{file} is not of a model that deepnmt reads: {fault}; give the whole folder of the model"
                    ) from None


def _read(file: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # of many libraries
        reason = str(error).split("\n")[0][:300]
        raise UserError(f"{file} cannot be read ({reason}); give the whole folder of the model") from None
