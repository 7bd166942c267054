"""A weight is a function of its name: where weights come from, and the weights that a run begins with.

Building a model, a layer or a pipeline's stage draws nothing. `fill` asks a `Source` for each parameter by its
canonical name: the initialiser, a checkpoint (`checkpoint.weights_in`), or anything else that knows it. What the
initialiser gives depends on (seed, name) alone, whoever asks and in whatever order:

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
| what else a block has              | the block's `initial`: ω from the profile, gates, DLCL's 1/(l+1)            |
| `*.input.gain`                     | 1                                                                           |
| `embeddings.*.weight`              | normal with standard deviation D^-1/2, the row of pad 0                     |
| a table that a stack's input reads | × the block's `embedding_gain`: 1, t_fixup (9L)^-1/4; a table of two stacks |
|                                    | takes the source side's, unless that is 1                                   |

`init: auto` is depth_scaled for b2t and b2t_no_ln, whose published code does so (their paper, Takase et al. 2023,
names no initialisation), and xavier for every other block.
Xavier: Glorot and Bengio 2010, uniform in ±sqrt(6 / (fan_in + fan_out)).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from deepnmt import config
from deepnmt.model.blocks import BLOCKS, SIDES, LayerPosition, Matrix, profiled_sublayers
from deepnmt.model.dropout import stable_hash
from deepnmt.model.embedding import TABLES, Use
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import PAD

# The weight of a canonical name, whole and in fp32; a single number [] where all its numbers are the same.
Source = Callable[[str], Tensor]

# The linear maps of a layer, and the matrices stacked in each.
_MATRICES: dict[str, tuple[Matrix, ...]] = {
    "self_attn.qkv": ("q", "k", "v"), "self_attn.out": ("out",),
    "cross_attn.q": ("q",), "cross_attn.kv": ("k", "v"), "cross_attn.out": ("out",),
    "ffn.fc1": ("fc1",), "ffn.fc2": ("fc2",),
}


class Initialiser:
    """The weights that a run begins with: a `Source`. Nothing is kept; asked twice, it draws twice.

    Args:
        model, src_vocab, trg_vocab, seed: as of the `Transformer`.
        omega: ω by sub-layer, as in `encoder.layers.3.ffn`, of all stacks whose block is profiled; without, 1.

    Raises:
        ValueError: `omega` is of other sub-layers than the model's.
    """

    def __init__(
        self, model: config.Model, src_vocab: int, trg_vocab: int, seed: int, omega: Mapping[str, float] | None = None
    ) -> None:
        self.model, self.seed, self.omega = model, seed, omega
        self.vocabs: dict[Use, int] = {"src": src_vocab, "trg": trg_vocab, "out": trg_vocab}
        for side in SIDES if omega is not None else ():
            names, known = profiled_sublayers(model, side), [name for name in omega or () if name.startswith(side)]
            if sorted(names) != sorted(known):
                raise ValueError(f"the {side} has {len(names)} sub-layers, the profile {len(known)}")

    def __call__(self, name: str) -> Tensor:
        first, kind, *rest = name.split(".")
        if first == "embeddings":
            return self._table(kind)
        model, side = self.model, SIDES[first == "decoder"]
        stack = model.stack(side)
        block = BLOCKS[stack.block]
        if kind == "input":
            return torch.ones(())
        if kind == "norm":
            return torch.tensor(block.initial_value(LayerPosition.of(model, side, stack.layers), ".".join(rest)))
        position, path, last = LayerPosition.of(model, side, int(rest[0])), ".".join(rest[1:-1]), rest[-1]
        if rest[1] == "rule":
            if self.omega and block.profiled and rest[2] == "omegas":
                return torch.tensor(self.omega[position.sublayers[int(last)]])
            return torch.tensor(block.initial_value(position, ".".join(rest[2:])))
        if last in ("bias", "shift"):
            return torch.zeros(())
        matrices = _MATRICES[path]
        rows = model.ffn // block.feed_forward.copies if path == "ffn.fc1" else model.width * len(matrices)
        depth_scaled = stack.init == "depth_scaled" or (stack.init == "auto" and block.depth_scaled)
        scale, separate = position.depth**-0.5 if depth_scaled else 1.0, stack.init == "xavier_separate"
        weight = torch.empty(rows, model.ffn if path == "ffn.fc2" else model.width)
        generator = generator_for(self.seed, name)
        for part, matrix in zip(weight.chunk(len(matrices)), matrices, strict=True):
            block.init_matrix(part, matrix, block.matrix_gain(position, matrix, separate) * scale, generator)
        return weight

    def _table(self, name: str) -> Tensor:
        """The embedding table [V, D] of this name from N(0, gain·D^-1/2), its row of pad 0."""
        model = self.model
        uses = [use for use, table in TABLES[model.tied].items() if table == name]
        # the source side's gain counts, unless that is 1
        gains = [BLOCKS[model.stack(side).block].embedding_gain(LayerPosition.of(model, side, 0))
                 for use, side in (("src", SIDES[0]), ("trg", SIDES[1])) if use in uses]
        gain = next((gain for gain in gains if gain != 1.0), 1.0)
        table = torch.empty(self.vocabs[uses[0]], model.width)
        table.normal_(std=gain * model.width**-0.5, generator=generator_for(self.seed, f"embeddings.{name}.weight"))
        table[PAD] = 0
        return table


def generator_for(seed: int, name: str) -> torch.Generator:
    """The generator that draws the parameter of this canonical name."""
    return torch.Generator().manual_seed(stable_hash(seed, name))


def weight_from(source: Source, name: str, shape: Sequence[int]) -> Tensor:
    """What the source has under a name. Raises ValueError where that is of another shape or holds a NaN."""
    weight = source(name)
    weight = weight if weight.ndim else weight.expand(*shape)
    if tuple(weight.shape) != tuple(shape):
        raise ValueError(f"{name} is {list(weight.shape)} where {list(shape)} is expected")
    if bool(weight.isnan().any()):
        raise ValueError(f"{name} was left unfilled: it holds a NaN")
    return weight


@torch.no_grad()
def fill(module: nn.Module, source: Source, prefix: str = "") -> None:
    """Sets every parameter of a module; `prefix`: its canonical name, as in `encoder.layers.3`, of the model itself "".

    Raises:
        ValueError: see `weight_from`; or a buffer, which a module makes by itself, holds a NaN.
    """
    for name, parameter in module.named_parameters(prefix):
        parameter.copy_(weight_from(source, name, parameter.shape))
    for name, buffer in module.named_buffers(prefix):
        if bool(buffer.isnan().any()):
            raise ValueError(f"{name} was left unfilled: it holds a NaN")


def new_model(
    model: config.Model, src_vocab: int, trg_vocab: int, seed: int, label_smoothing: float = 0.0,
    omega: Mapping[str, float] | None = None,
) -> Transformer:
    """A model as a run begins with it, on the CPU. Arguments as of `Transformer` and `Initialiser`."""
    built = Transformer(model, src_vocab, trg_vocab, seed, label_smoothing)
    fill(built, Initialiser(model, src_vocab, trg_vocab, seed, omega))
    return built
