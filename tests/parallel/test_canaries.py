"""Faults of DeepSpeed that deepnmt works around, each shown on the real DeepSpeed.

A canary that fails means that DeepSpeed has changed: then the code it names can become simpler, or must change. All
faults occur in 0.19.8. Each canary runs in its own process, on one weight w, loss w · x, plain SGD: the gradient is x.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from warm import Warm

Config = dict[str, Any]


class Weight(torch.nn.Module):
    """Computes w · x with a single weight w, initially 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: float) -> torch.Tensor:
        return (self.w * x).sum()


MADE: list[Any] = []  # the engines of this process, closed at its end


def engine_of(config: Config, decay: float = 0.0, optimizer: str = "SGD") -> Any:
    """DeepSpeed's engine over one weight, rate 1/8; `config` has only the keys that matter to the canary."""
    import deepspeed

    module = Weight()
    made = getattr(torch.optim, optimizer)(module.parameters(), lr=0.125, weight_decay=decay)
    always = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    tree = {key: value for key, value in {**always, **config}.items() if value is not None}
    MADE.append(deepspeed.initialize(model=module, optimizer=made, config=tree)[0])
    return MADE[-1]


def zero(stage: int, **more: Any) -> Config:
    return {"zero_optimization": {"stage": stage}, **more}


def fp16(power: int = 4, window: int = 1000, **more: Any) -> Config:
    return {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": power, "loss_scale_window": window,
                     "hysteresis": 1, "min_loss_scale": 1, **more}}


def moves(engine: Any, inputs: list[float]) -> list[float]:
    """The gradient used in one update for each input: the decrease of the fp32 weight divided by the rate."""
    from deepspeed.utils import safe_get_full_fp32_param

    def weight() -> float:
        kept = safe_get_full_fp32_param(engine.module.w)
        return float(engine.module.w if kept is None else kept)

    trace, rate = [], engine.optimizer.param_groups[0]["lr"]
    for x in inputs:
        before = weight()
        engine.backward(engine(x))
        engine.step()
        trace.append((before - weight()) / rate)
    return trace


# -- the canaries: each docstring describes a DeepSpeed that would make it fail, and what to change then ---------------


def clips_by_default() -> None:
    """Gradient_clipping absent no longer clips at 1.0: settings.py need not require it; ds_configs/README.md."""
    default, explicit = moves(engine_of(zero(1, gradient_clipping=None)), [4.0]), moves(engine_of(zero(1)), [4.0])
    assert math.isclose(default[0], 1.0, rel_tol=1e-3) and explicit == [4.0]


def accumulation_is_averaged() -> None:
    """Micro-batch losses are no longer averaged by backward(): see scale_wrt_gas in zero.py."""
    engine = engine_of(zero(1, gradient_accumulation_steps=2))
    before = float(engine.module.w)
    for x in (1.0, 3.0):
        engine.backward(engine(x))
        engine.step()
    assert before - float(engine.module.w) == 0.125 * 2.0


def accumulates_in_16_bits() -> None:
    """Bf16 gradients are no longer summed in bf16 by default: data_types.grad_accum_dtype in settings.py."""
    sums = {}
    for kind in (None, "fp32"):
        engine = engine_of(zero(1, bf16={"enabled": True}, gradient_accumulation_steps=2,
                                communication_data_type="fp32", data_types={"grad_accum_dtype": kind}))
        for x in (512.0, 2.0):  # halved by the average: bf16 cannot represent 256 + 1
            engine.backward(engine(x))
            engine.step()
        sums[kind] = float(engine.get_global_grad_norm())
    assert sums == {None: 256.0, "fp32": 257.0}


def communicates_in_16_bits() -> None:
    """Bf16 gradients are no longer reduced in bf16 by default: communication_data_type in settings.py."""
    means = {}
    for kind in (None, "fp32"):
        config = zero(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}, communication_data_type=kind)
        engine = engine_of(config)
        # the mean is 128.5, which bf16 cannot represent
        engine.backward(engine(1.0 if torch.distributed.get_rank() else 256.0))
        engine.step()
        means[kind] = float(engine.get_global_grad_norm())
    assert means == {None: 128.0, "fp32": 128.5}, means


def radam_is_rejected() -> None:
    """RAdam is now taken under ZeRO: zero_allow_untested_optimizer need not be written (settings.py)."""
    with pytest.raises(AssertionError, match="untested ZeRO Optimizer"):
        engine_of(zero(1, zero_allow_untested_optimizer=None), optimizer="RAdam")


def nan_reaches_the_weights() -> None:
    """Fp32 without ZeRO now keeps NaN from the weights: the check in ZeroEngine._apply can go."""
    engine = engine_of(zero(0))
    moves(engine, [math.nan])
    assert math.isnan(float(engine.module.w)) and engine.skipped_steps == 0


def clipping_needs_every_gradient() -> None:
    """Clipping without ZeRO now accepts missing gradients: ZeroEngine may leave it to DeepSpeed."""
    engine = engine_of(zero(0, gradient_clipping=1.0))
    engine.backward(engine(4.0))
    engine.module.w.grad = None  # what ZeroEngine does to drop an update
    with pytest.raises(IndexError):
        engine.step()


def growth_halves_the_update() -> None:
    """DeepSpeed's scaler grows on time and divides by the scale it used: optim.LossScaler in deepspeed.py can go."""
    for stage in (1, 2, 3):
        engine = engine_of({**zero(stage), **fp16(window=2)})
        trace, scale = moves(engine, [1.0] * 4), engine.optimizer.loss_scale
        assert trace == [1.0, 1.0, 0.5, 1.0], (stage, trace)  # the third clean update, not the second, and half of it
        assert scale == 32.0


def floor_ends_the_run() -> None:
    """The loss scale's floor no longer raises: optim.LossScaler could be DeepSpeed's."""
    engine = engine_of({**zero(1), **fp16(power=0)})
    with pytest.raises(Exception, match="already at minimum"):
        moves(engine, [math.inf])


def floor_is_a_whole_number() -> None:
    """Fp16.min_loss_scale takes fractions now: it could take the recipe's loss_scale.floor."""
    with pytest.raises(Exception, match="min_loss_scale"):
        engine_of({**zero(1), **fp16(min_loss_scale=0.03125)})


def no_zero_divides_an_unscaled_loss() -> None:
    """Fp16 without ZeRO now scales its loss: HalfPrecisionCopy, which avoids it, may become unnecessary."""
    assert moves(engine_of({**zero(0), **fp16()}), [1.0]) == [0.0625]


def no_zero_steps_at_initialize() -> None:
    """16 bits without ZeRO take no step at initialize any more: HalfPrecisionCopy may become unnecessary."""
    engine = engine_of(zero(0, bf16={"enabled": True}), decay=0.5)
    assert float(engine.optimizer.fp32_groups[0][0]) == 1 - 0.125 * 0.5  # weight decay, before any update


def no_zero_cannot_sum_in_fp32() -> None:
    """16 bits without ZeRO can sum gradients in fp32 now: HalfPrecisionCopy may become unnecessary."""
    with pytest.raises(NotImplementedError, match="unsupported mix"):
        engine_of(zero(0, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}))


def moments_come_with_the_first_step() -> None:
    """Moments are there before a first step: DeepSpeedEngine._create_optimizer_state can become simpler."""
    from deepspeed.utils import safe_get_full_optimizer_state

    for stage in (1, 2, 3):
        engine = engine_of(zero(stage), optimizer="Adam")
        with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
            safe_get_full_optimizer_state(engine.module.w, "exp_avg")


def later_groups_have_no_moments() -> None:
    """The moments of all parameter groups are found after the first step: link_moments in deepspeed.py can go."""
    import deepspeed
    from deepspeed.utils import safe_get_full_optimizer_state

    for stage in (1, 2):
        module = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
        first, second = module.parameters()
        made = torch.optim.Adam([{"params": [first]}, {"params": [second]}], lr=0.125)
        tree = zero(stage, train_micro_batch_size_per_gpu=1, gradient_clipping=0.0)
        MADE.append(deepspeed.initialize(model=module, optimizer=made, config=tree)[0])
        MADE[-1].backward(MADE[-1](torch.ones(1)).sum())
        MADE[-1].step()
        assert float(safe_get_full_optimizer_state(first, "exp_avg")) != 0
        with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
            safe_get_full_optimizer_state(second, "exp_avg")


def no_zero_gives_no_state() -> None:
    """The per-parameter calls now work without ZeRO: deepspeed.py needs only one way to read and write."""
    from deepspeed.utils import safe_get_full_fp32_param

    assert safe_get_full_fp32_param(engine_of(zero(0)).module.w) is None


def masters_do_not_reach_the_model() -> None:
    """Setting the fp32 weight now sets the model's too: update_lp_params in deepspeed.py, p.copy_ in ZeroEngine go."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    for stage in (1, 3):
        engine = engine_of(zero(stage, bf16={"enabled": True}))
        safe_set_full_fp32_param(engine.module.w, torch.full((1,), 7.0))
        with deepspeed.zero.GatheredParameters([engine.module.w]):
            assert float(engine.module.w) == 1.0, stage


def uneven_shares_cannot_be_set() -> None:
    """Safe_set_full_fp32_param now accepts sizes that the processes do not divide: ZeroEngine._share can go."""
    from deepspeed.utils import safe_set_full_fp32_param

    engine = engine_of(zero(3))
    if torch.distributed.get_rank() == 1:
        with pytest.raises(RuntimeError):
            safe_set_full_fp32_param(engine.module.w, torch.ones(1))


def shared_memory_kernel_has_its_name() -> None:
    """The CPU's shared-memory all-reduce goes by another name: deepspeed.py must switch that off before it compiles."""
    from deepspeed.accelerator import get_accelerator

    assert get_accelerator().create_op_builder("ShareMemCommBuilder").NAME == "deepspeed_shm_comm"


def offload_requires_deepspeeds_adam() -> None:
    """Offload takes PyTorch's Adam by default: zero_force_ds_cpu_optimizer in the ds_configs can go."""
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    with pytest.raises(Exception, match="zero_force_ds_cpu_optimizer"):
        engine_of({"zero_optimization": offload}, optimizer="Adam")


CANARIES = (
    clips_by_default, accumulation_is_averaged, accumulates_in_16_bits, communicates_in_16_bits, radam_is_rejected,
    nan_reaches_the_weights, clipping_needs_every_gradient, growth_halves_the_update, floor_ends_the_run,
    floor_is_a_whole_number, no_zero_divides_an_unscaled_loss, no_zero_steps_at_initialize, no_zero_cannot_sum_in_fp32,
    moments_come_with_the_first_step, later_groups_have_no_moments, no_zero_gives_no_state,
    masters_do_not_reach_the_model, uneven_shares_cannot_be_set, shared_memory_kernel_has_its_name,
    offload_requires_deepspeeds_adam,
)


def show(module: str, name: str) -> None:
    """Runs on each rank."""
    from deepnmt.processes.process_group import processes

    with processes(threads=1, group=True):
        try:
            getattr(importlib.import_module(module), name)()
        finally:
            for engine in MADE:
                engine.destroy()


def run_canary(canary: Callable[[], None], world: int, warm: Warm) -> None:
    """Runs a canary on `world` processes; a failure names the code to revisit."""
    try:
        warm.run(world, "test_canaries:show", canary.__module__, canary.__name__)
    except AssertionError as error:
        raise AssertionError(f"{canary.__doc__}\n{error}") from None


@pytest.mark.parametrize("canary", CANARIES, ids=lambda canary: canary.__name__)
def test_fault_is_still_there(canary: Callable[[], None], warm: Warm) -> None:
    run_canary(canary, 2 if canary in (uneven_shares_cannot_be_set, communicates_in_16_bits) else 1, warm)
