"""Writes a model of any block as two ONNX graphs, and proves it in ONNX Runtime.

    encoder.onnx   src [B, S], src_lengths [B] to source [M, 2, B, H, S, d], the keys and values of cross-attention
    decoder.onnx   tokens [B], past [M, 2, B, H, P, d], source, src_lengths to logits [B, V] and past of P + 1 positions

All ids are int64. `B` sentences, `S` source length with eos, `P` target positions so far (0 at first), `M` decoder
layers, `H` heads, `d` width of a head, `V` vocabulary; pad has the logit -1e9.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import onnxruntime
import torch
from torch import Tensor, nn

from deepnmt.checkpoint.checkpoint import LoadedModel
from deepnmt.config import choices
from deepnmt.errors import UserError
from deepnmt.extras.export.proof import Native
from deepnmt.model.blocks import RMSNorm, Stream
from deepnmt.model.positions import POSITIONS
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import PAD

OPSET = 17
ROWS = 1025  # of the position tables at least
_AXES = {"src": {0: "B", 1: "S"}, "src_lengths": {0: "B"}, "source": {2: "B", 4: "S"}, "tokens": {0: "B"},
         "past": {2: "B", 4: "P"}, "logits": {0: "B"}, "grown": {2: "B", 4: "P + 1"}}


def write_onnx(loaded: LoadedModel, folder: Path, precision: str) -> None:
    """Writes encoder.onnx and decoder.onnx, which also hold the weights. Raises `UserError` for rotary positions."""
    del precision
    positions = loaded.recipe.model.positions
    if not choices.POSITIONS[positions].added:
        raise UserError(f"model.positions is {positions}, which deepnmt cannot write for ONNX; use the model as it is")
    model = copy.deepcopy(loaded.model)
    for stack in (model.encoder, model.decoder):  # positions beyond `model.max_length` have values, too
        old = stack.input.positions
        stack.input.positions = POSITIONS[positions].table(max(len(old), ROWS), old.size(1))
    for module in model.modules():
        if isinstance(module, RMSNorm):  # which the tracer does not know as one operation
            setattr(module, "forward", partial(_written_out, module))  # noqa: B010
    encoder, decoder = _Encoder(model).eval(), _Decoder(model).eval()
    ids = torch.full((2, 5), PAD + 1)
    lengths = torch.tensor([5, 3])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer, about lengths that it takes as they are
        source = encoder(ids, lengths)
        _write(encoder, (ids, lengths), folder / "encoder.onnx", ["src", "src_lengths"], ["source"])
        _write(decoder, (ids[:, 0], source[:, :, :, :, :2], source, lengths), folder / "decoder.onnx",
               ["tokens", "past", "source", "src_lengths"], ["logits", "grown"])


def _write(module: nn.Module, arguments: tuple[Tensor, ...], file: Path, inputs: list[str], outputs: list[str]
           ) -> None:
    torch.onnx.export(module, arguments, str(file), dynamo=False, opset_version=OPSET, input_names=inputs,
                      output_names=outputs, dynamic_axes={name: _AXES[name] for name in (*inputs, *outputs)})


class _Encoder(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, src: Tensor, src_lengths: Tensor) -> Tensor:
        x: Stream = self.model.encoder.start(self.model.encoder.input(self.model.table("src")(src)))
        mask = _mask(src_lengths, src.size(1))
        for layer in self.model.encoder.layers:
            x = layer(x, mask)
        memory = self.model.encoder.norm(x)
        return torch.stack([torch.stack(layer.cross_attn.keys_values(memory)) for layer in self.model.decoder_layers])


class _Decoder(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, past: Tensor, source: Tensor, src_lengths: Tensor) -> tuple[Tensor, Tensor]:
        model = self.model
        position = torch.ones_like(past[0, 0, 0, 0, :, :1]).sum(0).long()  # [P], traced as a number that varies
        x: Stream = model.decoder.start(model.decoder.input.add_positions(
            model.table("trg")(tokens)[:, None], model.decoder.input.positions.index_select(0, position)))
        mask = _mask(src_lengths, source.size(4))
        grown = []
        for layer, old, keys_values in zip(model.decoder_layers, past.unbind(), source.unbind(), strict=True):
            own = _Growing(old)
            x = layer.step(x, cast(Any, own), None, cast(Any, keys_values.unbind()), mask, slice(0, 1))
            grown.append(own.whole)
        logits = model.logits(model.decoder.norm(x)[:, 0])
        barred = torch.zeros(logits.size(-1)).index_fill(0, torch.tensor([PAD]), -1e9)
        return logits.nan_to_num(neginf=0.0) + barred, torch.stack(grown)


class _Growing:
    """Past keys and values [2, B, H, P, d] to which a layer adds those of its position, without writing in place."""

    def __init__(self, past: Tensor) -> None:
        self.whole = past
        self.new: list[Tensor] = []

    def __setitem__(self, slots: object, new: Tensor) -> None:
        """Keys first, then values, each [B, H, 1, d]; see `sublayers.attend_step`."""
        self.new.append(new)
        if len(self.new) == 2:
            self.whole = torch.cat([self.whole, torch.stack(self.new)], dim=3)

    def __getitem__(self, slots: object) -> Tensor:
        return self.whole


def _written_out(norm: RMSNorm, x: Tensor) -> Tensor:
    return norm.frozen(x)(x)


def _mask(lengths: Tensor, size: int) -> Tensor:
    """The key mask [B, 1, 1, S]: true at tokens."""
    return (torch.arange(size, device=lengths.device) < lengths[:, None])[:, None, None, :]


class _Stepper:
    """deepnmt's search on the two graphs; for the arguments see `decode.steppers`."""

    def __init__(self, folder: Path, src: Tensor, src_lengths: Tensor, beams: int, max_steps: int) -> None:
        self._encoder, self._decoder = _sessions(folder)
        self._beams, lengths = beams, src_lengths.numpy()
        source = self._encoder.run(None, {"src": src.numpy(), "src_lengths": lengths})[0]
        self._source, self._lengths = source.repeat(beams, axis=2), lengths.repeat(beams)
        self._past = self._source[:, :, :, :, :0]

    def step(self, tokens: Tensor) -> Tensor:
        logits, self._past = self._decoder.run(None, {"tokens": tokens.numpy(), "past": self._past,
                                                      "source": self._source, "src_lengths": self._lengths})
        return torch.from_numpy(logits)

    def reorder(self, rows: Tensor) -> None:
        self._past = self._past[:, :, rows.numpy()]

    def select(self, sentences: Sequence[int]) -> None:
        rows = [sentence * self._beams + beam for sentence in sentences for beam in range(self._beams)]
        self._past, self._source = self._past[:, :, rows], self._source[:, :, rows]
        self._lengths = self._lengths[rows]


@lru_cache(maxsize=1)
def _sessions(folder: Path) -> list[onnxruntime.InferenceSession]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return [onnxruntime.InferenceSession(folder / name, options, providers=["CPUExecutionProvider"])
            for name in ("encoder.onnx", "decoder.onnx")]


def engine(loaded: LoadedModel, folder: Path, precision: str) -> Native:
    """The exported model as `proof.py` asks it."""
    del precision
    return Native(loaded.model, lambda _, *arguments: _Stepper(folder, *arguments))
