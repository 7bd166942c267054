"""What one stage of a pipeline sends to the next: the streams of encoder and decoder as one tensor.

`B` sentences, `S` source and `T` target length, `D` width, `k` tensors of a stream (`Block.carried`). In the encoder
[B, S, k·D]; in the decoder memory and stream concatenated, sentence by sentence [B, S·D + T·k·D], since their D may
differ; before the output [B, T, k·D]. It is one tensor because DeepSpeed runs backward from several one after the
other, through the encoder twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepnmt.batch import Batch
from deepnmt.config import Model
from deepnmt.model.blocks import SIDES, LayerPosition, Side, Stream, pack, unpack
from deepnmt.parallel.pipeline.partition import layer_of


class Boundary:
    """The boundary below a unit of the model, which is not the first: the next stage begins with that unit."""

    def __init__(self, model: Model, unit: str) -> None:
        self.in_decoder, self.before_output = unit.startswith("decoder"), unit == "output"
        side: Side = "decoder" if self.before_output else "encoder"
        position = LayerPosition.of(model, *(layer_of(unit) or (side, model.stack(side).layers)))
        self.carried = position.block.carried(position)
        self.memory_width, self.width = (model.shape(side).width for side in SIDES)

    def shape(self, batch: Batch) -> tuple[int, ...]:
        """The shape of what is sent of a prepared micro-batch."""
        (rows, source), target = batch["src"].shape, batch["trg_in"].size(1)
        if self.in_decoder:
            return rows, source * self.memory_width + target * self.carried * self.width
        if self.before_output:
            return rows, target, self.carried * self.width
        return rows, source, self.carried * self.memory_width

    def pack(self, memory: Stream, hidden: Stream | None) -> Tensor:
        """What is sent, from what `Transformer.run` returns."""
        if hidden is None:
            return pack(memory)
        if self.before_output:
            return pack(hidden)
        return torch.cat([pack(memory).flatten(1), pack(hidden).flatten(1)], dim=1)

    def unpack(self, x: Tensor, batch: Batch) -> tuple[Stream, Stream | None]:
        """What was sent, as `Transformer.run` takes it."""
        if self.before_output:
            return x, unpack(x, self.width)  # a memory that nobody reads
        if not self.in_decoder:
            return unpack(x, self.memory_width), None
        target = batch["trg_in"].size(1)
        last = target * self.carried * self.width
        memory, hidden = x.split([x.size(1) - last, last], dim=1)
        return memory.unflatten(1, (-1, self.memory_width)), unpack(hidden.unflatten(1, (target, -1)), self.width)
