"""DeepSpeed's pipeline as an `Engine`: the model is partitioned into stages, each on its own processes.

DeepSpeed does the schedule (1F1B), the communication and the update. deepnmt provides one module a stage, which is a
`Transformer` with the stage's units, the partition (`partition.py`) and the groups of tied tables. Stage s of
data-parallel rank r is process s · (number of data-parallel ranks) + r. A tied table has a copy on each stage that uses
it; `_sum_tied_gradients` sums their gradients, so that all copies take the same update.

Stages send each other the hidden states alone, see `boundary.py`. Every stage takes ids, lengths and the key of dropout
from the micro-batch itself, which all stages of a pipeline have, and makes the masks anew.

What works around DeepSpeed has a canary test: the loss inside the last stage and its factor, one float tensor between
stages, `dynamic_shape` (for gradients), the sums of tied gradients, LOCAL_RANK, the norm of a stage with replicas alone
in bf16, and, without ZeRO, clipping and the check for non-finite gradients.
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
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from torch import nn

from deepnmt.batch import Batch
from deepnmt.config import Recipe
from deepnmt.model.blocks import set_clock
from deepnmt.model.loss import LossSums
from deepnmt.model.transformer import Transformer
from deepnmt.optim.groups import group_key
from deepnmt.parallel.deepspeed import DeepSpeedEngine
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import (
    BuildStage,
    Flags,
    Reading,
    StepStats,
    build_of,
    clip_gradients,
    figures_of,
    gradient_norm,
    read_sums,
    stage_of,
)
from deepnmt.parallel.pipeline.boundary import Boundary
from deepnmt.parallel.pipeline.partition import Partition
from deepnmt.processes.ranks import Ranks


class StageModule(PipelineModule):
    """The model as DeepSpeed sees it: one "layer" for each stage; each process builds its own stage.

    `scale` is the factor of the loss; the last stage calls `add` with the sums of each micro-batch; `begin` says which
    micro-batches come, since every stage takes their ids itself; `compute_module` holds the module that runs: the
    stage, or its copy in 16 bits without ZeRO.
    """

    def __init__(self, recipe: Recipe, build: BuildStage, partition: Partition) -> None:
        self.recipe, self.build, self.partition = recipe, build, partition
        self.scale = 1.0
        self.add: Callable[[LossSums], None] = lambda sums: None
        os.environ.setdefault("LOCAL_RANK", "0")  # PipelineModule reads it, but plain python does not set it
        with contextlib.redirect_stdout(io.StringIO()):
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)  # uses the open process group
            super().__init__(layers=range(partition.stages), num_stages=partition.stages, dynamic_shape=True)

    def _partition_layers(self, method: str = "uniform") -> None:
        """Overrides DeepSpeed's partitioning: stage s has "layer" s alone."""
        self.parts = list(range(self.partition.stages + 1))
        self._set_bounds(self.stage_id, self.stage_id + 1)

    def _build(self) -> None:
        units, bounds = self.partition.units, self.partition.bounds
        begin, end = bounds[self.stage_id], bounds[self.stage_id + 1]
        self.below = Boundary(self.recipe.model, units[begin].name) if begin else None
        self.above = Boundary(self.recipe.model, units[end].name) if end < len(units) else None
        self.stage = self.build(range(begin, end))
        self.stage.recompute = self.recipe.parallel.recompute_layers
        self.compute_module = (self.stage,)  # in a tuple: a copy's weights must not become this module's parameters
        for p in self.parameters():
            p.ds_pipe_replicated = False

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """For every table that several stages hold, the group of its copies. Collective.

        Only the first copy counts in gradient norms; the others are marked as replicas.
        """
        holders: dict[str, list[int]] = {}
        for stage in range(self.partition.stages):
            for unit in self.partition.units_of(stage):
                if unit.table:
                    name, _ = unit.table
                    stages = holders.setdefault(name, [])
                    if stage not in stages:
                        stages.append(stage)
        groups: dict[str, dict[str, Any]] = {}
        for name, stages in sorted(holders.items()):
            if len(stages) == 1:
                continue
            for data in range(self._grid.data_parallel_size):
                members = [self._grid.stage_to_global(stage_id=stage, data=data) for stage in stages]
                group = dist.new_group(ranks=members)
                if self.global_rank in members:
                    table = self.stage.embeddings[name]
                    groups[name] = {"ranks": members, "group": group, "weight_attr": ["weight"], "module": table}
                    cast(Any, table.weight).ds_pipe_replicated = self.global_rank != members[0]
        return groups

    def get_tied_weights_and_groups(self) -> list[tuple[torch.Tensor, Any]]:
        """This stage's copies of tied tables, each with the process group of all copies."""
        return [(tied["module"].weight, tied["group"]) for tied in self.tied_comms.values()]

    def begin(self, batches: Sequence[Batch]) -> None:
        """Says which micro-batches are sent through the pipeline next. Each stage receives them, and computes them, in
        this order."""
        prepared = [self.compute_module[0].objective.prepare(batch) for batch in batches]
        self.to_receive = iter(prepared)
        self.to_compute = iter(prepared)

    def empty(self) -> torch.Tensor:
        """An empty tensor for what the previous stage sends next."""
        assert self.below is not None
        return next(self.compute_module[0].parameters()).new_empty(self.below.shape(next(self.to_receive)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From what the previous stage sends to what the next one gets; of the last stage the scaled loss of the
        micro-batch.

        The loss is computed here and not in DeepSpeed's `loss_fn`: in bf16 DeepSpeed clears the gradients once that of
        the module's output is known, so gradients from outside the module's forward would be lost.
        """
        stage = self.compute_module[0]
        batch = next(self.to_compute)
        streams = self.below.unpack(x, batch) if self.below else ()
        memory, hidden = stage.run(batch, *streams)
        if self.above:
            return self.above.pack(memory, hidden)
        assert isinstance(hidden, torch.Tensor)
        sums = stage.objective.loss(hidden, stage.output_weight, batch)
        self.add(sums.detached())
        return sums.loss * self.scale

    def train(self, mode: bool = True) -> StageModule:
        self.compute_module[0].train(mode)
        return super().train(mode)


class PipelineEngine(DeepSpeedEngine):
    """See `Engine`. Its construction is collective.

    Args:
        recipe: its batch, model, optimizer and clipping are used.
        vocabs: source and target vocabulary sizes.
        partition: which units each stage holds.
        layout: with the completed DeepSpeed configuration.
        ranks: the processes, as many as data-parallel ranks × stages.
    """

    def __init__(
        self,
        recipe: Recipe,
        vocabs: tuple[int, int],
        partition: Partition,
        layout: Layout,
        ranks: Ranks,
    ) -> None:
        self.pipe = StageModule(recipe, stage_of(recipe, vocabs), partition)
        local = {name.removeprefix("stage."): p for name, p in self.pipe.named_parameters()}
        super().__init__(build_of(recipe, vocabs), recipe, ranks.device, layout, local)
        self.ranks = ranks
        self.module = self._compute_module(self.pipe.stage, layout)
        self.pipe.compute_module = (self.module,)
        self.stages, self.stage = partition.stages, self.pipe.stage_id
        self.data_rank = self.pipe._grid.data_parallel_id
        self.data_world = ranks.world // partition.stages
        self.shapes = self._exchange_shapes()
        self.parameters = sum(math.prod(shape) for _, _, shape in self._unique_parameters())
        self._norm = 0.0  # of the last update
        self._step_applied = True
        self.spare = self._spare_parameters()
        self.pipe.spare = nn.ParameterList(self.spare.values())
        self._start(self.pipe, layout)
        if self.engine.using_bf16_optimizer:
            _zero_norm_for_replicas(self.engine.optimizer, self.device)
        self.engine._INSTRUCTION_MAP = {
            **self.engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: _sum_tied_gradients,
            schedule.SendActivation: _send_hidden, schedule.RecvActivation: _receive_hidden}
        if self.zero == 0:
            self._deepspeed_step = self.engine._take_model_step
            self.engine._take_model_step = self._checked_step
        self._create_optimizer_state(self._update_with_zero_gradients)

    def _exchange_shapes(self) -> list[list[tuple[str, list[int]]]]:
        """Names and shapes of every stage's parameters, on every process."""
        mine = [(name, list(p.shape)) for name, p in self.local.items()]
        shapes = self.ranks.gather_bytes(json.dumps(mine).encode())
        of_stages = []
        if shapes:
            for stage in range(self.stages):
                of_stages.append(json.loads(shapes[self._first_rank_of(stage)]))
        return json.loads(self.ranks.broadcast_bytes(json.dumps(of_stages).encode()))

    def _spare_parameters(self) -> dict[str, nn.Parameter]:
        """A single zero for each parameter group that other stages have and this one lacks, under the name of a
        parameter there: ZeRO reduces the gradient norm of one group after the other over all stages."""
        groups = {group_key(name, p.shape, self.recipe) for name, p in self.local.items()}
        spare = {}
        for _, name, shape in self._unique_parameters():
            group = group_key(name, shape, self.recipe)
            if group not in groups:
                groups.add(group)
                spare[name] = nn.Parameter(torch.zeros([1] * len(shape)))
                cast(Any, spare[name]).ds_pipe_replicated = False
        return spare

    def _first_rank_of(self, stage: int) -> int:
        """The process of data-parallel rank 0 that holds a stage."""
        return stage * self.data_world

    # -- updates -----------------------------------------------------------------------------------------------------

    def train_step(
        self, batches: Sequence[Batch], update_tokens: int, rate: float, flags: Flags = tuple
    ) -> StepStats:
        self._set_rate(rate)
        set_clock(self.module, self._applied + 1)
        # DeepSpeed averages over micro-batches and data-parallel ranks
        self.pipe.scale = self._loss_factor * len(batches) * self.data_world / update_tokens
        scale_used = self.scaler.cur_scale if self.scaler else 1.0
        self._reading = Reading(self.device, self.ranks.world, figures_of(self.module), flags)
        self._run(batches)
        if self.zero:
            norm = float(self.engine.get_global_grad_norm())
            self._step_applied = bool(self.engine.was_step_applied()) and math.isfinite(norm) and norm >= 0
            self._norm = norm
        self._applied += self._step_applied
        if self.scaler:
            self.scaler.after_step()
        return self._reading.stats(self._norm, scale_used, self._step_applied)

    def _run(self, batches: Sequence[Batch]) -> None:
        """Makes one update."""
        self.engine.set_train_batch_size(len(batches) * self.data_world)  # by its number of micro-batches
        self.pipe.train()  # the objective prepares other micro-batches then
        self.pipe.begin(batches)
        self.pipe.add = self._reading.add
        self.engine.train_batch(_loaded(batches))
        self.engine.timers(TRAIN_BATCH_TIMER).reset()  # else it keeps two CUDA events of every update

    def _update_with_zero_gradients(self) -> None:
        """Takes one update with gradients of zero."""
        self.pipe.scale = 0.0
        self._run([Transformer.smallest_batch(self.device)])

    def _checked_step(self, lr_kwargs: Any) -> None:
        """The optimizer step without ZeRO: clips by the norm over all stages (DeepSpeed uses the first stage's alone)
        and drops an update with non-finite gradients (DeepSpeed does not check)."""
        self._unscale()
        parameters = list(self.pipe.parameters())
        squared = gradient_norm(p for p in parameters if not p.ds_pipe_replicated).to(self.device).square()
        dist.all_reduce(squared, group=self.pipe._grid.get_pipe_parallel_group())
        self._norm = float(*self._reading.read(squared.sqrt()))
        self._step_applied = math.isfinite(self._norm)
        if self.scaler:
            self.scaler.update_scale(not self._step_applied)
        if self._step_applied:
            clip_gradients(parameters, self._norm, self.clip)
        else:
            self.engine.zero_grad()
            for p in parameters:
                p.grad = None  # PyTorch's optimizers skip missing gradients
        self._deepspeed_step(lr_kwargs)

    def evaluate(self, batches: Sequence[Batch]) -> list[tuple[float, float]]:
        self.pipe.eval()
        self.pipe.begin(batches)
        sums: list[LossSums] = []
        self.pipe.add = sums.append
        count = len(batches)
        self.engine.eval_batch(_loaded(batches), reduce_output=None, bcast_loss=False, num_micro_batches=count)
        return read_sums(sums) if sums else [(0.0, 0.0)] * count

    # -- state -------------------------------------------------------------------------------------------------------

    def _first_holder(self, name: str) -> bool:
        return not any(name in dict(shapes) for shapes in self.shapes[: self.stage])

    def _unique_parameters(self) -> Iterator[tuple[int, str, list[int]]]:
        """(stage, name, shape) of every parameter; a tied table only from the first stage that holds it."""
        seen = set()
        for stage, parameters in enumerate(self.shapes):
            for name, shape in parameters:
                if name not in seen:
                    seen.add(name)
                    yield stage, name, shape

    def _broadcast_from(self, tensor: torch.Tensor, stage: int) -> None:
        if self.ranks.world > 1:
            dist.broadcast(tensor, self._first_rank_of(stage))

    @torch.no_grad()
    def gather_model(self) -> Transformer:
        model = self._allocate_full_model(next(self.module.parameters()).dtype)
        whole = dict(model.named_parameters())
        for stage, name, _ in self._unique_parameters():
            if stage == self.stage:
                whole[name].copy_(self.local[name])
            self._broadcast_from(whole[name].data, stage)
        return model.eval()

    # -- the rest ----------------------------------------------------------------------------------------------------

    def time_instructions(self, add: Callable[[float], None]) -> None:
        """From now on calls `add` with the seconds of each forward and backward pass of this stage: work, without
        waiting, gradient reduction and the optimizer's step.

        The device is synchronised before each reading of the clock, since a GPU runs asynchronously.
        """
        synchronize = get_accelerator().synchronize

        def timed(execute: Callable[..., None]) -> Callable[..., None]:
            def run(engine: Any, **arguments: Any) -> None:
                synchronize()
                started = time.perf_counter()
                execute(engine, **arguments)
                synchronize()
                add(time.perf_counter() - started)

            return run

        instructions = dict(self.engine._INSTRUCTION_MAP)
        for kind in (schedule.ForwardPass, schedule.BackwardPass, schedule.LoadMicroBatch):
            instructions[kind] = timed(instructions[kind])
        self.engine._INSTRUCTION_MAP = instructions


def _loaded(batches: Sequence[Batch]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What DeepSpeed loads for the first and for the last stage of each micro-batch; each takes its ids itself."""
    return iter([(batch["trg_out"], batch["trg_out"]) for batch in batches])


def _send_hidden(engine: Any, buffer_id: int) -> None:
    """Sends a micro-batch's hidden states. DeepSpeed's own version first sends their shape, for which the receiving
    host waits."""
    p2p.send(engine.pipe_buffers["outputs"][buffer_id], engine.next_stage)


def _receive_hidden(engine: Any, buffer_id: int) -> None:
    """Receives a micro-batch's hidden states, whose shape follows from the micro-batch."""
    hidden = engine.module.empty()
    p2p.recv(hidden, engine.prev_stage)
    engine.pipe_buffers["inputs"][buffer_id] = hidden.requires_grad_()


def _sum_tied_gradients(engine: Any) -> None:
    """Sums each tied table's gradient over its copies; DeepSpeed's own version misses the gradients of fp16."""
    for weight, group in engine.module.get_tied_weights_and_groups():
        if engine.using_bf16_optimizer:
            gradient = weight._hp_grad
        else:
            summed = getattr(weight, "grad_accum", None)
            gradient = weight.grad if summed is None else summed
        dist.all_reduce(gradient, group=group)


def _zero_norm_for_replicas(optimizer: Any, device: torch.device) -> None:
    """Makes the gradient norm 0 on a stage that holds only replicas of tied tables (a Post-LN model's output as a stage
    by itself); DeepSpeed's bf16 optimizer fails on the empty list."""
    original = optimizer.get_grads_for_norm

    def gradients(for_clipping: bool = False) -> Any:
        result = original(for_clipping)
        if for_clipping or result[0]:
            return result
        return [torch.zeros(1, device=device)], result[1]

    optimizer.get_grads_for_norm = gradients
