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
from typing import Any

import torch
from torch import Tensor, nn

from deepnmt.batch import Batch
from deepnmt.model.blocks import SIDES, SUBLAYERS, Side, newest
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


class _LayerWatch:
    """The points of one layer. A sub-layer's output has no module of its own: it is what the next norm or branch takes.

    Where x passes a norm on its way into the next branch (Pre-LN), it is that norm's input; else it is the branch's own
    input; the last one is the layer's output.
    """

    def __init__(self, name: str, layer: nn.Module, side: Side, see: See) -> None:
        self.name, self.layer, self.parts, self.see = name, layer, SUBLAYERS[side], see
        self.waiting: int | None = None  # the sub-layer whose branch has been joined and whose output is yet to be seen

    def attach(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Hooks on norms, adds, branches and the layer itself."""
        rule = self.layer.get_submodule("rule")
        handles = [self.layer.register_forward_pre_hook(self._begin), self.layer.register_forward_hook(self._end)]
        for index, part in enumerate(self.parts):
            add, branch = rule.get_submodule(f"adds.{index}"), self.layer.get_submodule(part)
            handles.append(add.register_forward_hook(lambda _m, _i, output, index=index: self._added(index, output)))
            handles.append(branch.register_forward_pre_hook(
                lambda _m, inputs, index=index: self._reached(index - 1, inputs[0])))
        for index, norm in enumerate(norms_of(self.layer)):
            handles.append(norm.register_forward_pre_hook(
                lambda _m, inputs, index=index: self._normed(index, inputs[0])))
            handles.append(norm.register_forward_hook(
                lambda _m, _i, output, index=index: self.see(f"{self.name}.rule.norms.{index}", output)))
        return handles

    def _begin(self, _module: nn.Module, _inputs: Any) -> None:
        self.waiting = None

    def _added(self, index: int, output: Tensor) -> None:
        self.see(f"{self.name}.rule.adds.{index}", output)
        self.waiting = index

    def _normed(self, index: int, x: Tensor) -> None:
        self._reached(index - 1, x)
        self.see(f"{self.name}.rule.norms.{index}.in", x)

    def _reached(self, index: int, x: Tensor) -> None:
        """Something that belongs to sub-layer index + 1 takes x: then x is the output of `index`, if that is due."""
        if self.waiting == index:
            self.waiting = None
            self.see(f"{self.name}.{self.parts[index]}", x)

    def _end(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.waiting = None
        self.see(f"{self.name}.{self.parts[-1]}", newest(output))


def norms_of(layer: nn.Module) -> list[nn.Module]:
    """The LayerNorms of a layer's rule, in order; of a rule without any, none."""
    return [module for name, module in layer.get_submodule("rule").named_modules()
            if name.startswith("norms.") and isinstance(module, nn.LayerNorm)]


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
                handles += _LayerWatch(f"{side}.layers.{index}", layer, side, see).attach()
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
def stack_outputs(model: Transformer, batch: Batch) -> dict[Side, Tensor]:
    """Both stacks' outputs at real positions, [positions, D]; dropout as the model's mode says."""
    src, lengths, trg_in, _ = batch.tensors
    memory = model.encode(src, lengths, batch.key)
    hidden = model.decode(trg_in, memory, lengths, batch.key)
    real = real_positions(batch)
    return {"encoder": memory[real["encoder"]], "decoder": hidden[real["decoder"]]}


@torch.no_grad()
def layer_outputs(model: Transformer, batch: Batch) -> dict[Side, list[Tensor]]:
    """Every layer's output at real positions [positions, D], from the bottom; dropout as the model's mode says."""
    real = real_positions(batch)
    outputs: dict[Side, list[Tensor]] = {side: [] for side in SIDES}
    with hooks() as handles:
        for side in SIDES:
            for layer in layers_of(model, side):
                handles.append(layer.register_forward_hook(
                    lambda _m, _i, output, side=side: outputs[side].append(newest(output)[real[side]])))
        stack_outputs(model, batch)
    return outputs


def mean_loss(model: Transformer, batch: Batch) -> Tensor:
    """The smoothed loss in nats a target token, differentiable."""
    return model(*batch.tensors, batch.key).loss / batch.tokens


@torch.no_grad()
def plain_loss(model: Transformer, batch: Batch) -> float:
    """The loss without label smoothing in nats a target token, in evaluation mode; the model's mode stays."""
    was_training = model.training
    found = float(model.eval()(*batch.tensors, batch.key).nll / batch.tokens)
    model.train(was_training)
    return found


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
