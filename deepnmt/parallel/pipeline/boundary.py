"""What one stage of a pipeline sends to the next: the streams of encoder and decoder as one tensor.

`B` sentences, `S` source and `T` target length, `D` width, `k` tensors of a stream (`Block.carried`). In the encoder
[B, S, k·D]; in the decoder memory and stream concatenated, sentence by sentence [B, S·D + T·k·D], since their D may
differ; before the output, and where the model has one side, its stream alone, [B, T, k·D]. It is one tensor because
DeepSpeed runs backward from several one after the other, through the encoder twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepnmt.batch import Batch
from deepnmt.config import Model
from deepnmt.model.blocks import LayerPosition, Side, Stream, pack, unpack
from deepnmt.parallel.pipeline.partition import layer_of


class Boundary:
    """The boundary below a unit of the model, which is not the first: the next stage begins with that unit."""

    def __init__(self, model: Model, unit: str) -> None:
        both = len(model.sides) > 1
        self.both_streams = both and unit.startswith("decoder")  # the memory and the decoder's
        self.last_stream = not both or unit == "output"  # that of the side whose output predicts, alone
        side: Side = model.last if unit == "output" else "encoder"
        place = layer_of(unit) or (side, model.stack(side).layers)  # no layer: above all of them
        position = LayerPosition.of(model, *place)
        self.carried = position.block.carried(position)
        self.memory_width, self.width = model.shape("encoder").width, model.shape(model.last).width
        self.ids = "trg_in" if "decoder" in model.sides else "src"  # of the last side

    def shape(self, batch: Batch) -> tuple[int, ...]:
        """The shape of what is sent of a prepared micro-batch."""
        rows, target = batch[self.ids].shape
        if self.last_stream:
            return rows, target, self.carried * self.width
        source = batch["src"].size(1)
        if self.both_streams:
            return rows, source * self.memory_width + target * self.carried * self.width
        return rows, source, self.carried * self.memory_width

    def pack(self, memory: Stream | None, hidden: Stream | None) -> Tensor:
        """What is sent, from what `Transformer.run` returns."""
        streams = [stream for stream in (memory, hidden) if stream is not None]
        if self.both_streams:
            return torch.cat([pack(stream).flatten(1) for stream in streams], dim=1)
        return pack(streams[-1])

    def unpack(self, x: Tensor, batch: Batch) -> tuple[Stream | None, Stream | None]:
        """What was sent, as `Transformer.run` takes it."""
        if self.last_stream and self.ids == "trg_in":
            return x, unpack(x, self.width)  # a memory that nobody reads
        if not self.both_streams:
            return unpack(x, self.memory_width), None
        target = batch["trg_in"].size(1)
        last = target * self.carried * self.width
        memory, hidden = x.split([x.size(1) - last, last], dim=1)
        return memory.unflatten(1, (-1, self.memory_width)), unpack(hidden.unflatten(1, (target, -1)), self.width)
