"""A trained model in the plain forms that other programs know: every stack is Post-LN or Pre-LN; or Peri-LN, where a
program knows that.

Admin, DeepNorm, rezero_post_ln and looks_linear are Post-LN in other words (`post_ln.py`); lns is Pre-LN whose γ and β
are smaller.

ReZero, Fixup and T-Fixup have no norms. Other programs add a residual only around a sub-layer with a LayerNorm, but one
can be made to do nothing: LN(u) = γ (u - mean) / sqrt(variance + ε) is γ u / sqrt(ε) for a stream u of mean 0 whose
variance is far below ε. So the stream is carried as u = 2^-40 x, γ = 2^40 sqrt(ε) gives x back, and one more
coordinate, minus the sum of the others, keeps the mean at 0. It comes as a whole head of zeros, because a width is a
multiple of the heads. What differs is less than the rounding of fp32.

`D` width, `V` vocabulary. Everything is computed in float64.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from deepnmt.checkpoint.checkpoint import LoadedModel, check_ramp
from deepnmt.config import Model, choices
from deepnmt.config.choices import BLOCKS, NORMS
from deepnmt.errors import UserError
from deepnmt.extras.export.post_ln import REWRITES, fold_weights
from deepnmt.model.blocks import SIDES, SUBLAYERS, LayerPosition, Side
from deepnmt.model.positions import POSITIONS
from deepnmt.tokens import PAD

Values = npt.NDArray[np.float64]
Pair = tuple[Values, Values]  # weight and bias

EPSILON = 1e-5  # of every LayerNorm
SMALL = 2.0**-40


def to_plain(
    loaded: LoadedModel, program: str, norms: Collection[str] = ("layer_norm",),
    activations: Collection[str] = ("relu", "gelu", "silu"), forms: Sequence[str] = ("post_ln", "pre_ln"),
) -> Plain:
    """The model in plain form. `norms`, `activations` and `forms` are those that the program knows. Raises `UserError`
    if the model has others."""
    model = loaded.recipe.model
    for name, known in (("norm", model.norm in norms), ("activation", model.activation in activations),
                        ("positions", choices.POSITIONS[model.positions].added)):
        if not known:
            raise UserError(f"model.{name} is {getattr(model, name)}, which deepnmt cannot write for {program}; "
                            "use the model as it is, or without rotary positions export it with --to onnx")
    check_ramp(loaded.folder, model, loaded.state.update)
    carried = [name for name, block in BLOCKS.items() if block.exported_as in forms or name in REWRITES]
    for side in SIDES:
        stack = model.stack(side)
        if stack.block not in carried:
            raise UserError(f"model.{side}.block is {stack.block}, which {program} cannot compute: its layers are "
                            "neither Post-LN nor Pre-LN in other words; export it with --to onnx, which carries "
                            f"every block (to {program} go {', '.join(carried)})")
    weights = {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}
    if any(model.stack(side).block in REWRITES for side in SIDES):
        weights, model = fold_weights(weights, model)
    return Plain(weights, model)


@dataclass
class Plain:
    """The weights of Post-LN and Pre-LN stacks, as other programs want them; the norm-free stacks are Pre-LN, wider by
    one head."""

    weights: Mapping[str, Tensor]
    model: Model
    used: set[str] = field(default_factory=set)  # names that were asked for

    def norm_free(self, side: Side) -> bool:
        return self.model.stack(side).facts.norm_free

    def kind(self, side: Side) -> Literal["post_ln", "pre_ln", "peri_ln"]:
        return self.model.stack(side).facts.exported_as or "pre_ln"

    def heads(self, side: Side) -> int:
        return self.model.shape(side).heads + self.norm_free(side)

    def width(self, side: Side) -> int:
        shape = self.model.shape(side)
        return shape.width // shape.heads * self.heads(side)

    def _extra(self, side: Side) -> int:
        """Coordinates beyond D."""
        return self.width(side) - self.model.shape(side).width

    def scaled(self, side: Side) -> bool:
        """Whether the table is still to be multiplied by sqrt(D)."""
        return not self.norm_free(side)

    def table(self, side: Side) -> Values:
        """The embedding table [V, D] of a stack's input."""
        table = self._table("src" if side == "encoder" else "trg") * self._gain(side)
        if self.scaled(side):
            return table
        return self._write(side, math.sqrt(table.shape[1]) * table.T).T

    def positions(self, side: Side, rows: int) -> Values:
        """The position table [rows, D]; sinusoids have values for positions beyond `model.max_length`, too."""
        table = POSITIONS[self.model.positions].table(rows, self.model.shape(side).width).double().numpy()
        return self._write(side, (table * self._gain(side)).T).T

    def has_gain(self, side: Side) -> bool:
        """Whether tables and positions of a stack's input are other than the model's."""
        gain = f"{side}.input.gain" in self.weights
        return gain or self.norm_free(side) or self.model.positions != "sinusoidal"

    def norm(self, name: str) -> Pair:
        """γ and β [D] of a norm; an RMSNorm's β is 0."""
        side = cast("Side", name.partition(".")[0])
        if self.norm_free(side):
            return np.full(self.width(side), math.sqrt(np.float32(EPSILON)) / SMALL), np.zeros(self.width(side))
        factor = 1.0
        layer = re.fullmatch(r"\w+\.layers\.(\d+)\.rule\.norms\.\d+", name)
        if layer:
            position = LayerPosition.of(self.model, side, int(layer[1]))
            factor = position.block.norm_factor(position)
        weight = factor * self._get(f"{name}.weight")
        if not NORMS[self.model.norm].centres:
            return weight, np.zeros_like(weight)
        return weight, factor * self._get(f"{name}.bias")

    def linear(self, name: str) -> Pair:
        """W and b of a linear map of a layer, by the name of the latter as in `encoder.layers.3.ffn.fc1`."""
        side, _, index, sublayer, matrix = name.split(".")
        side = cast("Side", side)
        weight, bias = self._merged(name, side, f"{side}.layers.{index}", sublayer, matrix)
        if matrix == "kv":
            weight = self._read("encoder", weight)
        elif matrix in ("qkv", "q", "fc1"):
            weight = self._read(side, weight)
        if matrix in ("qkv", "q", "kv"):
            extra = self._extra(side)
            weight = _with_rows(weight, len(matrix), extra)  # a matrix a letter
            bias = _with_rows(bias, len(matrix), extra)
        if matrix == "out":
            weight = self._read(side, weight)
        if matrix in ("out", "fc2"):
            return self._write(side, weight), self._write(side, bias)
        return weight, bias

    def output(self) -> Pair:
        """The projection [V, D] to the logits and its bias [V], which bars pad."""
        weight = self._table("out")
        bias = -self._scalar("decoder.norm.shift", 0.0) * weight.sum(1)
        bias[PAD] = -1e9
        return self._read("decoder", weight), bias

    def require_all_used(self, program: str) -> None:
        """Raises `UserError` for a weight that no one has asked for: the other program would leave it out."""
        left = sorted(self.weights.keys() - self.used)
        if left:
            raise UserError(f"{left[0]} has no place in a model of {program}, so the model cannot be exported to it; "
                            "export it with --to onnx, which carries every model")

    def _read(self, side: Side, matrix: Values) -> Values:
        """A matrix [.., D] that reads what a LayerNorm has made of the stream."""
        return np.pad(matrix, [(0, 0), (0, self._extra(side))])

    def _write(self, side: Side, matrix: Values) -> Values:
        """A matrix [D, ..] or vector [D] that is added to the stream."""
        if not self.norm_free(side):
            return matrix
        rest = np.zeros((self._extra(side) - 1, *matrix.shape[1:]))
        return SMALL * np.concatenate([matrix, -matrix.sum(0, keepdims=True), rest])

    def _merged(self, name: str, side: Side, layer: str, sublayer: str, matrix: str) -> Pair:
        """W and b with the scalars of ReZero and Fixup in them, so that a layer is x + W act(W x + b) + c.

        A scalar s that is subtracted before a matrix W adds -s · W 1 to its bias. The memory of a published Fixup is
        (x - shift) · scale.
        """
        branch = SUBLAYERS[side].index(sublayer)
        read, written, shift = 1.0, 1.0, self._scalar(f"{name}.shift", 0.0)
        if matrix in ("out", "fc2"):
            written = self._scalar(f"{layer}.rule.a", 1.0) * self._scalar(f"{layer}.rule.scales.{branch}", 1.0)
            if matrix == "fc2":
                shift += self._scalar(f"{layer}.ffn.fc2_shift", 0.0)
        elif matrix == "kv":
            read = self._scalar("encoder.norm.scale", 1.0)
            shift += read * self._scalar("encoder.norm.shift", 0.0)
        else:
            shift += self._scalar(f"{layer}.rule.shifts.{branch}", 0.0)
        weight = self._get(f"{name}.weight")
        bias = self._get(f"{name}.bias") if f"{name}.bias" in self.weights else np.zeros(len(weight))
        if matrix == "fc1":
            bias = bias - self._scalar(f"{layer}.ffn.shift", 0.0)
        return written * read * weight, written * (bias - shift * weight.sum(1))

    def _gain(self, side: Side) -> Values:
        name = f"{side}.input.gain"
        return self._get(name) if name in self.weights else np.ones(self.model.shape(side).width)

    def _table(self, use: Literal["src", "trg", "out"]) -> Values:
        return self._get(f"embeddings.{self.model.tables[use]}.weight")

    def _scalar(self, name: str, default: float) -> float:
        return float(self._get(name)[0]) if name in self.weights else default

    def _get(self, name: str) -> Values:
        self.used.add(name)
        return self.weights[name].double().numpy()


def _with_rows(values: Values, parts: int, count: int) -> Values:
    """So many equal parts of an array, each with `count` rows of zeros behind it."""
    padded = []
    for part in np.split(values, parts):
        padded += [part, np.zeros((count, *part.shape[1:]))]
    return np.concatenate(padded)
