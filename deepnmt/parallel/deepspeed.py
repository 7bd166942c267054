"""What the ZeRO and pipeline engines share: starting DeepSpeed, the learning rate, the loss scale, and reading and
writing the weights and moments of every parameter.

DeepSpeed needs help in these places (each has a canary test):
- the optimizer's moments exist only after a first step, so one step is taken with weights, gradients and rate of 0
  before `fill` sets weights and moments;
- with several parameter groups DeepSpeed looks for the moments once, after the step of the first group, when the others
  have none: `link_moments` makes it look again;
- each process reads and writes the ranges of fp32 weights and moments that it keeps, through DeepSpeed's mapping from
  parameters to its flat buffers; its calls for whole parameters would reduce each over all processes;
- the fp16 loss scale is deepnmt's own (`optim.LossScaler`);
- 16 bits without ZeRO are deepnmt's own too (`HalfPrecisionCopy`): DeepSpeed would divide by the loss scale without
  multiplying by it, take a step while it initialises, and sum gradients in 16 bits. It gets fp32 weights instead, and
  the two engines apply loss scale, clipping and the check for non-finite gradients.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn

from deepnmt.checkpoint.tensors import Part
from deepnmt.config import Recipe
from deepnmt.device import emulates_bf16
from deepnmt.errors import UserError
from deepnmt.model.blocks import set_clock
from deepnmt.model.init import Source, part_from
from deepnmt.model.transformer import Transformer
from deepnmt.optim.groups import group_key
from deepnmt.optim.optimizers import build_optimizer, initial_moment, moment_names
from deepnmt.optim.scaler import LossScaler, ScalerState
from deepnmt.optim.schedules import factors_risen, set_rate
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import Build, Reading
from deepnmt.parallel.flat import update_flat

Module = TypeVar("Module", bound=nn.Module)

if get_accelerator().device_name() == "cpu":
    # DeepSpeed compiles a shared-memory all-reduce that only its inference uses: a minute with a compiler, and a lock
    # file that hangs every later start if that minute is interrupted. Reading the table makes it probe all that it can
    # compile, and warn of each that it cannot: on a GPU without the CUDA toolkit seven lines for every process.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

# Every engine of DeepSpeed imports DeepSpeed's Muon, which has a function compiled: a second of every start for
# PyTorch's compiler. deepnmt has a Muon of its own (`optim/optimizers.py`), so that one stays as it is written.
_compile, torch.compile = torch.compile, lambda function, **_: function  # type: ignore[assignment]
import deepspeed.runtime.zero.muon.original_muon  # noqa: E402

torch.compile = _compile


def link_moments(optimizer: Any) -> None:
    """Makes the moments of every parameter group visible to the per-parameter calls, once a ZeRO-1 or 2 optimizer has
    taken a step."""
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


class HalfPrecisionCopy(Generic[Module]):
    """16 bits without ZeRO: `module`, a copy of the fp32 model `weights` in `dtype`, runs forward and backward in its
    place. Buffers keep their type.

    DeepSpeed sees only the fp32 weights, which it reduces and updates correctly. Each micro-batch's gradient comes from
    the copy in 16 bits and is summed, reduced and applied in fp32; after the update `refresh` rounds the weights into
    the copy. ZeRO-1 computes the same (Micikevicius et al. 2018, Mixed Precision Training, section 3.1).
    """

    def __init__(self, weights: Module, dtype: torch.dtype) -> None:
        self.module = copy.deepcopy(weights)
        self._weights: list[torch.Tensor] = list(weights.parameters())
        self._rounded: list[torch.Tensor] = list(self.module.parameters())
        for weight, rounded in zip(self._weights, self._rounded, strict=True):
            rounded.data = rounded.data.to(dtype)
            rounded.register_post_accumulate_grad_hook(partial(_add_to_master_grad, weight))

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the fp32 weights, rounded, into `module`."""
        torch._foreach_copy_(self._rounded, self._weights)


def _add_to_master_grad(weight: torch.Tensor, rounded: torch.Tensor) -> None:
    """Adds the gradient of a 16-bit weight to that of its fp32 master, and frees it."""
    if rounded.grad is None:
        return
    if weight.grad is None:
        weight.grad = rounded.grad.float()
    else:
        weight.grad.add_(rounded.grad)
    rounded.grad = None


class MasterWeights(nn.Module):
    """The module DeepSpeed gets with a `HalfPrecisionCopy`: its parameters are those of `weights`, its forward that of
    `module`."""

    def __init__(self, weights: nn.Module, module: nn.Module) -> None:
        super().__init__()
        self.weights = weights
        self.compute_module = (module,)  # in a tuple, so that its weights do not become this module's parameters

    def forward(self, *inputs: Any) -> Any:
        return self.compute_module[0](*inputs)

    def train(self, mode: bool = True) -> MasterWeights:
        self.compute_module[0].train(mode)
        return super().train(mode)


class DeepSpeedEngine:
    """The base of `ZeroEngine` and `PipelineEngine`.

    `build` makes the whole model, `engine` is DeepSpeed's engine, `zero` the ZeRO stage, `local` this process's
    parameters by their canonical names (in 16 bits without ZeRO the fp32 weights, not the copy). A subclass sets
    `module`, `data_rank` and `data_world`, and ends its constructor with `_start` and then `_create_optimizer_state`.
    """

    module: Any
    data_rank: int
    data_world: int

    def __init__(
        self, build: Build, recipe: Recipe, device: torch.device, layout: Layout, local: dict[str, nn.Parameter]
    ) -> None:
        self.build, self.recipe, self.device, self.local = build, recipe, device, local
        self.zero, self.clip = layout.stage, recipe.train.clip
        self.moments = moment_names(recipe)
        self.spare: dict[str, nn.Parameter] = {}  # of the optimizer alone
        self.scaler: LossScaler | None = None
        self._half: HalfPrecisionCopy[Any] | None = None
        self._applied = 0
        self._reading = Reading(device, dist.get_world_size())  # of the present update
        self._out_of_memory = torch.zeros(1, device=device)  # a flag; allocated now, while the device has room
        check_device(layout)
        for p in local.values():  # the step that creates the moments needs finite weights
            p.detach().zero_()

    def _compute_module(self, module: Module, layout: Layout) -> Module:
        """The module that runs forward and backward: `module`, or its copy in 16 bits without ZeRO."""
        if self.zero or layout.precision == "fp32":
            return module
        dtype = torch.float16 if layout.precision == "fp16" else torch.bfloat16
        half = HalfPrecisionCopy(module.to(self.device), dtype)
        self._half = half
        return half.module

    def _start(self, module: nn.Module, layout: Layout) -> None:
        """Starts DeepSpeed's engine around `module`."""
        config = layout.config or {}
        if self.zero == 0:  # deepnmt clips, and computes in 16 bits, by itself (`HalfPrecisionCopy`)
            config = {key: value for key, value in config.items() if key not in ("bf16", "fp16")}
            config["gradient_clipping"] = 0.0
        optimizer = build_optimizer({**self.local, **self.spare}, self.recipe, fused=True)
        with contextlib.redirect_stdout(io.StringIO()):
            self.engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        if layout.precision == "fp16":
            scale = self.recipe.loss_scale
            self.scaler = LossScaler(2.0**scale.initial_power, scale.window, scale.floor)
            if self.zero:
                self.engine.optimizer.loss_scaler = self.scaler
        for name, p in self.module.named_parameters():  # DeepSpeed needs gradients of all, which then do not count
            if group_key(name, _whole_shape(p), self.recipe).factor == 0:
                p.register_hook(torch.zeros_like)
        if self.zero:
            self._read_norm_once()
        if self._half:
            refresh = self._half.refresh
            optimizer.register_step_post_hook(lambda *_: refresh())

    def _read_norm_once(self) -> None:
        """Has DeepSpeed's optimizer compute the gradient norm and then take it from the host, which reads it together
        with all else that it needs of the update. DeepSpeed would read it, or flags that follow from it, up to four
        times. Its search for non-finite gradients is left out: their norm is not finite either.
        """
        optimizer = self.engine.optimizer
        if isinstance(optimizer, BF16_Optimizer):
            update_flat(optimizer, lambda norm: self._reading.read(norm)[0])
        elif self.zero == 3:
            norms = optimizer._get_norm_groups
            optimizer._get_norm_groups = lambda: self._reading.read(*norms())
        else:
            norm = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = lambda: self._reading.read(norm())[0]
        offloaded = getattr(optimizer, "offload_optimizer", False) or getattr(optimizer, "cpu_offload", False)
        if not offloaded:  # its norms are computed on the CPU
            optimizer.check_overflow = lambda **_: None

    def _create_optimizer_state(self, update: Callable[[], None]) -> None:
        """Makes the optimizer create its moments. `update` takes one update with gradients of zero."""
        self._set_rate(0.0)
        update()
        if self.zero in (1, 2):
            link_moments(self.engine.optimizer)
        self.engine.skipped_steps = self.engine.global_steps = 0
        if self.scaler:
            self.scaler.restore({"scale": self.scaler.cur_scale, "clean": 0})

    # -- state -------------------------------------------------------------------------------------------------------

    def owned(self) -> Iterator[Part]:
        for name, p in self.local.items():
            start, stop = self._own_range(p)
            if self.zero == 0:  # all data-parallel ranks keep all
                start, stop = self._share(p.numel())
            if start < stop and self._first_holder(name):
                tensors = [tensor.detach() for tensor in self._state(p)]
                if self.zero == 0:
                    tensors = [tensor[start:stop] for tensor in tensors]
                weight, *moments = tensors
                yield Part(name, _whole_shape(p), start, weight, dict(zip(self.moments, moments, strict=True)))

    def _first_holder(self, name: str) -> bool:
        """Whether no earlier process of a pipeline holds this parameter too."""
        return True

    def _share(self, count: int) -> tuple[int, int]:
        """This data-parallel rank's range of `count` elements, in equal parts, of which the last may be smaller."""
        size = -(-count // self.data_world)
        return min(size * self.data_rank, count), min(size * (self.data_rank + 1), count)

    def _own_range(self, p: Any) -> tuple[int, int]:
        """The range of a flattened parameter whose fp32 weight and moments this process keeps."""
        if self.zero == 0:
            return 0, p.numel()
        if not p._hp_mapping:
            return 0, 0
        address = p._hp_mapping.lp_fragment_address
        return address.start, address.start + address.numel

    def _state(self, p: Any) -> list[torch.Tensor]:
        """The fp32 weight and moments of `_own_range`, flat, as the optimizer has them; not of an empty range."""
        if self.zero == 0:
            state = self._optimizer.state[p]
            return [p.view(-1), *[state[moment].view(-1) for moment in self.moments]]
        mapping = p._hp_mapping
        return [mapping.get_hp_fragment(), *[mapping.get_hp_fragment(moment) for moment in self.moments]]

    def _write(self, p: Any, values: Sequence[torch.Tensor]) -> None:
        """Sets the fp32 weight and moments of `_own_range`."""
        for tensor, value in zip(self._state(p), values, strict=True):
            tensor.data.copy_(value)

    @torch.no_grad()
    def fill(self, source: Source, moments: Source | None = None, step: int = 0) -> None:
        for name, p in self.local.items():
            shape = _whole_shape(p)
            start, stop = self._own_range(p)
            if start == stop:
                continue
            weight = part_from(source, name, shape, start, stop).to(self.device, torch.float32)
            values = [weight]
            for moment in self.moments:
                if moments:
                    value = part_from(moments, f"{name}.{moment}", shape, start, stop)
                else:
                    value = initial_moment(moment, weight)
                values.append(value.to(self.device, torch.float32))
            self._write(p, values)
        self._refresh()
        for state in self._optimizer.state.values():
            if "step" in state:  # SGD counts none
                state["step"] = torch.full_like(torch.as_tensor(state["step"]), float(step))
        self._applied = step
        set_clock(self.module, step)

    def _refresh(self) -> None:
        """Sets the weights that compute from the fp32 weights. Collective."""
        if self.zero in (1, 2):
            self.engine.optimizer.update_lp_params()
        if self._half:
            self._half.refresh()

    @torch.no_grad()
    def swap_average(self) -> None:
        average = 1 + self.moments.index("ema")
        for p in self.local.values():
            start, stop = self._own_range(p)
            if start < stop:
                values = [tensor.clone() for tensor in self._state(p)]
                values[0], values[average] = values[average], values[0]
                self._write(p, values)
        self._refresh()

    def _allocate_full_model(self, dtype: torch.dtype) -> Transformer:
        """A whole model in `dtype`, its weights still to be set, on every process. Collective.

        Raises:
            torch.OutOfMemoryError: on every process, if any of them has no room for it.
        """
        try:
            model = self.build(lambda part: cast_onto(part, dtype, self.device))
            if self.zero == 3:  # gathering needs room for one more weight, padded to equal shares
                largest = max(p.numel() for p in model.parameters())
                torch.empty(largest + dist.get_world_size(), dtype=dtype, device=self.device)
        except torch.OutOfMemoryError:
            self._out_of_memory.fill_(1.0)
        dist.all_reduce(self._out_of_memory)  # so that no process waits for one that failed
        failed = self._out_of_memory.item()
        self._out_of_memory.zero_()
        if failed:
            raise torch.OutOfMemoryError("a process has no memory for the whole model beside its training state")
        set_clock(model, self._applied)
        return model

    # -- the rest ----------------------------------------------------------------------------------------------------

    @property
    def _loss_factor(self) -> float:
        """The fp16 loss scale where deepnmt applies it, which is without ZeRO; else 1."""
        if self.scaler is None or self.zero:
            return 1.0
        return self.scaler.cur_scale

    def _unscale(self) -> None:
        """Divides the gradients by `_loss_factor`."""
        if self._loss_factor == 1:
            return
        for p in self.local.values():
            if p.grad is not None:
                p.grad /= self._loss_factor

    def _set_rate(self, rate: float) -> None:
        set_rate(self.engine.optimizer, rate, factors_risen(self.recipe.optimizer, self._applied + 1))

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self.engine.basic_optimizer

    @property
    def optimizer_step(self) -> int:
        steps = [float(state["step"]) for state in self._optimizer.state.values() if "step" in state]
        return int(max(steps)) if steps else self._applied

    def scaler_state(self) -> ScalerState | None:
        return self.scaler.state() if self.scaler else None

    def restore_scaler(self, state: ScalerState) -> None:
        if self.scaler:
            self.scaler.restore(state)

    def close(self) -> None:
        self.engine.destroy()


def _whole_shape(p: nn.Parameter) -> tuple[int, ...]:
    """The shape of a parameter, which ZeRO-3 may keep in parts."""
    return tuple(getattr(p, "ds_shape", p.shape))


def supported_precisions() -> list[str]:
    """The precisions that this process's device can compute in. A GPU before Ampere only emulates bf16, at the speed of
    fp32 or less."""
    device = get_accelerator()
    bf16 = device.is_bf16_supported() and (device.device_name() == "cpu" or not emulates_bf16(torch.device("cuda")))
    support = {"fp32": True, "bf16": bf16, "fp16": device.is_fp16_supported()}
    return [precision for precision, supported in support.items() if supported]


def check_device(layout: Layout) -> None:
    """Raises `UserError` for a precision that the device does not support (fp16 on most CPUs)."""
    device, supported = get_accelerator(), supported_precisions()
    if layout.precision not in supported:
        raise UserError(
            f"parallel.precision is {layout.precision}, but this machine's {device.device_name()} has no "
            f"{layout.precision}; set parallel.precision={' or '.join(reversed(supported))}"
        )


def cast_onto(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Casts `model`'s parameters to `dtype`, then moves it to `device`, which so never holds a wider copy. Buffers keep
    their type: the position tables are fp32 in training too."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
    model.to(device)
