"""`deepnmt train --dry-run`: the sizes, layout and estimated memory of a run, without training."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from deepnmt.checkpoint.checkpoint import BuildModule, shapes_by_name
from deepnmt.checkpoint.retention import check_average_last, most_at_once
from deepnmt.checkpoint.saving import in_shards, state_bytes
from deepnmt.config import Model, Recipe, TunedAt, dump_recipe, with_settings
from deepnmt.config.choices import ACTIVATIONS, Use
from deepnmt.data.mixing import stream_kind, training_stream
from deepnmt.data.prepared import check_vocabularies, is_free, open_prepared, trained_on
from deepnmt.data.vocab import Vocabulary, vocabulary_files
from deepnmt.device import CARDS, RESERVED, memory
from deepnmt.errors import UserError
from deepnmt.model.blocks import LayerPosition
from deepnmt.model.embedding import table_rows, table_width
from deepnmt.model.loss import loss_bytes
from deepnmt.model.transfer import factors_of
from deepnmt.model.transformer import Transformer, build_top
from deepnmt.optim.groups import group_key
from deepnmt.optim.optimizers import moment_names
from deepnmt.optim.schedules import warmup_note
from deepnmt.parallel.build import partition_of
from deepnmt.parallel.ds_config import Layout, layout_of
from deepnmt.parallel.pipeline.partition import Partition
from deepnmt.processes.process_group import rank_from_environment
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status
from deepnmt.training.fine_tuning import check_parts, find_trained, origins

# Tensors of model width that autograd keeps for the backward pass, for each token and layer, without the FFN's inner
# ones; within 5 % for a Post-LN model (tests/training/test_dry_run.py). In 16 bits a CPU computes attention and norms
# in fp32 and keeps those inputs in fp32. A GPU keeps a mask of dropout in one byte for each element.
_TENSORS_OF_LAYER = {"encoder": 10, "decoder": 17}
_TENSORS_ON_GPU = {"encoder": 9, "decoder": 15.5}
_TENSORS_ON_CPU_IN_16_BITS = {"encoder": 17, "decoder": 30}
_BUSY_GPU_TOKENS = 2**14  # tokens of a micro-batch that keep a GPU busy at width 512
_MEMORY_MARGIN = 1.2  # times the memory that there is: what certainly does not fit, beyond the error of the estimate
_REMEDIES = {"activations": "batch.tokens, or set parallel.recompute_layers", "loss": "batch.tokens",
         "positions": "model.max_length"}  # what needs less memory when it is lower, by what needs most
_TENSORS_OF_ENDS = 2  # the same for the embeddings and outputs of a stack, once


def count_parameters(model: Model, src_vocab: int, trg_vocab: int) -> int:
    """The number of parameters of the whole model, counted on shallow models, since the layers of a stack are alike.

    But each layer's block has its own number, as DLCL's, which has a weight for each output below.
    """
    def size(part: nn.Module) -> int:
        return sum(p.numel() for p in part.parameters())

    with torch.device("meta"):
        shallow = Transformer(with_settings(model, {f"{side}.layers": 1 for side in model.sides}), 8, 8, 0)
        total = size(shallow)
        for side in model.sides:
            stack = shallow.encoder if side == "encoder" else shallow.decoder
            layer, layers = stack.present[0], model.stack(side).layers
            total += (layers - 1) * (size(layer) - size(layer.rule)) - size(layer.rule) - size(stack.norm)
            for position in (LayerPosition.of(model, side, index) for index in range(layers)):
                total += size(position.block(position))
            total += size(build_top(model, side))
    sizes: dict[Use, int] = {"src": src_vocab, "trg": trg_vocab, "out": trg_vocab}
    small = table_rows(model, 8)
    tables = {name: (table_rows(model, sizes[use]) - small) * table_width(model, use)
              for use, name in model.tables.items()}
    return total + sum(tables.values())


def memory_estimate(
    recipe: Recipe, layout: Layout, parameters: int, vocab: int, device: str, partition: Partition | None = None
) -> dict[str, float]:
    """Bytes of memory a process needs: weights, gradients, optimizer (fp32 master weights and moments), activations,
    the loss over a target vocabulary of size `vocab`, and on a CPU the copy from which a checkpoint is written. The
    first of several processes also puts a checkpoint of one file together.

    For a pipeline (with a `partition`) that of the fullest stage: its parameters, and the activations of as many
    micro-batches as it has in flight. With recomputation: the activations of one group of layers, and the input of
    every group. `device`: cpu or cuda.
    """
    world, stage = layout.data_ranks, layout.stage
    size = 4 if layout.precision == "fp32" else 2
    share = {0: (1, 1, 1), 1: (1, 1, world), 2: (1, world, world), 3: (world, world, world)}[stage]
    kept_by_optimizer = 4 * len(moment_names(recipe)) + 4 * (stage > 0 or size == 2)
    tokens, model = recipe.batch.tokens * (2 if recipe.train.r_drop else 1), recipe.model
    each: Mapping[str, float]
    if device == "cuda":
        each = _TENSORS_ON_GPU
    elif size == 2:
        each = _TENSORS_ON_CPU_IN_16_BITS
    else:
        each = _TENSORS_OF_LAYER
    inner = ACTIVATIONS[model.activation].kept  # tensors of the FFN's inner width
    if model.activation_dropout > 0:
        inner += 1 if device == "cuda" else 2
    activations, count, inputs = 0.0, 0, 0  # of all layers: numbers a token, layers, numbers of their inputs
    for side in model.sides:
        layers, shape = model.stack(side).layers, model.shape(side)
        kept = each["encoder" if len(model.sides) == 1 else side]  # a decoder by itself has the layers of an encoder
        activations += layers * (kept * shape.width + inner * shape.ffn)
        count += layers
        inputs += layers * shape.width
    group = recipe.parallel.recompute_layers
    if group:
        activations = activations * min(1.0, group / count) + inputs / group
    state, processes = 4 * (1 + len(moment_names(recipe))), world * max(1, layout.stages)
    put_together = parameters if processes > 1 and not in_shards(recipe, parameters, processes) else 0
    if partition is not None:
        parameters = max(map(partition.parameters, range(partition.stages)))
        in_flight = min(partition.stages, recipe.batch.per_rank(layout.data_ranks))
        share_of_layers = in_flight * max(map(partition.cost, range(partition.stages)))
        activations *= share_of_layers
    copied = state * (parameters / world + put_together)  # see `checkpoint.saving`
    ends = _TENSORS_OF_ENDS * sum(model.shape(side).width for side in model.sides)
    needed = {
        "weights": parameters * size / share[0],
        "gradients": parameters * 4 / share[1],
        "optimizer": parameters * kept_by_optimizer / share[2],
        "activations": tokens * size * (activations + ends),
        "loss": loss_bytes(tokens, vocab, model.shape(model.last).width, size, device),
    }
    if device == "cpu":  # a GPU's is in the machine's memory
        needed["checkpoint copy"] = copied
    return needed


def _device(recipe: Recipe) -> str:
    """Where this machine would train; nothing is refused and no GPU is prepared, as by `device.choose`."""
    on_cpu = "cpu" in (recipe.parallel.device, os.environ.get("DS_ACCELERATOR"))
    return "cpu" if on_cpu or not torch.cuda.is_available() else "cuda"


def largest_micro_batch(
    recipe: Recipe, layout: Layout, parameters: int, vocab: int, partition: Partition | None, most: float
) -> int:
    """The largest `batch.tokens`, a multiple of 256, for which training fits into `most` bytes of a GPU; 0: none."""
    def fits(tokens: int) -> bool:
        other = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"tokens": tokens})})
        needed = memory_estimate(other, layout, parameters, vocab, "cuda", partition)
        return memory_fault(other, layout, needed, most, "cuda") is None

    least, above = 0, 1
    while above < 2**16 and fits(256 * above):
        least, above = above, 2 * above
    while above - least > 1:
        middle = (least + above) // 2
        least, above = (middle, above) if fits(256 * middle) else (least, middle)
    return 256 * least


def memory_fault(
    recipe: Recipe, layout: Layout, needed: Mapping[str, float], most: float, device: str
) -> str | None:
    """A sentence if a process needs more than `most` bytes of memory, else None; `needed` is of `memory_estimate`."""
    elsewhere = {"optimizer": layout.offloads("optimizer"), "weights": layout.offloads("param")}
    on_device = dict(needed)
    for name in on_device:
        if device == "cuda" and elsewhere.get(name):
            on_device[name] = 0.0
    widths = sum(recipe.model.shape(side).width for side in recipe.model.sides)
    on_device["positions"] = 4 * recipe.model.max_length * widths
    total = sum(on_device.values())
    if total <= most:
        return None
    part, size = max(on_device.items(), key=lambda item: item[1])
    remedy = _REMEDIES.get(part, "model.width or its layers, or let ZeRO share them")
    return (f"training needs about {total / 2**30:,.2f} GiB of memory per process, {size / 2**30:,.2f} of it for the "
            f"{part}, but a process can have {most / 2**30:,.2f} GiB; lower {remedy}")


def check_memory(recipe: Recipe, layout: Layout, vocabs: tuple[int, int], ratio: float, ranks: Ranks) -> None:
    """Prints a warning if the estimated memory is more than there is, and raises `UserError` if it is much more."""
    partition = partition_of(recipe, *vocabs, ratio) if layout.stages else None
    device, parameters = ranks.device.type, count_parameters(recipe.model, *vocabs)
    needed = memory_estimate(recipe, layout, parameters, vocabs[1], device, partition)
    most = memory(ranks.device, ranks.local_world)
    if fault := memory_fault(recipe, layout, needed, most * _MEMORY_MARGIN, device):
        raise UserError(fault)
    if ranks.first and (fault := memory_fault(recipe, layout, needed, most, device)):
        print_status(f"{fault}; trying it")


def factor_table(recipe: Recipe) -> str:
    """What `model.tuned_at` multiplies initial weights, rate, eps and weight decay by: a line for each group of parts
    that have the same factors."""
    with torch.device("meta"):
        built = Transformer(with_settings(recipe.model, {f"{side}.layers": 1 for side in recipe.model.sides}), 8, 8, 0)
    groups: dict[tuple[float, ...], dict[str, None]] = {}
    for name, p in built.named_parameters():
        factors = factors_of(name, recipe.model, group_key(name, p.shape, recipe).muon)
        groups.setdefault((*factors, factors.decay), {})[re.sub(r"\.\d+\.", ".*.", name)] = None
    lines = [f"{'initial':>8} {'rate':>8} {'eps':>8} {'decay':>8}  factors, by parameter"]
    for values, names in groups.items():
        lines += [" ".join(f"{value:8.4g}" for value in values) + f"  {', '.join(names)}"]
    return "\n".join(lines)


def disk_note(recipe: Recipe, parameters: int) -> str:
    """A sentence on the disk that the run's checkpoints take, and whether there is as much."""
    train, folder = recipe.train, Path(recipe.run) / "checkpoints"
    each = state_bytes(recipe, parameters)
    count = most_at_once(train)
    used = sum(file.stat().st_size for file in folder.glob("*/*") if file.is_file())
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free + used
    note = (f"checkpoints take up to {count * each / 2**20:,.1f} MiB ({count} of {each / 2**20:,.1f}, one of them "
            "while it is written)")
    if count * each <= free:
        return note
    return (f"{note}, but {folder} has room for {free / 2**20:,.1f} MiB; free disk space, set train.keep_last lower, "
            "or set run to another disk")


def _update_size(recipe: Recipe, ranks: int) -> str:
    batch = recipe.batch
    if batch.update_tokens is not None:
        return (f"about {batch.update_tokens:,} of the target ({ranks} process(es) x about {batch.per_rank(ranks)} "
                f"micro-batch(es) of at most {batch.tokens})")
    return (f"{batch.tokens * batch.accumulation * ranks:,} at most, padding included ({ranks} process(es) x "
            f"{batch.accumulation} micro-batch(es) x {batch.tokens})")


def plan_by_shapes(recipe: Recipe, build: BuildModule, model: str, rows: Mapping[str, str]) -> str:
    """What `describe` prints, of a task that has no estimate of its memory.

    Args:
        model: what it is, in words.
        rows: what else is said, by name.
    """
    parameters = sum(map(math.prod, shapes_by_name(build).values()))
    common = {"layout": _layout_name(planned_layout(recipe)), "disk": disk_note(recipe, parameters)}
    return _with_rows(recipe, {"model": model, "parameters": f"{parameters:,}", **rows, **common})


def _layout_name(layout: Layout) -> str:
    if layout.config is None:
        return "plain PyTorch, fp32"
    return f"DeepSpeed ZeRO-{layout.stage}, {layout.precision}"


def _with_rows(recipe: Recipe, rows: dict[str, str], *more: str) -> str:
    """The recipe; beneath it these rows, what is to be said of the learning rate, and further lines, as comments."""
    if note := warmup_note(recipe):
        rows["learning rate"] = note
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {text}" for name, text in rows.items()]
    return "\n".join([dump_recipe(recipe), *(f"# {line}" for line in [*lines, *more])])


def describe(recipe: Recipe, card: str | None = None) -> str:
    """The resolved recipe and the figures of its run, for the processes that were started, at least one for each
    pipeline stage. Uses the prepared data if there is any, else the recipe's vocabulary size. `card`: a name in
    `device.CARDS`, for whose memory the micro-batch is fitted.

    Raises:
        UserError: training would reject the layout or the data.
    """
    begin: Path | None = None
    per_update = micro_batches(recipe)
    folder = Path(recipe.data.folder)
    if is_free(folder):
        sizes = (recipe.vocab.size, recipe.vocab.size)
        if recipe.vocab.model:
            check_vocabularies(Path(recipe.vocab.model))
            if files := vocabulary_files(Path(recipe.vocab.model)):
                sizes = (Vocabulary.load(files[0]).size, Vocabulary.load(files[-1]).size)
        epoch, ratio, warnings = "not prepared yet", 1.0, trained_on(recipe)
    else:
        data = open_prepared(recipe)
        warnings = trained_on(recipe, data.manifest["inputs"])
        source, target = data.vocabs()
        sizes = (source.size, target.size)
        if recipe.train.init_from is not None:
            begin = find_trained(recipe)
            origins(recipe, (source, target), begin)
        train = data.split("train")
        ratio = train.source_per_target
        stream = training_stream(recipe, data, stream_kind(recipe, data))
        updates = stream.epoch_size(0) / per_update
        epoch = f"{updates:.1f} (padding {100 * stream.waste(0):.1f} %)"
    return plan_of(recipe, card, sizes, epoch, ratio, warnings, begin)


def planned_layout(recipe: Recipe) -> Layout:
    """The layout on the processes that were started, at least one for each pipeline stage. Raises `UserError` if it is
    impossible."""
    return layout_of(recipe, max(rank_from_environment()[1], recipe.parallel.pipeline_stages))


def micro_batches(recipe: Recipe) -> int:
    """Micro-batches of an update on the processes that were started. Raises `UserError` if the layout is impossible."""
    return recipe.batch.entries(planned_layout(recipe).data_ranks)


def plan_of(
    recipe: Recipe, card: str | None, sizes: tuple[int, int], epoch: str, ratio: float = 1.0,
    warnings: Sequence[str] = (), begin: Path | None = None,
) -> str:
    """What `describe` prints, of any task whose model is a Transformer.

    Args:
        sizes: of the source and the target vocabulary.
        epoch: its updates, in words.
        ratio: source tokens for each target token.
        warnings: about the data.
        begin: the checkpoint that training begins with.
    """
    check_average_last(recipe)
    check_parts(recipe)
    stages = recipe.parallel.pipeline_stages
    layout = planned_layout(recipe)
    data_parallel = layout.data_ranks
    world = data_parallel * max(1, stages)
    parameters = count_parameters(recipe.model, *sizes)
    partition = partition_of(recipe, *sizes, ratio) if stages else None
    device = "cuda" if card else _device(recipe)
    needed = memory_estimate(recipe, layout, parameters, sizes[1], device, partition)
    name = _layout_name(layout)
    model = recipe.model
    widths = dict.fromkeys(str(model.shape(side).width) for side in model.sides)
    memory_parts = ", ".join(f"{part} {size / 2**20:,.0f}" for part, size in needed.items())
    if stages:
        name += f", pipeline of {stages} stages on {world} process(es)"
    rows = {
        "model": f"{model.depths}, {' / '.join(model.block_names)}, "
        f"width {' / '.join(widths)}",
        "parameters": f"{parameters:,}",
        "tokens per update": _update_size(recipe, data_parallel),
        "updates per epoch": epoch,
        "memory per process": f"about {sum(needed.values()) / 2**20:,.0f} MiB + libraries ({memory_parts})",
        "layout": name,
    }
    if warnings:
        rows["warning"] = "; ".join(warnings)
    if begin:
        rows["begins with"] = f"the weights of {begin}"
    most = CARDS[card] * 2**30 - RESERVED if card else memory(torch.device(device), rank_from_environment()[3])
    if fault := memory_fault(recipe, layout, needed, most, device):
        rows["too much memory"] = fault
    if card:
        largest = largest_micro_batch(recipe, layout, parameters, sizes[1], partition, most)
        rows["largest micro-batch"] = (
            f"batch.tokens={largest} on {card}, {CARDS[card]} GiB, of which {RESERVED / 2**30} are CUDA's and NCCL's"
            if largest else f"none fits on {card}, {CARDS[card]} GiB; lower model.width or its layers")
    if device == "cuda" and recipe.batch.tokens < _BUSY_GPU_TOKENS:
        other = "batch.accumulation lower" if recipe.batch.update_tokens is None else "batch.update_tokens too"
        rows["small micro-batch"] = (
            f"batch.tokens ({recipe.batch.tokens:,}) is below {_BUSY_GPU_TOKENS:,}: a fast GPU waits for the host to "
            f"launch its kernels; set it higher, and {other}")
    state = state_bytes(recipe, parameters) / 1e6
    rows["checkpoints"] = (
        f"in {world} shard(s) of {state / world:,.0f} MB; each process holds a copy of its own"
        if in_shards(recipe, parameters, world) else
        f"in one file, {state:,.0f} MB with the moments; the first process holds all of it while it writes")
    rows["disk"] = disk_note(recipe, parameters)
    table = partition.table(recipe.batch.per_rank(data_parallel)).splitlines() if partition is not None else []
    factors = factor_table(recipe).splitlines() if model.tuned_at != TunedAt() else []
    return _with_rows(recipe, rows, *factors, *table)
