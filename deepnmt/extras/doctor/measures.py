"""Measurements of a model on one batch: output changes, layer dependency, gradients, activations, displacements.

`P` parts tracked so far, `B` sentences, `T` length, `D` width.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import StatisticsError, correlation, linear_regression
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from deepnmt.batch import Batch
from deepnmt.extras.doctor.probes import (
    block_of,
    layers_of,
    matrices,
    mean_loss,
    norms_of,
    outputs_of,
    plain_loss,
    real_positions,
    sublayers,
    watching,
)
from deepnmt.model.blocks import SIDES, Block, Norm, Side, Stream, stream_of, tensors
from deepnmt.model.dropout import evaluating
from deepnmt.model.hooks import hooks
from deepnmt.model.init import generator_for
from deepnmt.model.transformer import Transformer

Result = TypeVar("Result")

_NO_LENGTH = 1e-30  # of a vector that is divided by this length, not by its own
HALF_MAX = 65504.0  # the largest finite fp16 number
# From the bottom of a Post-LN decoder layer: around its first and second norm, and into its third.
GRADIENT_POINTS = ("norms.0.in", "norms.0", "norms.1.in", "norms.1", "norms.2.in")


# -- output change -----------------------------------------------------------------------------------------------------
# Liu et al. 2020 (Admin), theorem 2, corollaries 1 and 2 and figure 4: |F(x, W) - F(x, W*)|² grows like N for Post-LN
# and like log N for Pre-LN. Here a change is the mean square of the difference over all elements at real positions,
# divided by the output's variance, so that stacks with and without a final norm are comparable.


@dataclass(frozen=True)
class Fit:
    """The least-squares line value = slope · term + offset, and its R²."""

    slope: float
    offset: float
    r2: float


def fit_line(terms: Sequence[float], values: Sequence[float]) -> Fit:
    """The fit, whose R² is the square of the correlation; all NaN with fewer than three points,
    or if all terms or all values are equal."""
    with suppress(StatisticsError):  # they are equal
        if len(terms) > 2 and all(map(math.isfinite, values)):
            slope, offset = linear_regression(terms, values)
            return Fit(slope, offset, correlation(terms, values) ** 2)
    return Fit(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Growth:
    """Changes at several depths N (layers), with their fits to N and to log N."""

    depths: list[int]
    changes: list[float]
    linear: Fit
    logarithmic: Fit

    @classmethod
    def of(cls, depths: Sequence[int], changes: Sequence[float]) -> Growth:
        """The changes with both fits."""
        logarithms = [math.log(depth) for depth in depths]
        return cls(list(depths), list(changes), fit_line(depths, changes), fit_line(logarithms, changes))


def change(before: Tensor, after: Tensor) -> float:
    """mean (after - before)² / Var[before], for outputs [positions, D]."""
    return float((after - before).square().mean() / before.var(correction=0))


Changes = dict[Side, list[float]]  # of `outputs_of`: one value for a stack, or one for each of its layers


def _changes(before: dict[Side, list[Tensor]], after: dict[Side, list[Tensor]]) -> Changes:
    return {side: list(map(change, before[side], after[side])) for side in SIDES}


@contextmanager
@torch.no_grad()
def perturbed(model: Transformer, size: float, seed: int) -> Iterator[None]:
    """Adds noise to every matrix of the layers (not to embeddings, norms and biases) while the context is open.

    The noise of a matrix is normal with `size` times Xavier's standard deviation sqrt(2 / (rows + columns)), for every
    block, however the block scales its own initial weights. Afterwards the weights are restored.
    """
    with restored(model):
        weights = [(name, parameter.data) for name, parameter in model.named_parameters() if ".layers." in name]
        for name, matrix in matrices(weights):
            deviation = size * math.sqrt(2 / sum(matrix.shape))
            noise = torch.empty(matrix.shape).normal_(std=deviation, generator=generator_for(seed, f"noise of {name}"))
            matrix.add_(noise.to(matrix))
        yield


@contextmanager
def restored(model: Transformer) -> Iterator[list[Tensor]]:
    """Restores the model's weights, which of them are frozen, the shares of its layers (`ramp`) and its mode on exit;
    yields copies of the weights."""
    was_training = model.training
    shares = [(part, part.share) for part in model.modules() if isinstance(part, Block)]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    try:
        yield weights
    finally:
        with torch.no_grad():
            for parameter, weight, is_trained in zip(model.parameters(), weights, trained, strict=True):
                parameter.copy_(weight)
                parameter.requires_grad_(is_trained)
        for block, share in shares:
            block.share = share
        model.train(was_training)


def noise_change(
    model: Transformer, batch: Batch, layers: bool = False, size: float = 0.01, trials: int = 3
) -> Changes:
    """The mean change of both stacks' (or every layer's) output over `trials` samples of noise, in evaluation mode; see
    `perturbed`."""
    with evaluating(model):
        before = outputs_of(model, batch, layers)
        total: Changes = {side: [0.0] * len(before[side]) for side in SIDES}
        for trial in range(trials):
            with perturbed(model, size, trial):
                for side, values in _changes(before, outputs_of(model, batch, layers)).items():
                    for index, value in enumerate(values):
                        total[side][index] += value / trials
    return total


def update_change(
    model: Transformer, batch: Batch, update: Callable[[], None], layers: bool = False
) -> tuple[Changes, float]:
    """The change of both stacks' (or every layer's) output by an update in place, and the plain loss after it; weights
    and mode are restored."""
    with restored(model):
        model.eval()
        before = outputs_of(model, batch, layers)
        update()
        model.eval()
        return _changes(before, outputs_of(model, batch, layers)), plain_loss(model, batch)


# -- layer dependency --------------------------------------------------------------------------------------------------
# How much of a sub-layer's input comes from each earlier branch. Liu et al. 2020 (Admin), section 4.1 and figures 7
# and 8: with x̂_i the normalised input of branch i + 1 and â_j the normalised output of branch j, x̂_i = Σ_{j≤i} β_ij
# â_j. Here the sum is exact, not estimated: while every LayerNorm keeps the variance it had on the batch, a residual
# block is an affine map of the layer's input and its branches, so x_i splits into one part for each branch (and one for
# the stack's input), and β_ij = std(part_ij) / std(x_i).


@torch.no_grad()
def dependency(model: Transformer, batch: Batch, side: Side) -> list[list[float]]:
    """β of a stack with n sub-layers on a batch, in evaluation mode: rows i = 0 … n, columns j = 0 … i.

    Row i is what enters branch i + 1 (row n: the stack's output), column 0 the stack's own input, column j branch j.
    β_ij is a ratio of standard deviations over all elements at real positions.
    """
    layers, top = layers_of(model, side), model.get_submodule(f"{side}.norm")
    entering: list[Stream] = []  # inputs of every layer and of the stack's final norm
    branches: list[list[Tensor]] = []  # outputs of each layer's branches
    with hooks() as handles, evaluating(model):
        for module in (*layers, top):
            handles.append(module.register_forward_pre_hook(lambda _m, inputs: entering.append(inputs[0])))
        for layer in layers:
            outputs: list[Tensor] = []
            branches.append(outputs)
            for add in layer.get_submodule("rule.adds").children():
                handles.append(add.register_forward_hook(
                    lambda _m, _i, output, outputs=outputs: outputs.append(output)))
        src, lengths, trg_in = batch["src"], batch["src_lengths"], batch["trg_in"]
        memory = model.encode(src, lengths, batch.key)
        if side == "decoder":
            model.decode(trg_in, memory, lengths, batch.key)

    real = real_positions(batch)[side]
    rows: list[list[float]] = []
    parts = [tensor[None] for tensor in tensors(entering[0])]  # of each tensor of the stream [P, B, T, D]
    for layer, x, outputs in zip(layers, entering, branches, strict=False):
        block = layer.get_submodule("rule")
        known, count = len(parts[0]), len(outputs)
        # Each branch is one more part. The last part stays zero: its output is what the block adds, as a norm's bias.
        alone = []
        for index, output in enumerate(outputs, known):
            padded = output.new_zeros(known + count + 1, *output.shape)
            padded[index] = output
            alone.append(padded)
        with _frozen(block, partial(_run, block, x, outputs)) as (wholes, _):
            inputs, result = _run(block, _padded(parts, count + 1), alone)
        for index, (branch_input, whole) in enumerate(zip(inputs, wholes, strict=True), known):
            rows.append(_shares(branch_input[:index] - branch_input[-1], whole, real))
        parts = [tensor[:-1] - tensor[-1] for tensor in tensors(result)]
    with _frozen(top, partial(top, entering[-1])) as whole:
        output = top(_padded(parts, 1))
    rows.append(_shares(output[:-1] - output[-1], whole, real))
    return rows


def _run(block: nn.Module, x: Stream, outputs: Sequence[Tensor]) -> tuple[list[Tensor], Stream]:
    """The inputs that a block passes to its branches, and its output, if the branches return `outputs`."""
    inputs: list[Tensor] = []

    def answer(output: Tensor, h: Tensor) -> Tensor:
        inputs.append(h)
        return output

    return inputs, block(x, [partial(answer, output) for output in outputs])


@contextmanager
def _frozen(module: nn.Module, forward: Callable[[], Result]) -> Iterator[Result]:
    """Yields the result of `forward`; while the context is open, each norm of the module keeps the statistics of its
    input [B, T, D] in that pass, see `Norm.frozen`."""
    inputs_of: dict[Norm, Tensor] = {}
    with hooks() as handles:
        for norm in module.modules():
            if isinstance(norm, Norm):
                handles.append(norm.register_forward_pre_hook(
                    lambda norm, inputs: inputs_of.update({norm: inputs[0]})))
        result = forward()
    with hooks() as handles:
        for norm, x in inputs_of.items():
            frozen = norm.frozen(x)
            handles.append(norm.register_forward_hook(lambda _m, inputs, _o, frozen=frozen: frozen(inputs[0])))
        yield result


def _padded(parts: Sequence[Tensor], count: int) -> Stream:
    """The stream of parts, with `count` parts of zeros appended."""
    padded = []
    for part in parts:
        padded.append(torch.cat([part, part.new_zeros(count, *part.shape[1:])]))
    return stream_of(padded)


def _shares(parts: Tensor, whole: Tensor, real: Tensor) -> list[float]:
    """std(part) / std(whole) of each part [P, B, T, D], at real positions."""
    total = whole[real].std(correction=0)
    return [float(part[real].std(correction=0) / total) for part in parts]


# -- gradients ---------------------------------------------------------------------------------------------------------
# Liu et al. 2020 (Admin), figure 3: the norm of the loss's gradient with respect to every sub-layer's output. Takase et
# al. 2023 (B2T), figures 3, 4 and 7: the same by layer, and at the points (1) to (5) of a Post-LN decoder layer. Xiong
# et al. 2020 (Pre-LN), figure 3: of the last FFN's second matrix.


@dataclass(frozen=True)
class Gradients:
    """Norms (Euclidean, all elements) of the gradient of the mean loss of a batch.

    Attributes:
        loss: nats a target token.
        outputs: by sub-layer, of its output x, as in `decoder.layers.3.ffn`.
        matrices: by matrix, as in `encoder.layers.0.self_attn.q`.
        places: by decoder layer, norms at the points (1) to (5) of the B2T paper; only for blocks that have all five
            and normalise after the branches.
    """

    loss: float
    outputs: dict[str, float]
    matrices: dict[str, float]
    places: dict[str, list[float]] = field(default_factory=dict)

    @property
    def last_ffn(self) -> float:
        """Of the second matrix of the decoder's last FFN."""
        names = [name for name in self.matrices if re.fullmatch(r"decoder\..*ffn\.fc2", name)]
        return self.matrices[names[-1]]

    def of_stack(self, side: str) -> list[float]:
        """Of the outputs of a stack's sub-layers, from the bottom."""
        return [value for name, value in self.outputs.items() if name.startswith(f"{side}.")]


def gradients(model: Transformer, batch: Batch) -> Gradients:
    """One forward and one backward pass in evaluation mode (no dropout); the model's own `.grad` is left empty."""
    norms: dict[str, float] = {}  # in the order of the forward pass
    outputs = {*sublayers(model, "encoder"), *sublayers(model, "decoder")}

    def observe(name: str, tensor: Tensor) -> None:
        norms[name] = 0.0
        if name in outputs or ".rule.norms." in name:
            tensor.register_hook(lambda grad: norms.update({name: float(grad.detach().norm())}))

    model.zero_grad(set_to_none=True)
    with evaluating(model):
        with watching(model, observe):
            loss = mean_loss(model, batch)
        loss.backward()
    grads = []
    for name, parameter in model.named_parameters():
        grads.append((name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad))
    by_matrix = {name: float(rows.norm()) for name, rows in matrices(grads)}
    model.zero_grad(set_to_none=True)
    order = list(norms)
    places = {}
    for index, layer in enumerate(layers_of(model, "decoder")):
        rule = f"decoder.layers.{index}.rule"
        if len(norms_of(layer)) >= 3 and order.index(f"{rule}.norms.0.in") > order.index(f"{rule}.adds.0"):
            places[f"decoder.layers.{index}"] = [norms[f"{rule}.{point}"] for point in GRADIENT_POINTS]
    of_outputs = {name: norm for name, norm in norms.items() if name in outputs}
    return Gradients(float(loss.detach()), of_outputs, by_matrix, places)


@dataclass(frozen=True)
class HalfZeros:
    """Exact zeros among the gradients of an fp16 copy of the model.

    Attributes:
        scale: the loss scale: the factor on an update's whole loss.
        finite: whether every gradient was finite.
        shares: by part (`encoder.layers.3`, `embeddings`), the share of elements that are exactly zero.
        shares_fp32: the same in fp32; gradients that are zero there are not lost to fp16.
    """

    scale: float
    finite: bool
    shares: dict[str, float]
    shares_fp32: dict[str, float]

    @property
    def lost(self) -> float:
        """The largest share, over the layers, that is zero in fp16 but not in fp32."""
        lost = [self.shares[name] - self.shares_fp32[name] for name in self.shares if ".layers." in name]
        return max(lost, default=math.nan)


def half_zeros(model: Transformer, batch: Batch, scale: float, accumulation: int = 1) -> HalfZeros:
    """Runs an fp16 copy of the model on the batch with its loss multiplied by `scale`, forward and backward.

    Args:
        accumulation: micro-batches per process in an update; the batch is one of them. An update divides the sum of
            their losses by all its tokens, so this batch's backward pass is that of mean loss × scale / accumulation.
    """
    half = copy.deepcopy(model).half().eval()
    with _HalfProducts():
        (mean_loss(half, batch).float() * (scale / accumulation)).backward()
    plain = copy.deepcopy(model).float().eval()
    mean_loss(plain, batch).backward()
    finite = True
    for parameter in half.parameters():
        if parameter.grad is not None:
            finite = finite and bool(parameter.grad.isfinite().all())
    return HalfZeros(scale, finite, _zero_shares(half), _zero_shares(plain))


class _HalfProducts(TorchDispatchMode):
    """Computes products of fp16 matrices on a CPU as GPUs do: sums in fp32, rounded to fp16 at the end. Where the CPU
    has no fp16 instructions, PyTorch's own products take some twenty times as long."""

    _PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._PRODUCTS and args[-1].dtype == torch.float16 and args[-1].device.type == "cpu":
            return func(*(each.float() for each in args), **(kwargs or {})).half()
        return func(*args, **(kwargs or {}))


def _zero_shares(model: Transformer) -> dict[str, float]:
    """The share of exact zeros by layer (embeddings together)."""
    zeros: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        words = name.split(".")
        part = ".".join(words[:3]) if ".layers." in name else words[0]
        if parameter.grad is None:
            zeros[part] += parameter.numel()
        else:
            zeros[part] += int((parameter.grad == 0).sum())
        total[part] += parameter.numel()
    return {part: zeros[part] / total[part] for part in total}


def displacement(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], gradients: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """How far each attention matrix moved between two checkpoints, and its gradient norm at the first.

    Liu et al. 2020 (Admin), figures 5 and 11: gradients of the attention matrices are unbalanced, the optimizer's
    updates are not. Gradient norms are relative to the largest gradient norm, updates to the largest update.

    Args:
        before, after: the weights of two checkpoints by parameter name.
        gradients: the norms at `before` by matrix, as `Gradients.matrices` names them.
    """
    differences = [(name, after[name] - before[name]) for name in before]
    updates = {name: float(rows.norm()) for name, rows in matrices(differences) if "_attn." in name}
    own_gradients = {name: gradients[name] for name in updates}
    return {"gradients": _over_largest(own_gradients), "updates": _over_largest(updates)}


def _over_largest(norms: Mapping[str, float]) -> dict[str, float]:
    """Each norm over the largest of them; all 0 if that is 0."""
    largest = max(norms.values(), default=0.0) or 1.0
    return {name: norm / largest for name, norm in norms.items()}


# -- activations -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def ranges(model: Transformer, batch: Batch) -> dict[str, dict[str, Any]]:
    """The size of the activations in every layer (`encoder.layers.3`), in evaluation mode.

    `variance`: of the layer's output, at real positions. `largest`: the largest magnitude among the outputs of the
    layer's modules and the inputs of its norms (the residual sum, which is no module's output). Attention scores are
    computed inside a kernel and not included. `where`: that module, as in `ffn.fc1` or `rule.norms.1 (input)`.
    `headroom`: the largest number of fp16 divided by `largest`.
    """
    real = real_positions(batch)
    figures: dict[str, dict[str, Any]] = {}

    def module_done(largest: dict[str, float], path: str, module: nn.Module, inputs: tuple[Any, ...], output: Any
                    ) -> None:
        values = {path: output}
        if isinstance(module, Norm):
            values[f"{path} (input)"] = inputs[0]
        for name, tensor in values.items():
            if isinstance(tensor, Tensor):
                largest[name] = max(largest.get(name, 0.0), float(tensor.abs().max()))

    def layer_done(largest: dict[str, float], name: str, side: Side, layer: nn.Module, _taken: Any, stream: Stream
                   ) -> None:
        output = block_of(layer).value(stream)
        largest["output"] = float(output.abs().max())
        where = max(largest, key=lambda path: largest[path])
        headroom = math.inf
        if largest[where]:
            headroom = HALF_MAX / largest[where]
        figures[name] = {"variance": float(output[real[side]].var(correction=0)), "largest": largest[where],
                         "where": where, "headroom": headroom}

    with hooks() as handles, evaluating(model):
        for side in SIDES:
            for index, layer in enumerate(layers_of(model, side)):
                largest: dict[str, float] = {}  # by module
                for path, module in layer.named_modules():
                    if path and not list(module.children()):
                        handles.append(module.register_forward_hook(partial(module_done, largest, path)))
                handles.append(layer.register_forward_hook(
                    partial(layer_done, largest, f"{side}.layers.{index}", side)))
        outputs_of(model, batch)
    return figures


@torch.no_grad()
def layer_similarity(model: Transformer, batch: Batch, side: Side) -> list[list[float]]:
    """The mean cosine over tokens between the outputs of each two layers of a stack [L][L], in evaluation mode. Takase
    et al. 2023 (B2T), figure 5."""
    with evaluating(model):
        units = F.normalize(torch.stack(outputs_of(model, batch, layers=True)[side]), dim=-1, eps=_NO_LENGTH)
    return (torch.einsum("lpd,mpd->lm", units, units) / units.size(1)).tolist()


def token_similarity(output: Tensor) -> float:
    """The mean cosine between a stack's outputs [positions, D] at different positions; 1 if all are parallel."""
    unit, count = F.normalize(output, dim=-1, eps=_NO_LENGTH), len(output)
    return float((unit.sum(0).square().sum() - count) / (count * (count - 1)))
