"""Faults of DeepSpeed's pipeline engine that deepnmt works around, each shown on the real DeepSpeed.

As in test_canaries.py: a canary that fails means that DeepSpeed has changed; its docstring names the code to revisit.
All faults occur in 0.19.8. Models are single weights, the optimizer is plain SGD. Canaries with the same number of
processes share them.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_canaries import MADE, Config, engine_of, fp16, zero
from torch import Tensor, nn
from warm import Warm

RATE = 0.125


class Number(nn.Module):
    """Computes weight · x with a single weight, initially 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def pipeline_of(
    layers: list[Any], config: Config, loss: Callable[..., Tensor] | None = None, stages: int = 0, dynamic: bool = True
) -> Any:
    """DeepSpeed's pipeline engine, by default with as many stages as processes; the layers are divided evenly."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    stages = stages or torch.distributed.get_world_size()
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    module = PipelineModule(layers, num_stages=stages, loss_fn=loss, partition_method="uniform", dynamic_shape=dynamic)
    tree = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9, **config}
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    MADE.append(deepspeed.initialize(model=module, optimizer=optimizer, config=tree)[0])
    return MADE[-1]


def step(engine: Any, *micro_batches: float) -> None:
    """Makes an update on micro-batches of one number each, which is input and label; by default one micro-batch of 1.
    """
    dtype = next(engine.module.parameters()).dtype
    values = [torch.full((1,), x, dtype=dtype) for x in micro_batches or (1.0,)]
    engine.train_batch(iter([(value, value) for value in values]))


def used(p: nn.Parameter) -> float:
    """The gradient that the update of a weight from 1 used."""
    from deepspeed.utils import safe_get_full_fp32_param

    kept = safe_get_full_fp32_param(p)
    return (1 - float(p if kept is None else kept)) / RATE


# -- the canaries ------------------------------------------------------------------------------------------------------


def outer_loss_loses_gradients() -> None:
    """Bf16 keeps the gradient of a weight that only loss_fn uses: the loss may leave StageModule.forward."""
    found = {}
    for precision in ("bf16", "fp32"):
        body, head = Number(), Number()
        body.add_module("head", head)  # a part of the stage, as the table that the softmax shares with an embedding is
        config = zero(1, bf16={"enabled": precision == "bf16"}, communication_data_type="fp32",
                      data_types={"grad_accum_dtype": "fp32"})
        engine = pipeline_of([body], config, lambda out, label, head=head: head(out).sum())
        step(engine, 4.0)
        found[precision] = (used(body.weight), used(head.weight))
    assert found == {"bf16": (4.0, 0.0), "fp32": (4.0, 4.0)}, found


def fp16_ties_are_not_summed() -> None:
    """Fp16 sums the gradients of tied copies where they are kept: _sum_tied_gradients in pipeline.py can go."""
    from deepspeed.pipe import TiedLayerSpec

    def last(module: Number, x: Tensor) -> Tensor:
        return (x + 3 * module.weight).sum()

    copies = {}
    for name, config in (("fp16", fp16()), ("fp32", {})):
        config = {**zero(1), **config, "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
        engine = pipeline_of([TiedLayerSpec("table", Number), TiedLayerSpec("table", Number, forward_fn=last)], config)
        step(engine)  # the loss is x + 3 weight: 1 from the first stage and 3 from the second
        copies[name] = used(engine.module.tied_modules["table"].weight)
    assert copies == {"fp16": 3.0 if torch.distributed.get_rank() else 1.0, "fp32": 4.0}, copies


def no_other_engine_after_a_pipeline() -> None:
    """Another engine starts after a pipeline: layouts may share processes (layouts.py, test_pipeline.py)."""
    pipeline_of([Number(), Number()], zero(1)).destroy()
    with pytest.raises(AttributeError, match="get_model_parallel_rank"):
        engine_of(zero(1))


def nan_reaches_the_weights() -> None:
    """Fp32 pipelines without ZeRO keep NaN from the weights now: the check in PipelineEngine._checked_step can go."""
    layer = Number()
    step(pipeline_of([layer], zero(0)), float("nan"))
    assert torch.isnan(layer.weight).all()


def no_zero_is_wrong_in_16_bits() -> None:
    """Pipelines without ZeRO scale the loss of fp16, or sum in fp32, now: HalfPrecisionCopy may become unnecessary."""
    layer = Number()
    step(pipeline_of([layer], {**zero(0), **fp16(power=4)}))
    assert used(layer.weight) == 1 / 16
    with pytest.raises(NotImplementedError, match="unsupported mix"):
        pipeline_of([Number()], zero(0, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}))


def replicas_alone_have_no_norm() -> None:
    """Bf16 takes the norm of a stage of replicas alone: _zero_norm_for_replicas in pipeline.py can go."""
    layer = Number()
    engine = pipeline_of([layer], zero(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}))
    layer.weight.ds_pipe_replicated = True
    with pytest.raises(RuntimeError, match="non-empty"):
        step(engine)


def local_rank_is_asked_for() -> None:
    """PipelineModule accepts a missing LOCAL_RANK: StageModule need not set it."""
    kept = os.environ.pop("LOCAL_RANK")
    with pytest.raises(TypeError):
        pipeline_of([Number()], zero(1))
    os.environ["LOCAL_RANK"] = kept


def every_float_sent_needs_a_gradient() -> None:
    """Floats without a gradient may go between stages: memory and target states need not be one tensor (stage.py)."""
    engine = pipeline_of([Number()], zero(1))
    unused = torch.ones(1, requires_grad=True)
    engine._reserve_pipe_buffers(1)
    engine.pipe_buffers["inputs"][0] = (unused,)
    with pytest.raises(AssertionError):
        engine._exec_send_grads(0)


def floats_are_walked_back_one_by_one() -> None:
    """Backward runs once for all outputs of a stage: memory and target states need not be one tensor (stage.py)."""
    walks = []

    class Two(Number):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.weight * x
            hidden.register_hook(lambda gradient: walks.append(float(gradient)))
            return hidden * 2, hidden * 3

    class Both(Number):
        def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
            return (self.weight * (parts[0] + parts[1])).sum()

    step(pipeline_of([Two(), Both()], zero(1)))
    assert walks == ([] if torch.distributed.get_rank() else [2.0, 3.0]), walks


def receive_buffers_keep_their_type() -> None:
    """A receive buffer is reallocated for another type: the message of stage.py may be in any order."""
    engine = pipeline_of([Number()], zero(1))
    engine._allocate_or_extend_buffers(0, [4], torch.float32)
    assert engine._allocate_or_extend_buffers(0, [2], torch.int64).dtype == torch.float32


def losses_are_averaged() -> None:
    """Pipelines sum losses over micro-batches or data-parallel ranks: see `scale` in PipelineEngine.train_step."""
    engine = pipeline_of([Number()], zero(1, gradient_accumulation_steps=2), stages=1)
    step(engine, *((4.0, 8.0) if torch.distributed.get_rank() else (1.0, 3.0)))
    assert used(next(engine.module.parameters())) == 4.0


def clips_by_the_first_stage() -> None:
    """Without ZeRO pipelines clip by the norm of all stages: PipelineEngine._checked_step may leave it to them."""
    layers = [Number(), Number()]
    engine = pipeline_of(layers, zero(0, gradient_clipping=1.0))
    step(engine, 3.0)  # a gradient of 3 in each stage: the norm is 3 √2, so that 0.707 of each should be left
    assert round(used(next(engine.module.parameters())), 3) == 1.0


def zero_2_is_asserted_against() -> None:
    """ZeRO-2 and 3 take pipelines: layout_of and docs/guide/which_layout.md reject them."""
    for stage in (2, 3):
        with pytest.raises(AssertionError, match="incompatible with pipeline"):
            pipeline_of([Number()], zero(stage))


def one_length_without_dynamic_shape() -> None:
    """Micro-batches of several lengths work without dynamic_shape: StageModule need not set it."""
    seen = []

    class Last(Number):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return super().forward(x).sum()

    for dynamic in (False, True):
        engine = pipeline_of([Number(), Last()], zero(1), dynamic=dynamic)
        for length in (2, 1):  # the other way round the process dies
            engine.eval_batch(iter([(torch.ones(length),) * 2]), reduce_output=None, bcast_loss=False)
    assert seen == ([2, 2, 2, 1] if torch.distributed.get_rank() else []), seen


# By number of processes. The last one leaves a broken engine behind.
CANARIES = {
    1: (outer_loss_loses_gradients, nan_reaches_the_weights, every_float_sent_needs_a_gradient,
        receive_buffers_keep_their_type, zero_2_is_asserted_against, no_zero_is_wrong_in_16_bits,
        local_rank_is_asked_for, replicas_alone_have_no_norm),
    2: (fp16_ties_are_not_summed, floats_are_walked_back_one_by_one, losses_are_averaged, clips_by_the_first_stage,
        one_length_without_dynamic_shape, no_other_engine_after_a_pipeline),
}


def show(world: str) -> None:
    """Runs on each rank; reports all canaries that failed."""
    from deepnmt.processes.process_group import processes

    changed = []
    with processes(threads=1, group=True):
        for canary in CANARIES[int(world)]:
            try:
                canary()
            except (Exception, pytest.fail.Exception):
                changed.append(f"{canary.__doc__}\n{traceback.format_exc()}")
        for engine in MADE:
            engine.destroy()
    assert not changed, "\n".join(changed)


@pytest.mark.parametrize("world", CANARIES)
def test_faults_are_still_there(world: int, warm: Warm) -> None:
    warm.run(world, "test_pipeline_canaries:show", world)
