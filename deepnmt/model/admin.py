"""Admin's profile: ω of every sub-layer, measured layer by layer in the memory of one layer; and its files.

Liu et al. 2020, Understanding the Difficulty of Training Transformers, section 4.3: after one forward pass with all ω
at 1, ω_1 = 1 and ω_i = sqrt(Var[F_0] + Σ_{j<i} Var[F_j]) over the sub-layers of a stack. The sum starts anew for the
decoder. Var[F_j] is the variance of all elements of sub-layer j's output after dropout, without padding, in fp32 and
training mode. Var[F_0] is the variance of the stack's input, as in the published profile, or 1 (`input_variance`).

`B` sentences, `S` source length, `T` target length, `D` width.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from deepnmt.batch import Batch
from deepnmt.config import Model
from deepnmt.errors import UserError
from deepnmt.files import write_json
from deepnmt.model.attention import key_mask
from deepnmt.model.blocks import SIDES, SUBLAYERS, Side, Stream, last_output, profiled_sublayers
from deepnmt.model.embedding import TABLES, InputLayer
from deepnmt.model.init import Initialiser, fill
from deepnmt.model.transformer import build_layer, build_top
from deepnmt.progress import no_progress, show_progress
from deepnmt.ranks import Ranks
from deepnmt.tokens import PAD

InputVariance = Literal["measured", "one"]

_FORMAT, _VERSION = "deepnmt-admin-profile", 1


@dataclass(frozen=True)
class AdminProfile:
    """ω of every sub-layer of the Admin stacks.

    Attributes:
        encoder, decoder: ω in the order of the sub-layers; empty for a stack that is not Admin.
        provenance: everything the numbers depend on, or the file they were read from.
    """

    encoder: list[float]
    decoder: list[float]
    provenance: dict[str, Any]

    @property
    def omega(self) -> dict[str, float]:
        """ω by canonical name, as in `encoder.layers.3.ffn`."""
        return {
            f"{side}.layers.{i // len(names)}.{names[i % len(names)]}": value
            for (side, names), values in zip(SUBLAYERS.items(), (self.encoder, self.decoder), strict=True)
            for i, value in enumerate(values)
        }

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
            return cls(*_from_json(text, path, names))
        split = len(names["encoder"])
        values = _from_text(text, path, split, len(names["decoder"]))
        digest = hashlib.sha256(text.encode()).hexdigest()
        return cls(values[:split], values[split:], {"file": path.name, "sha256": digest})


def _hash(provenance: dict[str, Any]) -> str:
    """A hash of everything a profile depends on."""
    return hashlib.sha256(json.dumps(provenance, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass
class _Flow:
    """A micro-batch between two layers of a stack.

    Attributes:
        x: [B, T, D], the input of the next layer; see `Stream`.
        real: boolean [B, T], false at padding.
        context: the arguments of a layer between x and the dropout key.
        key: the dropout key.
    """

    x: Stream
    real: Tensor
    context: tuple[Tensor | None, ...]
    key: int


@torch.no_grad()
def measure(
    model: Model,
    src_vocab: int,
    trg_vocab: int,
    seed: int,
    batches: Sequence[Batch],
    ranks: Ranks | None = None,
    *,
    input_variance: InputVariance = "measured",
    data: str = "",
    show: bool = False,
) -> AdminProfile:
    """Profiles the Admin stacks of a model. A stack with another block runs only if its output is needed.

    Memory holds one layer's weights at a time, and the activations of this process's micro-batches. Another division of
    the micro-batches among processes changes only the order of float64 sums.

    Args:
        model: shapes, dropouts and blocks.
        src_vocab, trg_vocab, seed: those of the `Transformer` to be trained; they fix its initial weights.
        batches: this process's micro-batches, on the device to run on. May be empty, but not on all processes.
        ranks: the processes that share the micro-batches, each of which calls `measure`; None: only this one.
        input_variance: which value to use for Var[F_0].
        data: the fingerprint of the prepared data, for the provenance.
        show: show progress on standard error.

    Raises:
        ValueError: no stack is Admin, or no process has a micro-batch.
    """
    counts = [len(names) + 1 if (names := profiled_sublayers(model, side)) else 0 for side in SIDES]
    if not any(counts):
        raise ValueError("neither stack is Admin, so there is nothing to profile")
    weights = Initialiser(model, src_vocab, trg_vocab, seed)
    flows = []
    for batch, x in zip(batches, _embed(model, "encoder", src_vocab, weights, batches), strict=True):
        src, lengths, *_ = batch.tensors
        real = torch.arange(src.size(1), device=src.device) < lengths[:, None]
        flows.append(_Flow(x, real, (key_mask(lengths, src.size(1)),), batch.key))
    parts = [_run_stack(model, "encoder", weights, flows, show)][: counts[0]]
    if counts[1]:
        top = build_top(model, "encoder")
        fill(top, weights, "encoder.norm")
        memories = [top.to(batch.device)(flow.x) for batch, flow in zip(batches, flows, strict=True)]
        flows = []
        embedded = _embed(model, "decoder", trg_vocab, weights, batches)
        for batch, x, memory in zip(batches, embedded, memories, strict=True):
            _, lengths, _, trg_out = batch.tensors
            flows.append(_Flow(x, trg_out != PAD, (memory, key_mask(lengths, memory.size(1))), batch.key))
        parts.append(_run_stack(model, "decoder", weights, flows, show))
    local = [float(sum(batch.tokens for batch in batches)), float(len(batches)), *torch.cat(parts).flatten().tolist()]
    total, *sums = ranks.sum(local) if ranks else local
    if not total:
        raise ValueError("no process has a micro-batch to profile")
    encoder, decoder = torch.tensor(sums[1:], dtype=torch.float64).view(-1, 3).split(counts)
    provenance = {
        "model": model.model_dump(),
        "vocabularies": [src_vocab, trg_vocab],
        "seed": seed,
        "input_variance": input_variance,
        "dtype": "float32",
        "target_tokens": int(total),
        "micro_batches": int(sums[0]),
        "data": data,
    }
    return AdminProfile(omega_of(encoder, input_variance), omega_of(decoder, input_variance), provenance)


def omega_of(moments: Tensor, input_variance: InputVariance = "measured") -> list[float]:
    """ω of a stack, from the moments of its input and of its branch outputs.

    Args:
        moments: float64 [1 + sub-layers, 3]; a row holds count, sum and sum of squares. No rows give no ω.
        input_variance: `one` replaces the variance of the input by 1.
    """
    if not len(moments):
        return []
    count, total, squares = moments.unbind(1)
    variance = squares / count - (total / count) ** 2
    if input_variance == "one":
        variance[0] = 1.0
    omega = variance[:-1].cumsum(0).sqrt()
    omega[0] = 1.0
    return omega.tolist()


def _embed(model: Model, side: Side, vocab: int, weights: Initialiser, batches: Sequence[Batch]) -> list[Tensor]:
    """The stack's input [B, T, D] for each micro-batch; the embedding table is freed on return."""
    table, entry = skip_init(nn.Embedding, vocab, model.width), InputLayer(model, side, weights.seed).train()
    fill(table, weights, f"embeddings.{TABLES[model.tied]['src' if side == 'encoder' else 'trg']}")
    fill(entry, weights, f"{side}.input")
    ids = 0 if side == "encoder" else 2  # src or trg_in
    return [entry.to(batch.device)(table.to(batch.device)(batch.tensors[ids]), batch.key) for batch in batches]


def _run_stack(model: Model, side: Side, weights: Initialiser, flows: list[_Flow], show: bool) -> Tensor:
    """Advances the flows through a stack, one layer at a time.

    Returns:
        The moments of its input and of its branch outputs, float64 [1 + sub-layers, 3].
    """
    zeros = torch.zeros(3, dtype=torch.float64)
    rows = [sum((_moments(last_output(flow.x)[flow.real]) for flow in flows), zeros)[None]]
    count = model.stack(side).layers
    with show_progress(f"{{:,}} of {count} {side} layers profiled", desc=f"profiling the {side}", unit="layer",
                     total=count) if show else nullcontext(no_progress) as progress:
        for index in range(count):
            layer = build_layer(model, side, index, weights.seed).train()
            fill(layer, weights, layer.name)
            outputs: list[Tensor] = []
            for add in layer.rule.adds:  # hooks are called in the order of the branches
                add.register_forward_hook(lambda _module, _inputs, output, seen=outputs: seen.append(output))
            rows.append(torch.zeros(len(layer.rule.adds), 3, dtype=torch.float64))
            for flow in flows:
                outputs.clear()
                flow.x = layer.to(last_output(flow.x).device)(flow.x, *flow.context, flow.key)
                rows[-1] += torch.stack([_moments(output[flow.real]) for output in outputs])
            progress(index + 1)
    return torch.cat(rows)


def _moments(values: Tensor) -> Tensor:
    """Count, sum and sum of squares of all elements: float64 [3] on the CPU."""
    wide = values.double()
    return torch.stack([wide.new_tensor(wide.numel()), wide.sum(), wide.square().sum()]).cpu()


# -- files -------------------------------------------------------------------------------------------------------------


def _from_json(text: str, path: Path, names: dict[Side, list[str]]) -> tuple[list[float], list[float], dict[str, Any]]:
    """ω of both stacks and the provenance."""
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT or content["version"] != _VERSION:
            raise KeyError
        omega, provenance = dict(content["omega"]), dict(content["provenance"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"admin.profile: {path} is JSON, but not a profile of format {_FORMAT!r}, version {_VERSION}; "
                        "write one with deepnmt profile") from None
    if omega.keys() != {*names["encoder"], *names["decoder"]}:
        first, second = (sum(name.startswith(side) for name in omega) for side in SIDES)
        raise _wrong_count(path, first, second, len(names["encoder"]), len(names["decoder"]))
    for name, value in omega.items():
        if not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
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
