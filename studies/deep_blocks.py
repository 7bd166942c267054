"""What each block costs a layer, and whether 100L-100L of it trains: counted and measured at width 16.

Counted are a layer's parameters and the bytes that autograd keeps of it for the backward pass, measured the CPU
seconds of an update. A layer's share is the difference between two depths, so embeddings and loss are not in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from deepnmt.config import Model
from deepnmt.files import table
from deepnmt.model.blocks import LayerPosition
from deepnmt.model.init import new_model
from deepnmt.model.transformer import Transformer
from studies.toy_task import ToyTask

TASK = ToyTask()
SENTENCES = 4


def shape_of(block: str, layers: int, width: int = 16) -> Model:
    """A model of this many layers on each side."""
    stack = {"block": block, "layers": layers}
    return Model.model_validate({"width": width, "heads": 2, "ffn": 4 * width, "dropout": 0.0, "max_length": 32,
                                 "encoder": stack, "decoder": stack})


def kept_bytes(model: Transformer) -> int:
    """The bytes that autograd keeps of a micro-batch, weights left out; each tensor once."""
    weights, found = {p.data_ptr() for p in model.parameters()}, dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(TASK.batch(0, SENTENCES)).loss
    del loss
    return sum(found.values())


def train(model: Transformer, updates: int, rate: float = 1e-3) -> tuple[list[float], float]:
    """Losses in nats a token, and the CPU seconds of the median update; ends at the first that is not finite."""
    optimizer, losses, seconds = torch.optim.Adam(model.parameters(), rate, (0.9, 0.98)), [], []
    for update in range(updates):
        started, batch = time.process_time(), TASK.batch(update, SENTENCES)
        optimizer.zero_grad()
        loss = model(batch).loss / batch.tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(float(loss.detach()) if math.isfinite(float(norm)) else math.nan)
        if not math.isfinite(losses[-1]):
            break
        optimizer.step()
        seconds.append(time.process_time() - started)
    return losses, sorted(seconds)[len(seconds) // 2] if seconds else math.nan


def cost_of(block: str, depths: tuple[int, int] = (4, 8)) -> tuple[float, float, float]:
    """Parameters, kept bytes and seconds of an update for each pair of an encoder and a decoder layer."""
    found = []
    for layers in depths:
        model = new_model(shape_of(block, layers), TASK.vocabulary, TASK.vocabulary, 1)
        found.append((sum(p.numel() for p in model.parameters()), kept_bytes(model.train()), train(model, 5)[1]))
    fewer, more = depths
    parameters, kept, seconds = ((b - a) / (more - fewer) for a, b in zip(*found, strict=True))
    return parameters, kept, seconds


def measure_all(blocks: Sequence[str], layers: int, updates: int) -> str:
    """The table of all blocks: what a pair of layers costs beside Pre-LN's, and the losses of the deep model."""
    rows = [("block", "parameters", "kept", "time", "tensors on top", "first loss", "last loss")]
    base = cost_of("pre_ln")
    for block in blocks:
        shape = shape_of(block, layers)
        losses, _ = train(new_model(shape, TASK.vocabulary, TASK.vocabulary, 1).train(), updates)
        parameters, kept, seconds = cost_of(block)
        top = LayerPosition.of(shape, "decoder", layers)
        rows.append((block, f"{parameters - base[0]:+.0f}", f"× {kept / base[1]:.2f}", f"× {seconds / base[2]:.2f}",
                     str(top.block.carried(top)), f"{losses[0]:.3f}",
                     f"{losses[-1]:.3f}" if len(losses) == updates else f"not finite after {len(losses)}"))
        print(" | ".join(rows[-1]), flush=True)
    return table(rows, left=1)
