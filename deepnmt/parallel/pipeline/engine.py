"""DeepSpeed's pipeline engine behind deepnmt's seam: the model cut into stages, each on processes of its own.

DeepSpeed keeps its schedule (1F1B), its communication and its optimizers. deepnmt gives it one module a stage
(`stage.py`), its own cuts (`partition.py`) and the groups of tied tables. Stage s on data-parallel rank r is process
s · (data-parallel ranks) + r. A tied table has a copy on each stage that uses it; their gradients are summed
(`_sum_tied_gradients`), so that all copies take the same update.

What is shaped by faults and habits of DeepSpeed has a canary test, as has what `parallel/deepspeed.py` does: the loss
inside the last stage and what it is multiplied by, one float tensor between stages, `dynamic_shape`, the sums of tied
gradients, LOCAL_RANK, the norm of replicas alone in bf16, and, without ZeRO, clipping and the check for non-finite
gradients.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import schedule

from deepnmt.batch import Batch
from deepnmt.config import Recipe
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.deepspeed import DeepSpeedEngine
from deepnmt.parallel.engine import ParameterState, StepStats, build_of
from deepnmt.parallel.pipeline.partition import Partition
from deepnmt.parallel.pipeline.stage import Stage, StageMessage, tables_used
from deepnmt.parallel.settings import Layout
from deepnmt.ranks import Ranks


class StageModule(PipelineModule):
    """DeepSpeed's view of a pipelined model: as many layers as stages, of which each process builds its own.

    `scale` is what the loss is multiplied with; `sums` holds (loss, nll) of each micro-batch since it was last emptied;
    `computing` the stage, or, in 16 bits without ZeRO, the copy of it that computes.
    """

    def __init__(self, recipe: Recipe, vocabs: tuple[int, int], cuts: Partition) -> None:
        self.recipe, self.vocabs, self.cuts = recipe, vocabs, cuts
        self.scale = 1.0
        self.sums: list[tuple[torch.Tensor, torch.Tensor]] = []
        os.environ.setdefault("LOCAL_RANK", "0")  # PipelineModule asks for it, plain python does not set it
        with contextlib.redirect_stdout(io.StringIO()):
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)  # takes the group that is open
            super().__init__(layers=range(cuts.stages), num_stages=cuts.stages, dynamic_shape=True)

    def _partition_layers(self, method: str = "uniform") -> None:
        """One "layer", which is the stage, for each stage."""
        self.parts = list(range(self.cuts.stages + 1))
        self._set_bounds(self.stage_id, self.stage_id + 1)

    def _build(self) -> None:
        recipe, bounds = self.recipe, self.cuts.bounds
        self.stage = Stage(
            recipe.model,
            *self.vocabs,
            recipe.seed,
            recipe.train.label_smoothing,
            bounds[self.stage_id],
            bounds[self.stage_id + 1],
            recipe.parallel.recompute_layers,
        )
        self.computing = (self.stage,)  # in a tuple: a copy's weights are not to be counted among this module's
        for p in self.parameters():
            p.ds_pipe_replicated = False

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """For every table that several stages hold, the group of its copies; collective.

        The first copy counts in gradient norms, the others are marked as replicas.
        """
        holders: dict[str, list[int]] = {}
        for stage in range(self.cuts.stages):
            for name, _ in tables_used(self.recipe.model, *self.cuts.bounds[stage : stage + 2]):
                holders.setdefault(name, []).append(stage)
        groups: dict[str, dict[str, Any]] = {}
        for name, stages in sorted(holders.items()):
            for data in range(self._grid.data_parallel_size if len(stages) > 1 else 0):
                members = [self._grid.stage_to_global(stage_id=stage, data=data) for stage in stages]
                group = dist.new_group(ranks=members)
                if self.global_rank in members:
                    table = self.stage.embeddings[name]
                    groups[name] = {"ranks": members, "group": group, "weight_attr": ["weight"], "module": table}
                    cast(Any, table.weight).ds_pipe_replicated = self.global_rank != members[0]
        return groups

    def get_tied_weights_and_groups(self) -> list[tuple[torch.Tensor, Any]]:
        """The copies of tied tables here, each with the group of all its copies."""
        return [(tied["module"].weight, tied["group"]) for tied in self.tied_comms.values()]

    def forward(self, message: StageMessage) -> StageMessage | torch.Tensor:
        """See `Stage.forward`; on the last stage the scaled loss of the micro-batch.

        The loss is made here and not in DeepSpeed's `loss_fn`: what happens outside a module's forward is lost in bf16,
        where DeepSpeed clears the gradients once that of the module's output is there.
        """
        stage = self.computing[0]
        found = stage(message)
        if not torch.is_tensor(found):
            return found
        sums = stage.loss(found, message[3])
        self.sums.append((sums.loss.detach(), sums.nll.detach()))
        return sums.loss * self.scale

    def train(self, mode: bool = True) -> StageModule:
        self.computing[0].train(mode)
        return super().train(mode)


class PipelineEngine(DeepSpeedEngine):
    """See `Engine`. Collective in all processes.

    Args:
        recipe: of the run; its batch, model, optimizer and clipping count.
        vocabs: source and target vocabulary sizes.
        cuts: which units each stage holds.
        layout: with the DeepSpeed configuration, completed for the data-parallel processes.
        ranks: the processes, `data-parallel ranks` × stages.
    """

    def __init__(
        self,
        recipe: Recipe,
        vocabs: tuple[int, int],
        cuts: Partition,
        layout: Layout,
        ranks: Ranks,
    ) -> None:
        self.pipe = StageModule(recipe, vocabs, cuts)
        local = {name.removeprefix("stage."): p for name, p in self.pipe.named_parameters()}
        super().__init__(build_of(recipe, vocabs), recipe, ranks.device, layout, local)
        self.ranks, self.micro_batches = ranks, recipe.batch.accumulation
        self.module = self._compute_module(self.pipe.stage, layout)  # what this process computes
        self.pipe.computing = (self.module,)
        self.stages, self.stage = cuts.stages, self.pipe.stage_id
        self.data_rank, self.data_world = self.pipe._grid.data_parallel_id, ranks.world // cuts.stages
        self.shapes = self._exchange_shapes()
        self.parameters = sum(math.prod(shape) for _, _, shape in self._each_once())
        self._norm, self._sound = 0.0, True  # of the last update: its gradient's norm, and whether it was applied
        self._start(self.pipe, layout)
        if self.engine.using_bf16_optimizer:
            _count_replicas_as_nothing(self.engine.optimizer, self.device)
        self.engine._INSTRUCTION_MAP = {**self.engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: _sum_tied_gradients}
        if self.zero == 0:
            self._step_of_deepspeed = self.engine._take_model_step
            self.engine._take_model_step = self._checked_step
        self._create_optimizer_state(self._update_on_zeros)

    def _exchange_shapes(self) -> list[list[tuple[str, list[int]]]]:
        """Names and shapes of every stage's parameters, on every process."""
        mine = json.dumps([(name, list(p.shape)) for name, p in self.local.items()]).encode()
        found = self.ranks.gather_bytes(mine)
        first = [self._source(stage) for stage in range(self.stages)]
        data = json.dumps([json.loads(found[rank]) for rank in first]).encode() if found else None
        return json.loads(self.ranks.broadcast_bytes(data))

    def _source(self, stage: int) -> int:
        """The process that speaks for a stage: its data-parallel rank 0."""
        return stage * self.data_world

    # -- updates -----------------------------------------------------------------------------------------------------

    def train_step(self, batches: Sequence[Batch], update_tokens: int, rate: float) -> StepStats:
        self._set_rate(rate)
        # DeepSpeed averages over micro-batches and data-parallel processes
        self.pipe.scale = self._factor * self.micro_batches * self.data_world / update_tokens
        scale_used = self.scaler.cur_scale if self.scaler else 1.0
        sums = self._run(batches)
        if self.zero:
            norm = float(self.engine.get_global_grad_norm())
            self._sound = bool(self.engine.was_step_applied()) and math.isfinite(norm) and norm >= 0
            self._norm = norm
        self._applied += self._sound
        if self.scaler:
            self.scaler.after_step()
        loss, nll = sum(loss for loss, _ in sums), sum(nll for _, nll in sums)
        return StepStats(loss, nll, self._norm if self._sound else math.inf, scale_used, self._sound)

    def _run(self, batches: Sequence[Batch]) -> list[tuple[float, float]]:
        """One update; see `_sums`."""
        if len(batches) != self.micro_batches:
            raise ValueError(f"an update takes {self.micro_batches} micro-batches, but {len(batches)} were given")
        self.engine.train_batch(iter([self._message(batch) for batch in batches]))
        return self._sums(len(batches))

    def _update_on_zeros(self) -> None:
        """One update with gradients of zero."""
        self.pipe.scale = 0.0
        self._run([Transformer.smallest_batch(self.device)] * self.micro_batches)

    def _sums(self, count: int) -> list[tuple[float, float]]:
        """(loss, nll) of each of the `count` micro-batches that went through; zeros before the last stage."""
        found = [(loss.item(), nll.item()) for loss, nll in self.pipe.sums]
        self.pipe.sums.clear()
        return found or [(0.0, 0.0)] * count

    def _message(self, batch: Batch) -> tuple[StageMessage, torch.Tensor]:
        src, lengths, trg_in, trg_out = batch.tensors
        return (src, lengths, trg_in, trg_out, torch.tensor([batch.key], device=self.device)), trg_out

    def _checked_step(self, lr_kwargs: Any) -> None:
        """Without ZeRO: clipping by the norm over all stages (DeepSpeed takes that of the first alone), and no step on
        non-finite gradients (DeepSpeed looks for none)."""
        self._unscale()
        own = [p.grad for p in self.pipe.parameters() if p.grad is not None and not p.ds_pipe_replicated]
        squares = torch.stack([grad.float().pow(2).sum() for grad in own]).sum() if own else torch.zeros(())
        total = squares.double().to(self.device)
        dist.all_reduce(total, group=self.pipe._grid.get_pipe_parallel_group())
        self._norm = math.sqrt(total.item()) if math.isfinite(total.item()) else math.inf
        self._sound = math.isfinite(self._norm)
        if self.scaler:
            self.scaler.update_scale(not self._sound)
        if not self._sound:
            self.engine.zero_grad()
            for p in self.pipe.parameters():
                p.grad = None  # PyTorch's optimizers pass over missing gradients
        elif self.clip and self._norm > self.clip:
            for p in self.pipe.parameters():
                if p.grad is not None:
                    p.grad.mul_(self.clip / (self._norm + 1e-6))
        self._step_of_deepspeed(lr_kwargs)

    def evaluate(self, batches: Sequence[Batch]) -> list[tuple[float, float]]:
        messages = iter([self._message(batch) for batch in batches])
        count = len(batches)
        self.engine.eval_batch(messages, reduce_output=None, bcast_loss=False, num_micro_batches=count)
        return self._sums(count)

    # -- state -------------------------------------------------------------------------------------------------------

    def export_state(self) -> Iterator[ParameterState]:
        for stage, name, shape in self._each_once():
            tensors = [torch.empty(shape, device=self.device) for _ in (0, *self.moments)]
            if stage == self.stage:
                tensors = [tensor.contiguous() for tensor in self._read(self.local[name])]
            for tensor in tensors:
                self._from_stage(tensor, stage)
            weight, *rest = (tensor.cpu().clone() for tensor in tensors)
            yield ParameterState(name, weight, dict(zip(self.moments, rest, strict=True)))

    def _each_once(self) -> Iterator[tuple[int, str, list[int]]]:
        """(stage, name, shape) of every parameter, tied tables from the first stage that holds them."""
        seen = set()
        for stage, parameters in enumerate(self.shapes):
            for name, shape in parameters:
                if name not in seen:
                    seen.add(name)
                    yield stage, name, shape

    def _from_stage(self, tensor: torch.Tensor, stage: int) -> None:
        if self.ranks.world > 1:
            dist.broadcast(tensor, self._source(stage))

    @torch.no_grad()
    def gather_model(self) -> Transformer:
        """The whole model with the present weights, in the type it computes in, on every process.

        Raises:
            torch.OutOfMemoryError: on every process, where one has no room for it.
        """
        model = self._allocate_full_model(next(self.module.parameters()).dtype)
        whole = dict(model.named_parameters())
        for stage, name, _ in self._each_once():
            if stage == self.stage:
                whole[name].copy_(self.local[name])
            self._from_stage(whole[name].data, stage)
        return model.eval()

    # -- the rest ----------------------------------------------------------------------------------------------------

    def time_instructions(self, add: Callable[[float], None]) -> None:
        """Calls `add` at the end of every forward and backward pass of this stage, with its seconds: the work without
        the waiting, the sums of gradients and the optimizer's step.

        Both readings of the clock wait until the device has done what it was given: a GPU works on behind the program.
        """
        settle = get_accelerator().synchronize

        def timed(execute: Callable[..., None]) -> Callable[..., None]:
            def run(engine: Any, **arguments: Any) -> None:
                settle()
                started = time.perf_counter()
                execute(engine, **arguments)
                settle()
                add(time.perf_counter() - started)

            return run

        work = (schedule.ForwardPass, schedule.BackwardPass, schedule.LoadMicroBatch)
        self.engine._INSTRUCTION_MAP = {
            kind: timed(execute) if kind in work else execute for kind, execute in self.engine._INSTRUCTION_MAP.items()
        }


def _sum_tied_gradients(engine: Any) -> None:
    """Sums each tied table's gradient over its copies; DeepSpeed's own step overlooks where those of fp16 are."""
    for weight, group in engine.module.get_tied_weights_and_groups():
        if engine.using_bf16_optimizer:
            gradient = weight._hp_grad
        else:
            summed = getattr(weight, "grad_accum", None)
            gradient = weight.grad if summed is None else summed
        dist.all_reduce(gradient, group=group)


def _count_replicas_as_nothing(optimizer: Any, device: torch.device) -> None:
    """Gives DeepSpeed's bf16 optimizer a zero for the norm of a stage that holds replicas of tied tables alone (the
    output of a Post-LN model on a stage of its own): of an empty list it fails."""
    of_deepspeed = optimizer.get_grads_for_norm

    def gradients(for_clipping: bool = False) -> Any:
        found = of_deepspeed(for_clipping)
        return found if for_clipping or found[0] else ([torch.zeros(1, device=device)], found[1])

    optimizer.get_grads_for_norm = gradients
