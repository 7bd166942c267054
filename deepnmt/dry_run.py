"""What a recipe would do, before it does it: sizes, layout, and a memory estimate."""

from __future__ import annotations

from deepnmt.config import Model, Recipe, Stack, dump_recipe
from deepnmt.data.batching import PlanStream
from deepnmt.data.dataset import PreparedData
from deepnmt.errors import UserError
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.build import check_layout
from deepnmt.parallel.launch import place

# Tensors of one width kept for the backward pass, a token and layer; counted from the layers' operations, and within
# 15 % of what a 6L-6L, d 256 model in fp32 was seen to hold (docs/results.md).
_KEPT = {"encoder": 16, "decoder": 24}


def count_parameters(model: Model, src_vocab: int, trg_vocab: int) -> int:
    """Trainable numbers of the whole model; layers of a stack are alike, so one of each is built and counted."""
    def built(encoder: int, decoder: int) -> int:
        shallow = Model.model_validate({
            **model.model_dump(),
            "encoder": Stack(**{**model.encoder.model_dump(), "layers": encoder}).model_dump(),
            "decoder": Stack(**{**model.decoder.model_dump(), "layers": decoder}).model_dump(),
        })
        return sum(p.numel() for p in Transformer(shallow, 8, 8, 0).parameters())

    one = built(1, 1)
    layers = (model.encoder.layers - 1) * (built(2, 1) - one) + (model.decoder.layers - 1) * (built(1, 2) - one)
    tables = {"all": (trg_vocab - 8), "decoder": (src_vocab - 8) + (trg_vocab - 8),
              "none": (src_vocab - 8) + 2 * (trg_vocab - 8)}[model.tied]
    return one + layers + tables * model.width


def memory_estimate(recipe: Recipe, parameters: int, world: int) -> dict[str, float]:
    """Bytes a process holds: weights with gradients, optimizer (fp32 master and two moments), activations."""
    layout = check_layout(recipe, world)
    stage, precision = (layout.stage, layout.precision) if layout else (0, "fp32")
    size = 4 if precision == "fp32" else 2
    share = {0: (1, 1, 1), 1: (1, 1, world), 2: (1, world, world), 3: (world, world, world)}[stage]
    master = 12 if layout and stage else 8
    tokens, model = recipe.batch.tokens, recipe.model
    kept = sum(_KEPT[side] * stack.layers for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)))
    wide = 2 * (model.ffn / model.width) * (model.encoder.layers + model.decoder.layers) / 4
    return {
        "weights": parameters * size / share[0],
        "gradients": parameters * 4 / share[1],
        "optimizer": parameters * master / share[2],
        "activations": tokens * model.width * size * (kept + wide),
    }


def describe(recipe: Recipe) -> str:
    """The resolved recipe followed by its figures. Uses the prepared data where it exists."""
    world = place()[1]
    try:
        data = PreparedData.open(recipe.data.folder)
    except UserError:
        sizes, epoch = (recipe.vocab.size, recipe.vocab.size), "not prepared yet"
    else:
        source, target = data.vocabs()
        sizes = (source.size, target.size)
        stream = PlanStream(data.split("train"), recipe.batch.tokens, recipe.seed)
        per_update = world * recipe.batch.accumulation
        epoch = f"{stream.epoch_size(0) / per_update:.1f} (padding {100 * stream.plan(0).waste:.1f} %)"
    parameters = count_parameters(recipe.model, *sizes)
    memory = memory_estimate(recipe, parameters, world)
    layout = check_layout(recipe, world)
    name = "plain PyTorch, fp32" if layout is None else f"DeepSpeed ZeRO-{layout.stage}, {layout.precision}"
    encoder, decoder = recipe.model.encoder, recipe.model.decoder
    rows = {
        "model": f"{encoder.layers}L-{decoder.layers}L, {encoder.block} / {decoder.block}, width {recipe.model.width}",
        "parameters": f"{parameters:,}",
        "tokens per update": f"{recipe.batch.tokens * recipe.batch.accumulation * world:,} at most, padding included "
        f"({world} process(es) x {recipe.batch.accumulation} micro-batch(es) x {recipe.batch.tokens})",
        "updates per epoch": epoch,
        "memory per process": f"about {sum(memory.values()) / 2**20:,.0f} MiB + libraries ("
        + ", ".join(f"{k} {v / 2**20:,.0f}" for k, v in memory.items()) + ")",
        "layout": name,
    }
    width = max(map(len, rows))
    return dump_recipe(recipe) + "\n" + "\n".join(f"# {k:<{width}}  {v}" for k, v in rows.items())
