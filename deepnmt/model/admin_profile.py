"""Admin's profile: ω of every sub-layer, measured sub-layer by sub-layer in the memory of one layer; and its files.

Liu et al. 2020, Understanding the Difficulty of Training Transformers, section 4.3: ω_1 = 1 and
ω_i = sqrt(Var[F_0] + Σ_{j<i} Var[F_j]) over the sub-layers of a stack. The sum starts anew for the decoder. Var[F_j] is
the variance of all elements of sub-layer j's output after dropout, in fp32 and training mode. The settings of
`config.Admin` say the rest:

`method`: as in the authors' code, each ω is in place before the next sub-layer is measured, so the network below is
Admin already; or, in the words of the paper, all variances come from one forward pass with every ω at 1.
`count_padding`: whether positions of padding count, too. In the authors' code they do. There the stack's input is 0,
and the decoder's self-attention does not see them, as no self-attention of the encoder does.
`input_variance`: Var[F_0] is the variance of the stack's input, as in the authors' code, or 1, as in the paper.

`B` sentences, `S` source length, `T` target length, `D` width.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from deepnmt.batch import Batch
from deepnmt.config import Admin, Model
from deepnmt.device import default_generator
from deepnmt.errors import UserError
from deepnmt.files import write_json
from deepnmt.model.blocks import SIDES, SUBLAYERS, Branch, Side, Stream, profiled_sublayers, tensors
from deepnmt.model.blocks import Admin as AdminBlock
from deepnmt.model.embedding import new_table
from deepnmt.model.init import Initialiser, fill
from deepnmt.model.layers import InputLayer, Layer
from deepnmt.model.sublayers import key_mask
from deepnmt.model.transformer import build_layer, build_top, stream_start
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import no_progress, show_progress
from deepnmt.tokens import PAD

_FORMAT, _VERSION = "deepnmt-admin-profile", 1


@dataclass(frozen=True)
class AdminProfile:
    """ω of every sub-layer of the Admin stacks.

    Attributes:
        encoder, decoder: ω in the order of the sub-layers; empty for a stack that is not Admin.
        provenance: everything the numbers depend on, or the file they were read from.
        crossing: whether the decoder has cross-attention, as in a model with both sides.
    """

    encoder: list[float]
    decoder: list[float]
    provenance: dict[str, Any]
    crossing: bool = True

    @property
    def omega(self) -> dict[str, float]:
        """ω by canonical name, as in `encoder.layers.3.ffn`."""
        omega = {}
        own = SUBLAYERS["encoder"]  # of a stack without cross-attention
        crossing = SUBLAYERS["decoder"] if self.crossing else own
        for side, names, values in (("encoder", own, self.encoder), ("decoder", crossing, self.decoder)):
            for number, value in enumerate(values):
                layer, sublayer = divmod(number, len(names))
                omega[f"{side}.layers.{layer}.{names[sublayer]}"] = value
        return omega

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON, atomically; its folder is made if it does not exist."""
        path = Path(path)
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "hash": _hash(self.provenance),
            "provenance": self.provenance,
            "omega": self.omega,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content, indent=1)

    @classmethod
    def load(cls, path: str | Path, model: Model) -> AdminProfile:
        """Reads a profile for this model: deepnmt's JSON, or text with one sub-layer a line, the encoder's first.

        A line of text is either `value` or `index value`, where the index counts a stack's sub-layers from 1, as in the
        files of the authors' code. Width, dropout and data may differ from those of the profiled model, depths may not.

        Raises:
            UserError: the file cannot be read, is in none of these formats, or does not fit the model.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"admin.profile: {path} cannot be read ({error}); give a file that deepnmt profile wrote, "
                            "or null to measure anew") from None
        names = {side: profiled_sublayers(model, side) for side in SIDES}
        if text.lstrip().startswith("{"):
            return cls(*_from_json(text, path, names), len(model.sides) > 1)
        split = len(names["encoder"])
        values = _from_text(text, path, split, len(names["decoder"]))
        digest = hashlib.sha256(text.encode()).hexdigest()
        return cls(values[:split], values[split:], {"file": path.name, "sha256": digest},
                   len(model.sides) > 1)


def _hash(provenance: dict[str, Any]) -> str:
    """A hash of everything a profile depends on."""
    return hashlib.sha256(json.dumps(provenance, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass
class _Flow:
    """A micro-batch between two layers of a stack.

    Attributes:
        x: [B, T, D], the input of the next layer; see `Stream`.
        counted: boolean [B, T], the positions that count.
        context: the arguments of a layer between x and the dropout key.
        key: the dropout key.
        visible: boolean [B, 1, T, T], the keys that each position of a decoder attends to in its own stack; None: all
            up to itself, as in training, where what padding puts out has no effect.
    """

    x: Stream
    counted: Tensor
    context: tuple[Tensor | None, ...]
    key: int
    visible: Tensor | None = None


@torch.no_grad()
def measure(
    model: Model,
    src_vocab: int,
    trg_vocab: int,
    seed: int,
    batches: Sequence[Batch],
    ranks: Ranks | None = None,
    *,
    settings: Admin | None = None,
    data: str = "",
    show: bool = False,
) -> AdminProfile:
    """Profiles the Admin stacks of a model. A stack with another block runs only if its output is needed.

    Memory holds one layer's weights at a time, and the activations of this process's micro-batches. All of them pass a
    sub-layer before any enters the next. Another division of the micro-batches among processes changes only the order
    of float64 sums.

    Args:
        model: shapes, dropouts and blocks.
        src_vocab, trg_vocab, seed: those of the `Transformer` to be trained; they fix its initial weights.
        batches: this process's micro-batches, on the device to run on. May be empty, but not on all processes.
        ranks: the processes that share the micro-batches, each of which calls `measure`; None: only this one.
        settings: how to measure (default: as a recipe without them); its `profile` and `tokens` have no effect.
        data: the fingerprint of the prepared data, for the provenance.
        show: show progress on standard error.

    Raises:
        ValueError: no stack is Admin, or no process has a micro-batch.
    """
    ranks, settings = ranks or Ranks.alone(), settings or Admin()
    if not model.profiled:
        raise ValueError("neither stack is Admin, so there is nothing to profile")
    tokens, count = map(int, ranks.sum([float(sum(batch.tokens for batch in batches)), float(len(batches))]))
    if not count:
        raise ValueError("no process has a micro-batch to profile")
    weights = Initialiser(model, src_vocab, trg_vocab, seed)
    memories: list[tuple[Tensor | None, ...]] = [()] * len(batches)
    encoder: list[float] = []
    decoder: list[float] = []
    if "encoder" in model.sides:
        flows = _enter(model, "encoder", src_vocab, weights, batches, memories, settings)
        encoder = _run_stack(model, "encoder", weights, flows, ranks, settings, show)
        top = build_top(model, "encoder")
        fill(top, weights, "encoder.norm")
        memories = [(top.to(batch.device)(flow.x),) for batch, flow in zip(batches, flows, strict=True)]
    elif batches:
        memories = [(None,)] * len(batches)
    if "decoder" in model.sides and model.decoder.facts.profiled:
        flows = _enter(model, "decoder", trg_vocab, weights, batches, memories, settings)
        decoder = _run_stack(model, "decoder", weights, flows, ranks, settings, show)
    provenance = {
        "model": model.model_dump(),
        "vocabularies": [src_vocab, trg_vocab],
        "seed": seed,
        "method": settings.method,
        "count_padding": settings.count_padding,
        "input_variance": settings.input_variance,
        "dtype": "float32",
        "target_tokens": tokens,
        "micro_batches": count,
        "data": data,
    }
    return AdminProfile(encoder, decoder, provenance, len(model.sides) > 1)


def _enter(
    model: Model, side: Side, vocab: int, weights: Initialiser, batches: Sequence[Batch],
    memories: Sequence[tuple[Tensor | None, ...]], settings: Admin,
) -> list[_Flow]:
    """Each micro-batch at the bottom of a stack; the embedding table is freed on return. A memory is None for a decoder
    without an encoder."""
    table = new_table(model, "src" if side == "encoder" else "trg", vocab)
    entry = InputLayer(model, side, weights.seed).train()
    fill(table, weights, f"embeddings.{model.tables['src' if side == 'encoder' else 'trg']}")
    fill(entry, weights, f"{side}.input")
    flows = []
    for batch, memory in zip(batches, memories, strict=True):
        if side == "encoder":
            ids, lengths = batch["src"], batch["src_lengths"]
            counted = torch.arange(ids.size(1), device=ids.device) < lengths[:, None]
        else:
            ids, counted = batch["trg_in"], batch["trg_out"] != PAD
        x, visible = entry.to(batch.device)(table.to(batch.device)(ids), batch.key), None
        if settings.count_padding:
            if side == "decoder":
                visible = counted[:, None, None] & counted.new_ones(x.size(1), x.size(1)).tril()
            x, counted = x * counted[..., None], torch.ones_like(counted)
        mask = key_mask(batch["src_lengths"], batch["src"].size(1), x.dtype) if "encoder" in model.sides else None
        context = (*memory, mask)
        flows.append(_Flow(stream_start(model, side)(x), counted, context, batch.key, visible))
    return flows


def _run_stack(
    model: Model, side: Side, weights: Initialiser, flows: list[_Flow], ranks: Ranks, settings: Admin, show: bool
) -> list[float]:
    """Advances the flows through a stack, one layer at a time. Returns its ω; none if its block is not profiled."""
    count, profiled = model.stack(side).layers, model.stack(side).facts.profiled
    device = flows[0].counted.device if flows else ranks.device
    variances = [1.0]  # of the stack's input and of each sub-layer's output
    if profiled and settings.input_variance == "measured":
        variances = [_variance([tensors(flow.x)[-1][flow.counted] for flow in flows], ranks)]
    with show_progress(f"{{:,}} of {count} {side} layers profiled", desc=f"profiling the {side}", unit="layer",
                     total=count) if show else nullcontext(no_progress) as progress:
        for index in range(count):
            layer = build_layer(model, side, index, weights.seed).train()
            fill(layer, weights, layer.name)
            layer.layer_drop = 0.0  # all are measured
            layer.to(device)
            if profiled:
                _measure_layer(layer, flows, ranks, variances, in_place=settings.method == "in_place")
            else:
                for flow in flows:
                    flow.x = layer(flow.x, *flow.context, flow.key)
            progress(index + 1)
    return [omega_of(variances[:i]) for i in range(1, len(variances))] if profiled else []


def _measure_layer(layer: Layer, flows: list[_Flow], ranks: Ranks, variances: list[float], in_place: bool) -> None:
    """Advances the flows through an Admin layer, one sub-layer at a time, and appends the variances of its outputs."""
    block = cast(AdminBlock, layer.rule)
    layer.add_module("rule", _Unjoined())
    generator = default_generator(next(block.parameters()).device)
    branches, dropout = [], []  # of each flow: its sub-layers, and where it is in its sequence of random numbers
    for flow in flows:
        branches.append(layer(flow.x, *flow.context, flow.key))
        dropout.append(generator.get_state())
    for i, (add, omega) in enumerate(zip(block.adds, block.omegas, strict=True)):
        outputs = []
        for number, flow in enumerate(flows):
            generator.set_state(dropout[number])
            with _seeing(layer.get_submodule("self_attn"), flow.visible):
                outputs.append(add(branches[number][i](flow.x)))
            dropout[number] = generator.get_state()
        if in_place:
            omega.fill_(omega_of(variances))
        for flow, output in zip(flows, outputs, strict=True):
            flow.x = block.join(i, cast(Tensor, flow.x), partial(_measured, output))
        variances.append(_variance([output[flow.counted] for flow, output in zip(flows, outputs, strict=True)], ranks))


@contextmanager
def _seeing(attention: nn.Module, visible: Tensor | None) -> Iterator[None]:
    """While the context is open, a decoder's self-attention attends to `visible` keys alone; see `_Flow`."""
    if visible is None:
        yield
        return
    handle = attention.register_forward_pre_hook(lambda _m, given, _k: ((given[0], visible), {"causal": False}),
                                                 with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _measured(output: Tensor, _x: Tensor) -> Tensor:
    return output


class _Unjoined(nn.Module):
    """In the place of a block: the layer returns its sub-layers, not yet joined to x."""

    def forward(self, _x: Tensor, branches: Sequence[Branch]) -> Sequence[Branch]:
        return branches


def omega_of(below: Sequence[float]) -> float:
    """ω of a sub-layer, from the variances of the stack's input and of the branch outputs below; ω_1 is 1."""
    return math.sqrt(math.fsum(below)) if len(below) > 1 else 1.0


def _variance(parts: Sequence[Tensor], ranks: Ranks) -> float:
    """The variance of all elements of all ranks' parts, from float64 sums."""
    sums = torch.zeros(3, dtype=torch.float64)
    for values in parts:
        wide = values.double()
        sums += torch.stack([wide.new_tensor(wide.numel()), wide.sum(), wide.square().sum()]).cpu()
    count, total, squares = ranks.sum(sums.tolist())
    return squares / count - (total / count) ** 2


# -- files -------------------------------------------------------------------------------------------------------------


def _from_json(text: str, path: Path, names: dict[Side, list[str]]) -> tuple[list[float], list[float], dict[str, Any]]:
    """ω of both stacks and the provenance."""
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT or content["version"] != _VERSION:
            raise KeyError
        omega, provenance = dict(content["omega"]), dict(content["provenance"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise UserError(f"admin.profile: {path} is JSON, but not a profile of format {_FORMAT!r}, version {_VERSION}; "
                        "write one with deepnmt profile") from None
    if omega.keys() != {*names["encoder"], *names["decoder"]}:
        first, second = (sum(name.startswith(side) for name in omega) for side in SIDES)
        raise _wrong_count(path, first, second, len(names["encoder"]), len(names["decoder"]))
    for name, value in omega.items():
        if not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
            raise UserError(f"admin.profile: {path} has {value!r} for {name}; each ω must be a number above 0")
    encoder, decoder = ([float(omega[name]) for name in names[side]] for side in SIDES)
    return encoder, decoder, provenance


def _from_text(text: str, path: Path, encoder: int, decoder: int) -> list[float]:
    """The values of a file with lines `value` or `index value`, checked against the numbers of sub-layers."""
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise UserError(f"admin.profile: {path} is empty; it must hold {encoder + decoder} values of ω")
    columns = len(lines[0][1])
    if columns > 2:
        raise UserError(f"admin.profile: {path}, line {lines[0][0]} has {columns} columns; lines must be 'value' or "
                        "'index value'")
    values, starts = [], []
    previous = 0
    for number, fields in lines:
        where = f"admin.profile: {path}, line {number}"
        if len(fields) != columns:
            raise UserError(f"{where} has {len(fields)} columns, but the first line has {columns}; use one format in "
                            "all lines")
        values.append(_number(fields[-1], where))
        if columns == 2:
            index = _number(fields[0], where)
            if index not in (1, previous + 1):
                raise UserError(f"{where} has index {fields[0]} after {previous:g}; indices must count each stack's "
                                "sub-layers from 1")
            if index == 1:
                starts.append(len(values) - 1)
            previous = int(index)
    if len(values) != encoder + decoder:
        raise _wrong_count(path, len(values), None, encoder, decoder)
    if columns == 2 and starts != sorted({0, encoder} - {encoder + decoder}):
        sizes = [end - start for start, end in zip(starts, [*starts[1:], len(values)], strict=True)]
        raise _wrong_count(path, sizes[0], sum(sizes[1:]), encoder, decoder)
    return values


def _number(word: str, where: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{where} has {word!r}; it must be a number above 0")
    return value


def _wrong_count(path: Path, first: int, second: int | None, encoder: int, decoder: int) -> UserError:
    """`second` is None if the file does not distinguish the stacks; then `first` counts both."""
    values = f"{first} values" if second is None else f"{first} values for the encoder and {second} for the decoder"
    return UserError(f"admin.profile: {path} holds {values}, but the model's Admin stacks have {encoder} + {decoder} = "
                     f"{encoder + decoder} sub-layers (2 an encoder layer, 3 a decoder layer); give a profile of this "
                     "depth, or null to measure one")
