"""Hooks that show the activations of a model: every sub-layer's branch, norm and output, by module name.

The model's code has no part in it: hooks stay on the modules of `model/blocks/` and `model/layers.py` while the
context of `watching` is open. The names of the points:

    encoder.input                     the stack's input
    encoder.layers.3.rule.adds.1      a branch's output F_i, before it joins the residual
    encoder.layers.3.rule.norms.1     a LayerNorm's output, and its input under the same name with `.in`
    encoder.layers.3.ffn              x after the sub-layer, the input of the next sub-layer or layer
    encoder                           the stack's output, after its final norm if it has one

`B` sentences, `S` source length, `T` target length, `D` width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from deepnmt.batch import Batch
from deepnmt.model.blocks import SIDES, SUBLAYERS, Block, Side, Stream, tensors
from deepnmt.model.dropout import evaluating
from deepnmt.model.hooks import hooks
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import PAD

Observe = Callable[[str, Tensor], None]

# The matrices stacked in one parameter, in the order of its rows.
_STACKED = {"qkv.weight": ("q", "k", "v"), "kv.weight": ("k", "v")}


def _layer_hooks(
    name: str, layer: nn.Module, parts: Sequence[str], observe: Observe
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Hooks on a layer's norms, adds and branches and on the layer itself.

    No module returns a sub-layer's output x, so it is caught as an input: of the norm before the next branch (Pre-LN),
    or of that branch itself. The last sub-layer's output is the layer's.
    """
    pending: set[int] = set()  # the sub-layer whose branch has returned, but whose output has not been observed yet

    def input_arrives(index: int, x: Tensor) -> None:
        """x enters a module of sub-layer index + 1, so it is the output of sub-layer `index`, if that is pending."""
        if index in pending:
            pending.remove(index)
            observe(f"{name}.{parts[index]}", x)

    def added(index: int, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        observe(f"{name}.rule.adds.{index}", output)
        pending.add(index)

    def norm_begins(index: int, _module: nn.Module, inputs: Any) -> None:
        input_arrives(index - 1, inputs[0])
        observe(f"{name}.rule.norms.{index}.in", inputs[0])

    def layer_ends(layer: nn.Module, _inputs: Any, output: Stream) -> Stream:
        pending.clear()
        value, output = value_in(layer, output)
        observe(f"{name}.{parts[-1]}", value)
        return output

    yield layer.register_forward_hook(layer_ends)
    for index, part in enumerate(parts):
        yield layer.get_submodule(f"rule.adds.{index}").register_forward_hook(partial(added, index))
        yield layer.get_submodule(part).register_forward_pre_hook(
            lambda _m, inputs, index=index: input_arrives(index - 1, inputs[0]))
    for index, norm in enumerate(norms_of(layer)):
        yield norm.register_forward_pre_hook(partial(norm_begins, index))
        yield norm.register_forward_hook(
            lambda _m, _i, output, index=index: observe(f"{name}.rule.norms.{index}", output))


def norms_of(layer: nn.Module) -> list[nn.Module]:
    """The norms of a layer's sub-layers, in their order; empty if it has none."""
    return list(layer.get_submodule("rule.norms").children())


def block_of(layer: nn.Module) -> Block:
    """The layer's block."""
    return cast(Block, layer.get_submodule("rule"))


def value_in(layer: nn.Module, output: Stream) -> tuple[Tensor, Stream]:
    """What stands for a layer's output, see `Block.value`, and the output with it in the graph.

    If it is none of the stream's tensors, such as their mean, its gradient is that of a shift of all of them.
    """
    value, parts = block_of(layer).value(output), tensors(output)
    if not torch.is_grad_enabled() or any(value is part for part in parts):
        return value, output
    value = value.detach().requires_grad_()
    shift = value - value.detach()  # 0, but for the graph
    return value, tuple(part + shift for part in parts)


@contextmanager
def watching(model: Transformer, observe: Observe) -> Iterator[None]:
    """While the context is open, calls `observe(name, tensor)` for every point of a forward pass, in the order of
    computation."""
    with hooks() as handles:
        for side in SIDES:
            stack = model.get_submodule(side)
            handles.append(stack.get_submodule("input").register_forward_hook(
                lambda _m, _i, output, side=side: observe(f"{side}.input", output)))
            handles.append(stack.get_submodule("norm").register_forward_hook(
                lambda _m, _i, output, side=side: observe(side, output)))
            for index, layer in enumerate(layers_of(model, side)):
                handles.extend(_layer_hooks(f"{side}.layers.{index}", layer, SUBLAYERS[side], observe))
        yield


def layers_of(model: Transformer, side: Side) -> list[nn.Module]:
    """A stack's layers, from the bottom."""
    return list(model.get_submodule(f"{side}.layers").children())


def sublayers(model: Transformer, side: Side) -> list[str]:
    """The names of a stack's sub-layers from the bottom, as in `decoder.layers.3.cross_attn`."""
    names = []
    for index in range(len(layers_of(model, side))):
        names += [f"{side}.layers.{index}.{part}" for part in SUBLAYERS[side]]
    return names


def real_positions(batch: Batch) -> dict[Side, Tensor]:
    """Where there is no padding: boolean [B, S] for the encoder, [B, T] for the decoder."""
    src, lengths, trg_out = batch["src"], batch["src_lengths"], batch["trg_out"]
    return {"encoder": torch.arange(src.size(1), device=src.device) < lengths[:, None], "decoder": trg_out != PAD}


@torch.no_grad()
def outputs_of(model: Transformer, batch: Batch, layers: bool = False) -> dict[Side, list[Tensor]]:
    """The outputs of both stacks at real positions, each a list of one tensor [positions, D]; with `layers` those of
    every layer, from the bottom. With dropout only if the model is in training mode."""
    src, lengths, trg_in = batch["src"], batch["src_lengths"], batch["trg_in"]
    real = real_positions(batch)
    inside: dict[Side, list[Tensor]] = {side: [] for side in SIDES}
    with hooks() as handles:
        for side in SIDES:
            def layer_done(layer: nn.Module, _inputs: Any, output: Stream, side: Side = side) -> None:
                inside[side].append(block_of(layer).value(output)[real[side]])

            if layers:
                handles += [layer.register_forward_hook(layer_done) for layer in layers_of(model, side)]
        memory = model.encode(src, lengths, batch.key)
        hidden = model.decode(trg_in, memory, lengths, batch.key)
    if layers:
        return inside
    return {"encoder": [memory[real["encoder"]]], "decoder": [hidden[real["decoder"]]]}


def mean_loss(model: Transformer, batch: Batch) -> Tensor:
    """The smoothed loss in nats a target token, differentiable."""
    return model(batch).loss / batch.tokens


@torch.no_grad()
def plain_loss(model: Transformer, batch: Batch) -> float:
    """The loss without label smoothing in nats a target token, in evaluation mode."""
    with evaluating(model):
        return float(model(batch).nll / batch.tokens)


def matrices(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Every matrix of layers and embeddings among (name, tensor) pairs; stacked matrices are split.

    `….self_attn.qkv.weight` [3D, D] gives `….self_attn.q`, `.k` and `.v`, and `….ffn.fc1.weight` gives `….ffn.fc1`.
    Vectors (biases, norms, ω) are skipped.
    """
    for name, tensor in named:
        if tensor.ndim != 2:
            continue
        head, _, last = name.removesuffix(".weight").rpartition(".")
        parts = _STACKED.get(f"{last}.weight", (last,))
        for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
            yield f"{head}.{part}", rows
