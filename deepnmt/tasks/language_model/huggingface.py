"""Language models for the library transformers, and from it: `GPT2LMHeadModel` and `LlamaForCausalLM`.

Both are Pre-LN. GPT-2's shape has LayerNorm, position vectors, and a feed-forward sub-layer without a gate; Llama's has
RMSNorm, rotary positions and SwiGLU. Our scale sqrt(D) of the embeddings goes into the input table, sinusoids into
GPT-2's position vectors. Both read eos as the token before a text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepnmt import folders
from deepnmt.checkpoint.checkpoint import (
    Contents,
    TrainingState,
    check_ramp,
    shapes_differ,
    shapes_of,
    write_checkpoint,
)
from deepnmt.config import Recipe, check_recipe, dump_recipe
from deepnmt.config.fields import either
from deepnmt.data.vocab import Vocabulary
from deepnmt.errors import UserError
from deepnmt.files import reporting, write_text
from deepnmt.model.positions import POSITIONS
from deepnmt.tasks.language_model.model import Loaded
from deepnmt.tokens import EOS, PAD

_PLAIN = {"relu": "relu", "gelu": "gelu", "silu": "silu"}  # our activations by theirs; gelu_new is another
_EPS = 1e-5  # of our norms
_EXPORTED = folders.Kind("exported model", (), "", "free disk space, or give another folder with --output")


def _kind(recipe: Recipe) -> str:
    """The shape that a model has. Raises `UserError` if it is neither."""
    model = recipe.model
    faults = []
    if model.decoder.block != "pre_ln":
        faults.append(f"model.decoder.block is {model.decoder.block}, not pre_ln")
    if model.bands:
        faults.append(f"model.bands is {model.bands}, not []")
    if model.decoder.input_gain:
        faults.append("model.decoder.input_gain is true")
    wanted: dict[str, dict[str, tuple[str, ...]]] = {
        "gpt2": {"norm": ("layer_norm",), "positions": ("sinusoidal", "fairseq"), "activation": tuple(_PLAIN)},
        "llama": {"norm": ("rms_norm",), "positions": ("rotary",), "activation": ("swiglu",)}}
    kind = "llama" if model.positions == "rotary" else "gpt2"
    for name, values in wanted[kind].items():
        value = getattr(model, name)
        if value not in values:
            faults.append(f"model.{name} is {value}, not {either(values)}")
    if faults:
        raise UserError(f"transformers has no class for this model: {'; '.join(faults)}; use it with deepnmt")
    return kind


def export_model(loaded: Loaded, folder: Path) -> str:
    """Writes config.json, model.safetensors and tokenizer.model into a new folder; returns a line that describes them.

    Raises:
        UserError: transformers cannot compute the model, see `check_ramp`, or the folder exists or cannot be written.
    """
    kind, model = _kind(loaded.recipe), loaded.recipe.model
    check_ramp(loaded.checkpoint, model, loaded.update)
    if folder.exists():
        raise UserError(f"{folder} exists already; give another folder with --output")
    shape, ids = model.shape("decoder"), {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": PAD}
    config: dict[str, Any] = {"model_type": kind, "vocab_size": loaded.vocab.size, "tie_word_embeddings": False, **ids}
    if kind == "gpt2":
        config |= {"architectures": ["GPT2LMHeadModel"], "n_embd": shape.width, "n_head": shape.heads,
                   "n_inner": shape.ffn, "n_layer": model.decoder.layers, "n_positions": model.max_length,
                   "activation_function": model.activation, "layer_norm_epsilon": _EPS,
                   "resid_pdrop": model.dropout, "embd_pdrop": model.dropout, "attn_pdrop": model.attention_dropout}
    else:
        config |= {"architectures": ["LlamaForCausalLM"], "hidden_size": shape.width, "intermediate_size": shape.ffn,
                   "num_hidden_layers": model.decoder.layers, "num_attention_heads": shape.heads,
                   "num_key_value_heads": shape.heads, "max_position_embeddings": model.max_length,
                   "hidden_act": "silu", "rms_norm_eps": _EPS, "rope_theta": 10000.0, "attention_bias": True,
                   "mlp_bias": True, "attention_dropout": model.attention_dropout}
    weights = {name: weight.detach().float() for name, weight in loaded.model.named_parameters()}
    table = weights[f"embeddings.{model.tables['trg']}.weight"]
    output = weights[f"embeddings.{model.tables['out']}.weight"]
    theirs = _theirs(kind, weights, math.sqrt(shape.width) * table, output, model.decoder.layers)
    if kind == "gpt2":
        theirs["transformer.wpe.weight"] = POSITIONS[model.positions].table(model.max_length, shape.width)
    with folders.whole_folder(folder, _EXPORTED) as place:
        (place / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        (place / "tokenizer.model").write_bytes(loaded.vocab.bytes)
        save_file({name: weight.contiguous() for name, weight in theirs.items()}, place / "model.safetensors",
                  {"format": "pt"})
    return f"{folder}: {config['architectures'][0]}, {sum(weight.numel() for weight in theirs.values()):,} numbers"


@dataclass(frozen=True)
class Names:
    """What transformers calls the weights of a kind of model.

    Attributes:
        layers: the name of layer 7 without its number.
        table: of the input.
        norm: the last one.
        parts: of a layer, by our names; several are one of ours, one after the other.
        transposed: whether their matrices are.
    """

    layers: str
    table: str
    norm: str
    parts: dict[str, tuple[str, ...]]
    transposed: bool = False


NAMES = {
    "gpt2": Names("transformer.h", "transformer.wte.weight", "transformer.ln_f", {
        "rule.norms.0": ("ln_1",), "self_attn.qkv": ("attn.c_attn",), "self_attn.out": ("attn.c_proj",),
        "rule.norms.1": ("ln_2",), "ffn.fc1": ("mlp.c_fc",), "ffn.fc2": ("mlp.c_proj",)}, transposed=True),
    "llama": Names("model.layers", "model.embed_tokens.weight", "model.norm", {
        "rule.norms.0": ("input_layernorm",), "rule.norms.1": ("post_attention_layernorm",),
        "self_attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.out": ("self_attn.o_proj",), "ffn.fc1": ("mlp.gate_proj", "mlp.up_proj"),
        "ffn.fc2": ("mlp.down_proj",)}),
}


def _names_of_parts(kind: str, layers: int) -> Iterator[tuple[str, list[str]]]:
    """Our name of each part but the tables, such as a matrix and its bias, and their names of it."""
    names = NAMES[kind]
    for layer in range(layers):
        for ours, theirs in names.parts.items():
            yield f"decoder.layers.{layer}.{ours}", [f"{names.layers}.{layer}.{name}" for name in theirs]
    yield "decoder.norm", [names.norm]


def _has_bias(kind: str, part: str) -> bool:
    """Whether a part has one: all but RMSNorm."""
    return kind != "llama" or "norm" not in part


def _theirs(kind: str, ours: dict[str, Tensor], table: Tensor, output: Tensor, layers: int) -> dict[str, Tensor]:
    """The weights under the names of transformers."""
    theirs = {NAMES[kind].table: table, "lm_head.weight": output}
    for part, names in _names_of_parts(kind, layers):
        suffixes = ("weight", "bias") if _has_bias(kind, part) else ("weight",)
        for suffix in suffixes:
            value = ours[f"{part}.{suffix}"]
            if NAMES[kind].transposed and value.ndim > 1:
                value = value.t()
            for name, piece in zip(names, value.chunk(len(names)), strict=True):
                theirs[f"{name}.{suffix}"] = piece
    return theirs


# -- importing ---------------------------------------------------------------------------------------------------------


def config_of(folder: Path) -> dict[str, Any]:
    """The config.json of a folder; empty if it has none that can be read."""
    try:
        content = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def import_model(folder: Path, run: Path) -> str:
    """Writes a run with the model of a folder as its average; returns a line that describes it.

    Raises:
        UserError: deepnmt cannot compute the model, the folder is not whole, or `run` exists.
    """
    if run.exists():
        raise UserError(f"{run} exists already; give a new folder for the run")
    config = config_of(folder)
    kind = config["model_type"]
    file, vocabulary = folder / "model.safetensors", folder / "tokenizer.model"
    for path in (file, vocabulary):
        if not path.is_file():
            raise UserError(f"{folder} has no {path.name}; give a folder with the weights, model.safetensors, and "
                            "tokenizer.model, a SentencePiece model with unk, bos, eos and pad as 0 to 3")
    vocab = Vocabulary.load(vocabulary)
    try:
        weights = {name: weight.float() for name, weight in load_file(file).items()}
        settings = _settings(kind, config, folder, weights)
        ours = _ours(kind, weights, settings["decoder"]["layers"], folder)
    except (KeyError, TypeError, ValueError, AttributeError, OSError, SafetensorError) as error:
        raise UserError(f"{folder} does not hold a whole {kind} model ({error}); give the whole folder") from None
    for name, weight in ours.items():
        if not bool(weight.isfinite().all()):
            raise UserError(f"{folder} has weights that are no numbers, in {name}; give a model that has not diverged")
    recipe = check_recipe({
        "run": str(run), "task": "language_model", "model": settings,
        "vocab": {"model": str(run), "kind": vocab.kind},
        "data": {"folder": f"data/{run.name}", "train": ["train.txt"], "valid": ["valid.txt"],
                 "block": min(512, settings["max_length"])},
        "batch": {"tokens": max(4096, settings["max_length"])}, "train": {"updates": 1},
    }, f"the model in {folder}")
    difference = shapes_differ(recipe.model, vocab.size, vocab.size, shapes_of(ours))
    if difference:
        raise UserError(f"{folder} does not hold the model that it describes: {difference}; give the whole folder")
    begin = config.get("bos_token_id")
    if begin in range(vocab.size):  # a text begins with it there, and with eos here
        ours["embeddings.trg.weight"][EOS] = ours["embeddings.trg.weight"][begin]
    state = TrainingState(0, 0, 0, 0, None, {}, {"imported": str(folder)})
    write_checkpoint(run / "averaged", Contents(ours, None, state, dump_recipe(recipe), vocab.files))
    with reporting(str(run / "recipe.yaml"), f"free disk space, remove {run}, and import again"):
        write_text(run / "recipe.yaml", dump_recipe(recipe))
    return f"{run}: {recipe.model.depths}, width {recipe.model.width}, {vocab.size:,} pieces, from {kind}"


def _settings(kind: str, config: dict[str, Any], folder: Path, weights: dict[str, Tensor]) -> dict[str, Any]:
    """The model section of a config.json. Raises `UserError` for what deepnmt does not compute."""
    def require(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
        if value not in allowed:
            raise UserError(f"{folder}/config.json: {name} is {value!r}, but deepnmt computes "
                            f"{either(list(map(str, allowed)))} alone, so the model cannot be imported")
        return value

    if kind == "gpt2":
        require("layer_norm_epsilon", config.get("layer_norm_epsilon", 1e-5), (_EPS,))
        require("scale_attn_weights", config.get("scale_attn_weights", True), (True,))
        require("scale_attn_by_inverse_layer_idx", config.get("scale_attn_by_inverse_layer_idx", False), (False,))
        activation = require("activation_function", config.get("activation_function", "gelu_new"), tuple(_PLAIN))
        width = config["n_embd"]
        return {"width": width, "heads": config["n_head"], "ffn": config.get("n_inner") or 4 * width, "tied": "none",
                "activation": _PLAIN[activation], "max_length": config["n_positions"], "encoder": None,
                "dropout": config.get("resid_pdrop", 0.1), "attention_dropout": config.get("attn_pdrop", 0.1),
                "positions": _positions(weights["transformer.wpe.weight"], folder),
                "decoder": {"block": "pre_ln", "layers": config["n_layer"]}}
    require("rms_norm_eps", config.get("rms_norm_eps", 1e-6), (_EPS,))
    rope = config.get("rope_parameters") or {}
    require("rope_theta", float(rope.get("rope_theta") or config.get("rope_theta", 10000.0)), (10000.0,))
    require("rope_type", rope.get("rope_type", "default"), ("default",))
    require("rope_scaling", config.get("rope_scaling"), (None,))
    require("hidden_act", config.get("hidden_act", "silu"), ("silu",))
    heads, width = config["num_attention_heads"], config["hidden_size"]
    require("num_key_value_heads", config.get("num_key_value_heads", heads), (heads,))
    require("head_dim", config.get("head_dim") or width // heads, (width // heads,))
    return {"width": width, "heads": heads, "ffn": config["intermediate_size"], "tied": "none", "activation": "swiglu",
            "norm": "rms_norm", "positions": "rotary", "max_length": config["max_position_embeddings"],
            "dropout": 0.0, "attention_dropout": config.get("attention_dropout", 0.0),
            "encoder": None, "decoder": {"block": "pre_ln", "layers": config["num_hidden_layers"]}}


def _positions(theirs: Tensor, folder: Path) -> str:
    """The name of the position vectors. Raises `UserError` if they are learned."""
    for name in ("sinusoidal", "fairseq"):
        if float((theirs - POSITIONS[name].table(*theirs.shape)).abs().max()) <= 1e-4:
            return name
    raise UserError(f"{folder} has learned position vectors, which deepnmt's language models do not have, so the model "
                    "cannot be imported; give one with sinusoids, or of Llama's shape")


def _ours(kind: str, theirs: dict[str, Tensor], layers: int, folder: Path) -> dict[str, Tensor]:
    """The weights under deepnmt's names; a bias that is missing is 0. Raises `UserError` for weights without a place.
    """
    known = {NAMES[kind].table, "lm_head.weight", "transformer.wpe.weight"}
    known |= {f"{name}.{suffix}" for _, names in _names_of_parts(kind, layers) for name in names
              for suffix in ("weight", "bias")}
    for name in sorted(theirs.keys() - known):
        if not name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")):  # constants
            raise UserError(f"{folder} has the weight {name}, which its config.json does not describe; give the "
                            "config.json of these weights")
    table = theirs[NAMES[kind].table]
    ours = {"embeddings.trg.weight": table / math.sqrt(table.size(1)),
            "embeddings.out.weight": theirs.get("lm_head.weight", table).clone()}
    for part, names in _names_of_parts(kind, layers):
        weights = [theirs[f"{name}.weight"] for name in names]
        if NAMES[kind].transposed and weights[0].ndim > 1:
            weights = [weight.t() for weight in weights]
        ours[f"{part}.weight"] = torch.cat(weights)
        if _has_bias(kind, part):
            biases = []
            for name, weight in zip(names, weights, strict=True):
                biases.append(theirs.get(f"{name}.bias", weight.new_zeros(len(weight))))
            ours[f"{part}.bias"] = torch.cat(biases)
    return ours
