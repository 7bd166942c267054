"""Writes a model for CTranslate2, the inference engine of OpenNMT, and proves it there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ctranslate2.specs import common_spec, transformer_spec

from deepnmt.checkpoint.checkpoint import LoadedModel
from deepnmt.config import Translate
from deepnmt.config.choices import NORMS
from deepnmt.extras.export.plain import EPSILON, Pair, Plain, Values, to_plain
from deepnmt.extras.export.searcher import FORMATS, CTranslate2
from deepnmt.model.blocks import SIDES, Side
from deepnmt.model.sublayers import ACTIVATIONS

POSITIONS = 1025  # rows of the position tables at least: CTranslate2 reads up to 1,024 pieces unless told otherwise
_ACTIVATIONS = {
    "relu": common_spec.Activation.RELU, "reglu": common_spec.Activation.RELU,
    "gelu": common_spec.Activation.GELU, "geglu": common_spec.Activation.GELU,
    "silu": common_spec.Activation.SWISH, "swiglu": common_spec.Activation.SWISH,
}
# The norms before and after each sub-layer of a Peri-LN layer; those of others are parts of the sub-layers.
_PERI_NORMS = {
    "self_attn": ("input_layer_norm", "post_attention_layer_norm"),
    "cross_attn": ("external_pre_encoder_attention_layer_norm", "external_post_encoder_attention_layer_norm"),
    "ffn": ("pre_feedforward_layer_norm", "post_feedforward_layer_norm"),
}


def write_ctranslate2(loaded: LoadedModel, folder: Path, precision: str) -> None:
    """Writes the folder that `ctranslate2.Translator` loads, weights in this number format, and the vocabularies.

    Raises:
        UserError: see `to_plain`.
    """
    plain = to_plain(loaded, "CTranslate2", ("layer_norm", "rms_norm"), _ACTIVATIONS, ("post_ln", "pre_ln", "peri_ln"))
    encoder, decoder = (_new_stack(plain, side) for side in SIDES)
    _fill_stack(encoder, encoder.embeddings[0], plain, "encoder")
    _fill_stack(decoder, decoder.embeddings, plain, "decoder")
    _fill(decoder.projection, plain.output())
    plain.require_all_used("CTranslate2")
    spec = transformer_spec.TransformerSpec(encoder, decoder)
    spec.register_source_vocabulary(loaded.src_vocab.names())
    spec.register_target_vocabulary(loaded.trg_vocab.names())
    config = spec.config
    config.add_source_eos, config.layer_norm_epsilon = True, EPSILON
    config.decoder_start_token = config.bos_token = "<s>"
    config.eos_token, config.unk_token = "</s>", "<unk>"
    spec.validate()
    spec.optimize(quantization=None if precision == "fp32" else FORMATS[precision])
    spec.save(str(folder))


def _new_stack(plain: Plain, side: Side) -> Any:
    stack = plain.model.stack(side)
    peri = plain.kind(side) == "peri_ln"
    options = {
        "pre_norm": plain.kind(side) != "post_ln", "pre_post_layer_norm": peri,
        "activation": _ACTIVATIONS[plain.model.activation], "ffn_glu": ACTIVATIONS[plain.model.activation].rows == 2,
        "rms_norm": not NORMS[plain.model.norm].centres and not plain.norm_free(side),
    }
    if side == "encoder":
        return transformer_spec.TransformerEncoderSpec(stack.layers, plain.heads(side), **options)
    return transformer_spec.TransformerDecoderSpec(
        stack.layers, plain.heads(side), external_pre_post_encoder_layers=peri, **options)


def _fill_stack(spec: Any, embeddings: Any, plain: Plain, side: Side) -> None:
    spec.scale_embeddings = plain.scaled(side)
    embeddings.weight = _fp32(plain.table(side))
    spec.position_encodings.encodings = _fp32(plain.positions(side, max(plain.model.max_length, POSITIONS)))
    if plain.kind(side) != "post_ln":
        _fill_norm(spec.layer_norm, plain.norm(f"{side}.norm"))
    for index, layer in enumerate(spec.layer):
        name = f"{side}.layers.{index}"
        attentions: list[tuple[Any, str, tuple[str, ...]]] = [(layer.self_attention, "self_attn", ("qkv", "out"))]
        if side == "decoder":
            attentions.append((layer.attention, "cross_attn", ("q", "kv", "out")))
        for attention, sublayer, matrices in attentions:
            for linear, matrix in zip(attention.linear, matrices, strict=True):
                _fill(linear, plain.linear(f"{name}.{sublayer}.{matrix}"))
        weight, bias = plain.linear(f"{name}.ffn.fc1")
        if ACTIVATIONS[plain.model.activation].rows == 2:  # the activation's half and the gate's
            (weight, gate), (bias, shift) = np.split(weight, 2), np.split(bias, 2)
            _fill(layer.ffn.linear_0_noact, (gate, shift))
        _fill(layer.ffn.linear_0, (weight, bias))
        _fill(layer.ffn.linear_1, plain.linear(f"{name}.ffn.fc2"))
        parts = {sublayer: attention for attention, sublayer, _ in attentions} | {"ffn": layer.ffn}
        for number, (sublayer, part) in enumerate(parts.items()):
            if plain.kind(side) == "peri_ln":
                before, after = (getattr(layer, norm) for norm in _PERI_NORMS[sublayer])
                _fill_norm(after, plain.norm(f"{name}.rule.out_norms.{number}"))
            else:
                before = part.layer_norm
            _fill_norm(before, plain.norm(f"{name}.rule.norms.{number}"))


def _fill(linear: Any, values: Pair) -> None:
    linear.weight, linear.bias = map(_fp32, values)


def _fill_norm(norm: Any, values: Pair) -> None:
    norm.gamma = _fp32(values[0])
    if hasattr(norm, "beta"):  # an RMSNorm has none
        norm.beta = _fp32(values[1])


def _fp32(values: Values) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(values, dtype=np.float32)


class Engine:
    """The exported model as `proof.py` asks it."""

    def __init__(self, loaded: LoadedModel, folder: Path, precision: str) -> None:
        self._model = CTranslate2(folder, loaded.vocabs, precision)

    def score(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._model.score([source[:-1] for source in sources], targets)

    def search(self, sources: Sequence[Sequence[int]], limit: int, settings: Translate) -> list[list[int]]:
        best = self._model.search(sources, [limit] * len(sources), settings, [])
        return [candidates[0].tokens for candidates in best]
