"""Initialisation as a function of (seed, parameter name), whoever builds the module and in whatever order.

| parameter                          | drawn from                                                                  |
|------------------------------------|-----------------------------------------------------------------------------|
| `*.qkv.weight` [3D, D]             | three Xavier-uniform [D, D] matrices: q, k, v                               |
| `*.kv.weight` [2D, D]              | two Xavier-uniform [D, D] matrices: k, v                                    |
| `*.q`, `*.out`, `*.fc1`, `*.fc2`   | Xavier-uniform; looks_linear: fc1, fc2 orthogonal and mirrored              |
| each of these matrices             | × the block's `matrix_gain`: 1/√2 on q, k, v, and what its paper says;      |
|                                    | under `init: xavier_separate` 1 for that 1/√2                               |
| each of these matrices             | × L^-1/2 under `init: depth_scaled`, L the depth of the layer's own stack   |
| biases of linear maps              | 0                                                                           |
| `*.norm*`                          | weight 1, bias 0                                                            |
| what else a block has              | as its class says: docs/blocks.md                                           |
| `embeddings.*.weight`              | normal with standard deviation D^-1/2, the row of pad 0                     |
| a table that a stack's input reads | × the block's `embedding_gain`: 1, t_fixup (9L)^-1/4; a table of two stacks |
|                                    | takes the source side's, unless that is 1                                   |

`init: auto` is depth_scaled for b2t and b2t_no_ln, whose published code does so (their paper, Takase et al. 2023,
names no initialisation), and xavier for every other block.
Xavier: Glorot and Bengio 2010, uniform in ±sqrt(6 / (fan_in + fan_out)).
"""

from __future__ import annotations

import torch
from torch import nn

from deepnmt import config
from deepnmt.model.blocks import BLOCKS, LayerPosition, Matrix
from deepnmt.model.dropout import stable_hash
from deepnmt.model.embedding import TABLES
from deepnmt.model.feedforward import ShiftedLinear
from deepnmt.model.layers import Layer
from deepnmt.tokens import PAD

# The linear maps of a layer, and the matrices stacked in each.
_SELF_ATTENTION: dict[str, tuple[Matrix, ...]] = {"self_attn.qkv": ("q", "k", "v"), "self_attn.out": ("out",)}
_CROSS_ATTENTION: dict[str, tuple[Matrix, ...]] = {
    "cross_attn.q": ("q",),
    "cross_attn.kv": ("k", "v"),
    "cross_attn.out": ("out",),
}
_FFN: dict[str, tuple[Matrix, ...]] = {"ffn.fc1": ("fc1",), "ffn.fc2": ("fc2",)}


def generator_for(seed: int, name: str) -> torch.Generator:
    """The generator that draws the parameter of this canonical name."""
    return torch.Generator().manual_seed(stable_hash(seed, name))


@torch.no_grad()
def init_layer(layer: Layer, position: LayerPosition, stack: config.Stack, seed: int) -> None:
    """Draws every matrix of the layer and zeroes its biases; see the table above."""
    linears = {**_SELF_ATTENTION, **(_CROSS_ATTENTION if position.side == "decoder" else {}), **_FFN}
    rule = BLOCKS[stack.block]
    depth_scaled = stack.init == "depth_scaled" or (stack.init == "auto" and rule.depth_scaled)
    scale, separate = position.depth**-0.5 if depth_scaled else 1.0, stack.init == "xavier_separate"
    for path, matrices in linears.items():
        linear = layer.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        generator = generator_for(seed, f"{layer.name}.{path}.weight")
        for part, matrix in zip(linear.weight.chunk(len(matrices)), matrices, strict=True):
            rule.draw(part, matrix, rule.matrix_gain(position, matrix, separate) * scale, generator)
        nn.init.zeros_(linear.bias)
        if isinstance(linear, ShiftedLinear):
            nn.init.zeros_(linear.shift)


@torch.no_grad()
def init_table(table: nn.Embedding, name: str, gain: float, seed: int) -> None:
    """Draws an embedding table [V, D] from N(0, gain·D^-1/2) with a zero row for pad; `name` as in `embeddings.src`."""
    std = gain * table.embedding_dim**-0.5
    nn.init.normal_(table.weight, std=std, generator=generator_for(seed, f"{name}.weight"))
    table.weight[PAD].zero_()


def table_gain(model: config.Model, name: str) -> float:
    """The factor that the stacks which read the table put on it (`Block.embedding_gain`); see above."""
    tables, depths = TABLES[model.tied], (model.encoder.layers, model.decoder.layers)
    gain = 1.0
    if tables["trg"] == name:
        gain = BLOCKS[model.decoder.block].embedding_gain(LayerPosition("decoder", 0, *depths, model.width))
    if tables["src"] == name:
        source = BLOCKS[model.encoder.block].embedding_gain(LayerPosition("encoder", 0, *depths, model.width))
        gain = gain if source == 1.0 else source
    return gain
