"""One stage of a pipelined model: consecutive layers, under the same names as in `Transformer`.

Stages send each other the hidden states alone: [B, S, D] in the encoder, memory and target concatenated in the decoder,
sentence by sentence [B, S·D + T·D], since their D may differ, and [B, T, D] before the output. It is one tensor because
DeepSpeed runs backward from several one after the other, through the encoder twice. Every stage takes ids, lengths and
the key of dropout from the micro-batch itself, which all stages of a pipeline have, and makes the masks anew. With
R-Drop each sentence is there twice.

`B` sentences, `S` source length, `T` target length, `D` width, `V` vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from deepnmt.batch import Batch
from deepnmt.config import Model
from deepnmt.config.choices import Use
from deepnmt.model.attention import key_mask
from deepnmt.model.blocks import SIDES, Side
from deepnmt.model.embedding import InputLayer, table_width
from deepnmt.model.layers import Layer
from deepnmt.model.loss import LossSums, label_smoothed_loss, r_drop_loss
from deepnmt.model.transformer import build_layer, build_top, run_layers, twice
from deepnmt.parallel.pipeline.partition import layer_of, unit_names
from deepnmt.tokens import PAD


def tables_used(model: Model, start: int, stop: int) -> list[tuple[str, Use]]:
    """The embedding tables that units `start` to `stop` - 1 use, each once: its name and one of its uses."""
    uses: dict[str, Use] = {"source": "src", "target": "trg", "output": "out"}
    held: dict[str, Use] = {}
    for unit in unit_names(model)[start:stop]:
        if unit in uses:
            held.setdefault(model.tables[uses[unit]], uses[unit])
    return list(held.items())


class StackPart(nn.Module):
    """The layers of one side that a stage holds, keyed by their index in the stack; named as in `transformer.Stack`."""

    def __init__(self, model: Model, side: Side, seed: int, indices: list[int], starts: bool, ends: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): build_layer(model, side, index, seed) for index in indices})
        self.input: nn.Module = InputLayer(model, side, seed) if starts else nn.Identity()
        self.norm = build_top(model, side) if ends else nn.Identity()


class Stage(nn.Module):
    """The units `start` to `stop` - 1 of a model, their weights still to be set.

    Args:
        model, src_vocab, trg_vocab, seed, label_smoothing, r_drop: as for `Transformer`.
        start, stop: indices into `partition.unit_names`.
        recompute: group size, in layers, of activation recomputation in the backward pass; 0: none.
    """

    def __init__(
        self,
        model: Model,
        src_vocab: int,
        trg_vocab: int,
        seed: int,
        label_smoothing: float,
        start: int,
        stop: int,
        recompute: int,
        r_drop: float,
    ) -> None:
        super().__init__()
        names = unit_names(model)
        self.held = names[start:stop]
        self.recompute = recompute
        self.label_smoothing, self.r_drop = label_smoothing, r_drop
        self.tables = model.tables
        self.widths = {side: model.shape(side).width for side in SIDES}
        self.begins_with = self.held[0]
        self.followed_by = names[stop] if stop < len(names) else None
        sizes: dict[Use, int] = {"src": src_vocab, "trg": trg_vocab, "out": trg_vocab}
        self.embeddings = nn.ModuleDict(
            {name: skip_init(nn.Embedding, sizes[use], table_width(model, use))
             for name, use in tables_used(model, start, stop)}
        )
        layers = [layer for layer in map(layer_of, self.held) if layer]
        indices = {side: [i for s, i in layers if s == side] for side in ("encoder", "decoder")}
        self.encoder = StackPart(
            model, "encoder", seed, indices["encoder"], "source" in self.held, "target" in self.held
        )
        self.decoder = StackPart(
            model, "decoder", seed, indices["decoder"], "target" in self.held, "output" in self.held
        )

    def received(self, batch: Batch) -> tuple[int, ...]:
        """The shape of the hidden states that the previous stage sends of a micro-batch."""
        src, _, trg_in, _ = batch.tensors
        rows = len(src) * (2 if self.r_drop and self.training else 1)
        source, target = src.size(1), trg_in.size(1)
        if self.begins_with.startswith("decoder"):
            return rows, source * self.widths["encoder"] + target * self.widths["decoder"]
        if self.begins_with == "output":
            return rows, target, self.widths["decoder"]
        return rows, source, self.widths["encoder"]

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """From what the previous stage sends (for the first stage, source ids [B, S]) to what the next one gets; from
        the last stage the normalised output of the decoder, [B, T, D]."""
        _, src_lengths, trg_in, _ = batch.tensors
        key = batch.key
        if self.r_drop and self.training:  # all but trg_out, which only the loss reads
            src_lengths, trg_in = twice(src_lengths, trg_in)
        target = trg_in.size(1)
        memory = x  # used only if the stage begins in the decoder
        if self.begins_with == "source":
            if self.r_drop and self.training:
                (x,) = twice(x)
            x = self.encoder.input(self.table("src")(x), key)
        elif self.begins_with.startswith("decoder"):
            width = self.widths["decoder"]
            memory, x = x.split([x.size(1) - target * width, target * width], dim=1)
            memory, x = memory.unflatten(1, (-1, self.widths["encoder"])), x.unflatten(1, (target, width))
        if self.encoder.layers:
            x = run_layers(self.layers("encoder"), self.recompute, x, key_mask(src_lengths, x.size(1), x.dtype), key)
        if "target" in self.held:
            memory = self.encoder.norm(x)
            x = self.decoder.input(self.table("trg")(trg_in), key)
        if self.decoder.layers:
            mask = key_mask(src_lengths, memory.size(1), memory.dtype)
            x = run_layers(self.layers("decoder"), self.recompute, x, memory, mask, key)
        if self.followed_by is None:
            return self.decoder.norm(x)
        if self.followed_by.startswith("decoder"):
            x = torch.cat([memory.flatten(1), x.flatten(1)], dim=1)
        return x

    def loss(self, hidden: Tensor, trg_out: Tensor) -> LossSums:
        """The loss of the last stage's output [B, T, D] against trg_out [B, T], the same as `Transformer.forward`'s."""
        if self.r_drop and self.training:
            return r_drop_loss(hidden, self.table("out").weight, trg_out, self.label_smoothing, PAD, self.r_drop)
        return label_smoothed_loss(hidden, self.table("out").weight, trg_out, self.label_smoothing, PAD)

    def table(self, use: Use) -> nn.Embedding:
        """The embedding table [V, D] for `use`."""
        return cast(nn.Embedding, self.embeddings[self.tables[use]])

    def layers(self, side: Side) -> list[Layer]:
        """The stage's layers of one side, lowest first."""
        return cast(list[Layer], list((self.encoder if side == "encoder" else self.decoder).layers.values()))
