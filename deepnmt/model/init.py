"""Filling a model with weights, and the initial weights of a run.

Building a model, a layer or a pipeline stage creates no random numbers. `fill` gets each parameter by its canonical
name from a `Source`: the initialiser, a checkpoint (`checkpoint.weights_in`) or another function. The initialiser's
weights depend on (seed, name) only, not on the order of calls or the layout:

| parameter                          | initial weights                                                             |
|------------------------------------|-----------------------------------------------------------------------------|
| `*.qkv.weight` [3D, D]             | three Xavier-uniform [D, D] matrices: q, k, v                               |
| `*.kv.weight` [2D, M]              | two Xavier-uniform [D, M] matrices, M the encoder's width: k, v             |
| `*.q`, `*.out`, `*.fc1`, `*.fc2`   | Xavier-uniform; looks_linear: fc1, fc2 orthogonal and mirrored; a gated fc1 |
|                                    | [2F, D] is two [F, D] matrices                                              |
| each of these matrices             | × the block's `matrix_gain`: 1/√2 for q, k, v, and its paper's factors;     |
|                                    | with `init: xavier_separate` 1 instead of this 1/√2                         |
| each of these matrices             | × the block's `sublayer_gain`, as of `cross_attn` alone                     |
| each of these matrices             | × L^-1/2 with `init: depth_scaled`, L the depth of the layer's own stack    |
| biases of linear maps              | 0, or uniform within the block's `bias_bound`                               |
| `*.norm*`                          | weight 1, bias 0                                                            |
| other parameters of a block        | ω from the profile, else the block's `initial_value`: gates, DLCL's 1/(l+1) |
| `*.input.gain`                     | 1                                                                           |
| `embeddings.*.weight`              | normal with standard deviation D^-1/2, the row of pad 0                     |
| the table of a stack's input       | × the block's `embedding_gain`: 1, t_fixup (9L)^-1/4; a table of two stacks |
|                                    | has the source side's, unless that is 1                                     |
| each of these                      | × the factor of `transfer.factors_of` with `model.tuned_at`                  |
| a table in bands                   | see `adaptive.Bands.fill`                                                   |
| an output table of its own         | × the `output_gain` of the decoder's block: 1                               |

`init: auto` is depth_scaled for b2t and b2t_no_ln and xavier for every other block. `init: published` takes the draws
and parameters of the authors' code, see `published.py`. `init: fairseq` draws FFN matrices (times the same factors,
looks_linear's mirrored ones left alone) and the biases of q, k, v, fc1 and fc2 uniform in ±1/√columns, as PyTorch's
`Linear` does and so fairseq 0.12.2.
Xavier: Glorot and Bengio 2010, uniform in ±sqrt(6 / (fan_in + fan_out)).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from deepnmt import config
from deepnmt.config.choices import Use
from deepnmt.model.blocks import SIDES, LayerPosition, Matrix, Side, profiled_sublayers
from deepnmt.model.dropout import stable_hash
from deepnmt.model.embedding import bands_of, table_width
from deepnmt.model.loss import CrossEntropy
from deepnmt.model.sublayers import ACTIVATIONS
from deepnmt.model.transfer import factors_of
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import PAD

# From a canonical name to its full weight in fp32, or to a scalar [] if all elements are equal.
Source = Callable[[str], Tensor]


@runtime_checkable
class RangeSource(Protocol):
    """A `Source` that can return elements `start` to `stop` of a weight alone, flat; `shapes`: of the whole weights."""

    shapes: Mapping[str, tuple[int, ...]]

    def __call__(self, name: str) -> Tensor: ...

    def part(self, name: str, start: int, stop: int) -> Tensor: ...

# The linear maps of a layer, and the matrices stacked in each.
_MATRICES: dict[str, tuple[Matrix, ...]] = {
    "self_attn.qkv": ("q", "k", "v"), "self_attn.out": ("out",),
    "cross_attn.q": ("q",), "cross_attn.kv": ("k", "v"), "cross_attn.out": ("out",),
    "ffn.fc1": ("fc1",), "ffn.fc2": ("fc2",),
}


class Initialiser:
    """A `Source` of a run's initial weights. Nothing is cached; every call computes the weight anew.

    Args:
        model, src_vocab, trg_vocab, seed: those of the `Transformer`.
        omega: ω by sub-layer, as in `encoder.layers.3.ffn`, of all stacks whose block is profiled; None: 1.

    Raises:
        ValueError: `omega` has other sub-layers than the model.
    """

    def __init__(
        self, model: config.Model, src_vocab: int, trg_vocab: int, seed: int, omega: Mapping[str, float] | None = None
    ) -> None:
        self.model, self.seed, self.omega = model, seed, omega
        self.vocabs: dict[Use, int] = {"src": src_vocab, "trg": trg_vocab, "out": trg_vocab}
        for side in SIDES if omega is not None else ():
            names, known = profiled_sublayers(model, side), [name for name in omega or () if name.startswith(side)]
            if sorted(names) != sorted(known):
                raise ValueError(f"the {side} has {len(names)} sub-layers, but the profile has {len(known)}")

    def __call__(self, name: str) -> Tensor:
        weight, factor = self._standard(name), factors_of(name, self.model).init
        return weight if factor == 1.0 else weight * factor

    def _standard(self, name: str) -> Tensor:
        first, kind, *rest = name.split(".")
        if first == "embeddings":
            return self._table(kind)
        model = self.model
        side: Side = "decoder" if first == "decoder" else "encoder"
        stack = model.stack(side)
        block = LayerPosition.of(model, side, 0).block
        if kind == "input":
            return torch.ones(())
        if kind == "norm":
            return torch.tensor(block.initial_value(LayerPosition.of(model, side, stack.layers), ".".join(rest)))
        position = LayerPosition.of(model, side, int(rest[0]))
        path, last = ".".join(rest[1:-1]), rest[-1]  # as in self_attn.qkv and weight
        if rest[1] == "rule":
            if self.omega and block.profiled and rest[2] == "omegas":
                return torch.tensor(self.omega[position.sublayers[int(last)]])
            return torch.tensor(block.initial_value(position, ".".join(rest[2:])))
        if last.endswith("shift"):
            return torch.zeros(())
        if path.endswith(".norm"):
            return torch.tensor(block.initial_value(position, last))

        matrices = _MATRICES[path]
        generator = generator_for(self.seed, name)
        shape = model.shape(side)
        rows, columns = shape.width * len(matrices), shape.width
        if path == "ffn.fc1":
            matrices *= ACTIVATIONS[model.activation].rows
            rows = shape.ffn * len(matrices) // block.feed_forward.copies
        elif path == "ffn.fc2":
            columns = shape.ffn
        elif path == "cross_attn.kv":
            columns = model.shape("encoder").width
        if last == "bias":
            drawn = stack.init == "fairseq" and path.rpartition(".")[2] != "out"
            bounds = [columns**-0.5 if drawn else block.bias_bound(matrix, columns) for matrix in matrices]
            if not any(bounds):
                return torch.zeros(())
            bias = torch.empty(rows)
            for part, bound in zip(bias.chunk(len(matrices)), bounds, strict=True):
                part.uniform_(-bound, bound, generator=generator)
            return bias

        depth_scaled = stack.init == "depth_scaled" or (stack.init in ("auto", "published") and block.depth_scaled)
        scale = position.depth**-0.5 if depth_scaled else 1.0
        weight = torch.empty(rows, columns)
        for part, matrix in zip(weight.chunk(len(matrices)), matrices, strict=True):
            gain = block.matrix_gain(position, matrix) * scale
            gain *= block.sublayer_gain(position, rest[1], matrix)
            if stack.init == "fairseq" and matrix in ("fc1", "fc2") and block.feed_forward.copies == 1:
                part.uniform_(-gain * columns**-0.5, gain * columns**-0.5, generator=generator)
            else:
                block.init_matrix(part, path, matrix, gain, generator)
        return weight

    def _table(self, name: str) -> Tensor:
        """The embedding table [V, D] of this name: normal with standard deviation gain·D^-1/2, the row of pad 0."""
        model = self.model
        generator = generator_for(self.seed, f"embeddings.{name}.weight")
        if (bands := bands_of(model, self.vocabs["out"])) is not None:
            table = torch.empty(bands.rows, bands.width)
            bands.fill(table, generator)
            return table
        uses = [use for use, table in model.tables.items() if table == name]
        # the source side's gain counts, unless that is 1
        first = {side: LayerPosition.of(model, side, 0) for side in SIDES}
        gains = [first[side].block.embedding_gain(first[side])
                 for use, side in (("src", SIDES[0]), ("trg", SIDES[1])) if use in uses]
        gains += [first[model.last].block.output_gain()] if uses == ["out"] else []
        gain = next((gain for gain in gains if gain != 1.0), 1.0)
        width = table_width(model, uses[0])
        table = torch.empty(self.vocabs[uses[0]], width)
        table.normal_(std=gain * width**-0.5, generator=generator)
        table[PAD] = 0
        return table


def generator_for(seed: int, name: str) -> torch.Generator:
    """The random generator for the parameter of this canonical name."""
    return torch.Generator().manual_seed(stable_hash(seed, name))


def weight_from(source: Source, name: str, shape: Sequence[int]) -> Tensor:
    """The weight of a name, expanded to `shape`. Raises ValueError if it has another shape or contains NaN."""
    return part_from(source, name, shape, 0, math.prod(shape)).view(tuple(shape))


def part_from(source: Source, name: str, shape: Sequence[int], start: int, stop: int) -> Tensor:
    """Elements `start` to `stop` of the flattened weight that `weight_from` returns; a `RangeSource` reads no others.
    Raises ValueError if the weight has another shape or these elements contain NaN."""
    if isinstance(source, RangeSource):
        _check_shape(name, source.shapes.get(name, shape), shape)
        part = source.part(name, start, stop)
    else:
        weight = source(name)
        weight = weight if weight.ndim else weight.expand(*shape)
        _check_shape(name, weight.shape, shape)
        part = weight.flatten()[start:stop]
    if bool(part.isnan().any()):
        raise ValueError(f"{name} was not filled: it contains NaN")
    return part


def _check_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(found) != tuple(expected):
        raise ValueError(f"{name} has shape {list(found)}, but must have {list(expected)}")


@torch.no_grad()
def fill(module: nn.Module, source: Source, prefix: str = "") -> None:
    """Sets every parameter of a module from a source.

    Args:
        prefix: the canonical name of the module, as in `encoder.layers.3`; "" for a whole model.

    Raises:
        ValueError: see `weight_from`; or a buffer, which the module itself computes, contains NaN.
    """
    for name, parameter in module.named_parameters(prefix):
        parameter.copy_(weight_from(source, name, parameter.shape))
    for name, buffer in module.named_buffers(prefix):
        if bool(buffer.isnan().any()):
            raise ValueError(f"{name} was not filled: it contains NaN")


def new_model(
    model: config.Model, src_vocab: int, trg_vocab: int, seed: int, label_smoothing: float = 0.0,
    omega: Mapping[str, float] | None = None,
) -> Transformer:
    """A model with a run's initial weights, on the CPU. For the arguments see `Transformer` and `Initialiser`."""
    transformer = Transformer(model, src_vocab, trg_vocab, seed, CrossEntropy(label_smoothing))
    fill(transformer, Initialiser(model, src_vocab, trg_vocab, seed, omega))
    return transformer
