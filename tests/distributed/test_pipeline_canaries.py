"""Faults of DeepSpeed's pipeline engine that deepnmt works around, each shown on the real DeepSpeed.

As in test_canaries.py: a canary that fails says that DeepSpeed has changed, and its docstring what to revisit. All were
seen on 0.19.8. The models are single numbers, the optimizer plain SGD.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_canaries import MADE, Config, engine_of, fp16, sings, zero
from torch import Tensor, nn
from warm import Warm

RATE = 0.125


class Number(nn.Module):
    """weight · x, for a single weight that starts at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def pipeline_of(layers: list[Any], config: Config, loss: Callable[..., Tensor] | None = None) -> Any:
    """DeepSpeed's pipeline engine, as many stages as processes, the layers shared evenly."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    stages = torch.distributed.get_world_size()
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    module = PipelineModule(layers, num_stages=stages, loss_fn=loss, partition_method="uniform", dynamic_shape=True)
    tree = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9, **config}
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    MADE.append(deepspeed.initialize(model=module, optimizer=optimizer, config=tree)[0])
    return MADE[-1]


def step(engine: Any, x: float = 1.0) -> None:
    """An update on one micro-batch, whose input and label are x."""
    value = torch.full((1,), x, dtype=next(engine.module.parameters()).dtype)
    engine.train_batch(iter([(value, value)]))


def used(p: nn.Parameter) -> float:
    """The gradient that moved a weight from 1."""
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


def local_rank_is_asked_for() -> None:
    """PipelineModule stands a missing LOCAL_RANK: StageModule need not set it."""
    del os.environ["LOCAL_RANK"]
    with pytest.raises(TypeError):
        pipeline_of([Number()], zero(1))


def every_float_sent_needs_a_gradient() -> None:
    """Floats without a gradient may go between stages: memory and target states need not be one tensor (stage.py)."""
    engine = pipeline_of([Number()], zero(1))
    unused = torch.ones(1, requires_grad=True)
    engine._reserve_pipe_buffers(1)
    engine.pipe_buffers["inputs"][0] = (unused,)
    with pytest.raises(AssertionError):
        engine._exec_send_grads(0)


def floats_are_walked_back_one_by_one() -> None:
    """All outputs of a stage are walked back at once: memory and target states need not be one tensor (stage.py)."""
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
    """A receive buffer is made anew for another type: the parcel of stage.py may be in any order."""
    engine = pipeline_of([Number()], zero(1))
    engine._allocate_or_extend_buffers(0, [4], torch.float32)
    assert engine._allocate_or_extend_buffers(0, [2], torch.int64).dtype == torch.float32


CANARIES = (
    (1, outer_loss_loses_gradients), (2, fp16_ties_are_not_summed), (2, no_other_engine_after_a_pipeline),
    (1, nan_reaches_the_weights), (1, local_rank_is_asked_for), (1, every_float_sent_needs_a_gradient),
    (2, floats_are_walked_back_one_by_one), (1, receive_buffers_keep_their_type),
)


@pytest.mark.parametrize(("world", "canary"), CANARIES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_fault_is_still_there(world: int, canary: Callable[[], None], warm: Warm) -> None:
    sings(canary, world, warm)
