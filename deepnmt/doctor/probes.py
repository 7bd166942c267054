"""What flows through a model: every sub-layer's branch, norm and output, seen from outside by module name.

The model knows nothing of it: hooks stand on the modules of `model/blocks.py` and `model/layers.py` while `watching`
lasts, and are gone afterwards. Points are called

    encoder.input                     what enters the stack
    encoder.layers.3.rule.adds.1      a branch's output F_i, before it joins the residual
    encoder.layers.3.rule.norms.1     a LayerNorm's output, and its input under the same name with `.in`
    encoder.layers.3.ffn              x after the sub-layer: what the next sub-layer (or layer) starts from
    encoder                           the stack's output, after the norm on top where there is one

`B` sentences, `S` source length, `T` target length, `D` width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepnmt.batch import Batch
from deepnmt.model.blocks import SIDES, SUBLAYERS, Norm, Side, last_output
from deepnmt.model.dropout import evaluating
from deepnmt.model.transformer import Transformer
from deepnmt.tokens import PAD

See = Callable[[str, Tensor], None]

# The matrices stacked in one parameter, from the top.
_STACKED = {"qkv.weight": ("q", "k", "v"), "kv.weight": ("k", "v")}


@contextmanager
def hooks() -> Iterator[list[torch.utils.hooks.RemovableHandle]]:
    """A list for hooks' handles; those in it are removed at the end, come what may."""
    handles: list[torch.utils.hooks.RemovableHandle] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


def _layer_hooks(
    name: str, layer: nn.Module, parts: Sequence[str], see: See
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Hooks on a layer's norms, adds and branches and on the layer itself.

    A sub-layer's output has no module of its own: it is what the next norm or branch takes. Where x passes a norm on
    its way into the next branch (Pre-LN), it is that norm's input; else it is the branch's own input; the last one is
    the layer's output.
    """
    waiting: set[int] = set()  # the sub-layer whose branch has been joined and whose output is yet to be seen

    def reached(index: int, x: Tensor) -> None:
        """Something that belongs to sub-layer index + 1 takes x: then x is the output of `index`, if that is due."""
        if index in waiting:
            waiting.remove(index)
            see(f"{name}.{parts[index]}", x)

    def added(index: int, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        see(f"{name}.rule.adds.{index}", output)
        waiting.add(index)

    def norm_begins(index: int, _module: nn.Module, inputs: Any) -> None:
        reached(index - 1, inputs[0])
        see(f"{name}.rule.norms.{index}.in", inputs[0])

    def layer_ends(_module: nn.Module, _inputs: Any, output: Any) -> None:
        waiting.clear()
        see(f"{name}.{parts[-1]}", last_output(output))

    yield layer.register_forward_hook(layer_ends)
    for index, part in enumerate(parts):
        yield layer.get_submodule(f"rule.adds.{index}").register_forward_hook(partial(added, index))
        yield layer.get_submodule(part).register_forward_pre_hook(
            lambda _m, inputs, index=index: reached(index - 1, inputs[0]))
    for index, norm in enumerate(norms_of(layer)):
        yield norm.register_forward_pre_hook(partial(norm_begins, index))
        yield norm.register_forward_hook(
            lambda _m, _i, output, index=index: see(f"{name}.rule.norms.{index}", output))


def norms_of(layer: nn.Module) -> list[nn.Module]:
    """The norms of a layer's rule, in order; of a rule without any, none."""
    return [module for name, module in layer.get_submodule("rule").named_modules()
            if name.startswith("norms.") and isinstance(module, Norm)]


@contextmanager
def watching(model: Transformer, see: See) -> Iterator[None]:
    """While it lasts, `see(name, tensor)` is called for every point of a forward pass, in the order of computation."""
    with hooks() as handles:
        for side in SIDES:
            stack = model.get_submodule(side)
            handles.append(stack.get_submodule("input").register_forward_hook(
                lambda _m, _i, output, side=side: see(f"{side}.input", output)))
            handles.append(stack.get_submodule("norm").register_forward_hook(
                lambda _m, _i, output, side=side: see(side, output)))
            for index, layer in enumerate(layers_of(model, side)):
                handles.extend(_layer_hooks(f"{side}.layers.{index}", layer, SUBLAYERS[side], see))
        yield


def layers_of(model: Transformer, side: Side) -> list[nn.Module]:
    """A stack's layers, from the bottom."""
    return list(model.get_submodule(f"{side}.layers").children())


def sublayers(model: Transformer, side: Side) -> list[str]:
    """The names of a stack's sub-layers from the bottom, as in `decoder.layers.3.cross_attn`."""
    return [f"{side}.layers.{index}.{part}" for index in range(len(layers_of(model, side))) for part in SUBLAYERS[side]]


def real_positions(batch: Batch) -> dict[Side, Tensor]:
    """Where there is no padding: boolean [B, S] for the encoder, [B, T] for the decoder."""
    src, lengths, _, trg_out = batch.tensors
    return {"encoder": torch.arange(src.size(1), device=src.device) < lengths[:, None], "decoder": trg_out != PAD}


@torch.no_grad()
def outputs_of(model: Transformer, batch: Batch, layers: bool = False) -> dict[Side, list[Tensor]]:
    """The outputs of both stacks at real positions, each a list of one tensor [positions, D]; with `layers` those of
    every layer, from the bottom. Dropout as the model's mode says."""
    src, lengths, trg_in, _ = batch.tensors
    real = real_positions(batch)
    inside: dict[Side, list[Tensor]] = {side: [] for side in SIDES}
    with hooks() as handles:
        for side in SIDES:
            for layer in layers_of(model, side) if layers else []:
                handles.append(layer.register_forward_hook(
                    lambda _m, _i, output, side=side: inside[side].append(last_output(output)[real[side]])))
        memory = model.encode(src, lengths, batch.key)
        hidden = model.decode(trg_in, memory, lengths, batch.key)
    return inside if layers else {"encoder": [memory[real["encoder"]]], "decoder": [hidden[real["decoder"]]]}


def mean_loss(model: Transformer, batch: Batch) -> Tensor:
    """The smoothed loss in nats a target token, differentiable."""
    return model(*batch.tensors, batch.key).loss / batch.tokens


@torch.no_grad()
def plain_loss(model: Transformer, batch: Batch) -> float:
    """The loss without label smoothing in nats a target token, in evaluation mode."""
    with evaluating(model):
        return float(model(*batch.tensors, batch.key).nll / batch.tokens)


def matrices(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Every matrix of layers and embeddings among (name, tensor): stacked ones one by one.

    `….self_attn.qkv.weight` [3D, D] gives `….self_attn.q`, `.k` and `.v`, and `….ffn.fc1.weight` gives `….ffn.fc1`.
    Vectors (biases, norms, ω) are passed over.
    """
    for name, tensor in named:
        if tensor.ndim != 2:
            continue
        head, _, last = name.removesuffix(".weight").rpartition(".")
        parts = _STACKED.get(f"{last}.weight", (last,))
        for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
            yield f"{head}.{part}", rows
