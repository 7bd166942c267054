"""Where a number first stops being finite: a forward and backward pass of a model under hooks, on batches that failed.

`B` sentences, `S` source length, `T` target length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from deepnmt.batch import Batch
from deepnmt.model.transformer import Transformer

What = Literal["weight", "input", "output", "loss", "gradient of the output", "gradient"]


@dataclass(frozen=True)
class NonFinite:
    """The first tensor that holds infinities or NaN, in the order of computation.

    what: of the module or parameter `name` ("loss" has no name). An input that is not finite where the output before it
        was arises between two modules: in the attention, or in a rule's sum.
    largest: the largest magnitude in the tensor looked at before; 0 if there was none.
    """

    what: What
    name: str
    largest: float

    def __str__(self) -> str:
        return f"the {self.what} of {self.name}" if self.name else f"the {self.what}"


def first_non_finite(model: Transformer, batches: Sequence[Batch], factor: float = 1.0) -> NonFinite | None:
    """Looks at the weights, then at each batch's pass in training mode; None where every number is finite.

    Args:
        model: its gradients are lost, and no process group may hang on them; its hooks are taken off again.
        batches: on the model's device.
        factor: what each loss sum is multiplied by before the backward pass, the loss scale included.
    """
    watch = _Watch()
    for name, parameter in model.named_parameters():
        watch.see(parameter, "weight", name)
    if watch.found is not None:
        return watch.found
    was_training = model.training
    model.train()
    hooks = watch.attach(model)
    try:
        for batch in batches:
            model.zero_grad(set_to_none=True)
            sums = model(*batch.tensors, batch.key)
            watch.see(sums.loss, "loss", "")
            if watch.found is None:
                (sums.loss * factor).backward()
            if watch.found is not None:
                break
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
        model.train(was_training)
    return watch.found


class _Watch:
    """Remembers the first non-finite tensor that it sees."""

    def __init__(self) -> None:
        self.found: NonFinite | None = None
        self._largest = 0.0

    def see(self, tensor: Tensor, what: What, name: str) -> None:
        """Looks at one tensor, in the order of computation."""
        if self.found is not None or not tensor.is_floating_point() or tensor.numel() == 0:
            return
        top = float(tensor.detach().abs().max())  # NaN where there is one
        if top < float("inf"):
            self._largest = top
        else:
            self.found = NonFinite(what, name, self._largest)

    def attach(self, model: nn.Module) -> list[Any]:
        """Hooks on every module's inputs and outputs, their gradients and those of the parameters."""
        hooks: list[Any] = []
        for name, module in model.named_modules():
            if name:
                hooks.append(module.register_forward_pre_hook(self._before(name)))
                hooks.append(module.register_forward_hook(self._after(name)))
        for name, parameter in model.named_parameters():
            hooks.append(parameter.register_hook(self._gradient("gradient", name)))
        return hooks

    def _before(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            for item in inputs:
                if isinstance(item, Tensor):
                    self.see(item, "input", name)

        return look

    def _after(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def look(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                self.see(output, "output", name)
                if output.requires_grad:
                    output.register_hook(self._gradient("gradient of the output", name))

        return look

    def _gradient(self, what: What, name: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            self.see(gradient, what, name)

        return look
