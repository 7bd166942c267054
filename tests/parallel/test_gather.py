"""Under ZeRO-3 and in pipelines decoding uses a gathered model: weights, loss and BLEU equal those of other layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from refusals import user_error
from tiny_engines import export_state, options
from warm import Warm

from deepnmt.checkpoint.checkpoint import moments_in, weights_in
from deepnmt.config import Recipe, Translate, load_recipe
from deepnmt.data.prepared import open_prepared
from deepnmt.decode.translate import translate_lines
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.parallel.engine import Engine
from deepnmt.processes.process_group import processes
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.translation.source_use import SourceUse
from deepnmt.tasks.translation.validate import validate
from deepnmt.training.trainer import Trainer


def trial(recipe: str, checkpoint: str, layout: str, stages: str, output: str) -> None:
    """Runs on each rank: compares the gathered weights with the exported ones, and validates with them."""
    with processes(threads=1, group=True) as ranks:
        settings = load_recipe(recipe, [*options(layout, int(stages)),
                                        "train.valid_sentences=0", "batch.tokens=64"])
        check_texts(settings, ranks)
        data = open_prepared(settings)
        vocabs = data.vocabs()
        sizes = (vocabs[0].size, vocabs[1].size)
        engine = start_engine(settings, layout_of(settings, ranks.world), sizes, ranks, initialise=False)
        engine.fill(weights_in(Path(checkpoint)), moments_in(Path(checkpoint)), 12)
        whole = engine.gather_model()
        weights = dict(whole.named_parameters())
        for state in export_state(engine):
            weight = weights.pop(state.name)
            assert torch.equal(weight.cpu(), state.weight.to(weight.dtype)), state.name
        assert not weights
        assert all(buffer.dtype == torch.float32 for buffer in whole.buffers()), "positions stay in fp32"
        if int(stages) or "zero3" in layout:
            check_room(engine, ranks)
        if ranks.first:  # decodes while no other process takes part
            assert len(translate_lines(whole, vocabs, data.split("valid").src_text(), Translate(method="greedy"))) == 20
        ranks.barrier()
        with patch("deepnmt.tasks.translation.source_use.BATCH", 100):  # more micro-batches than processes
            found = validate(settings, data, engine, ranks)
        if ranks.first:
            use = SourceUse.of(found.figures)
            assert use is not None
            Path(output).write_text(json.dumps({
                "loss": found.loss, "bleu": found.figures["bleu"], "bytes": next(whole.parameters()).dtype.itemsize,
                "source": astuple(use)}))
        engine.close()


def check_texts(settings: Recipe, ranks: Ranks) -> None:
    """Training texts may be on some machines only: a fault that one process finds in them stops all."""
    here = patch("deepnmt.data.prepared.on_this_machine", lambda corpus: ranks.rank == ranks.world - 1)
    others = patch("deepnmt.data.prepared.files_by_corpus", lambda text: [])
    with here, others, user_error("made from other texts"):
        Trainer(settings, ranks)


def check_room(engine: Engine, ranks: Ranks) -> None:
    """If one process has no memory for the whole model, all raise an error and none waits."""
    asked = []

    def full(*arguments: Any) -> None:
        asked.append(arguments)
        if ranks.rank == ranks.world - 1:
            raise torch.OutOfMemoryError

    crowded = patch("deepnmt.parallel.deepspeed.cast_onto", full)
    with crowded, pytest.raises(torch.OutOfMemoryError, match="no memory for"):
        engine.gather_model()
    assert (len(asked) == 1) == (ranks.rank == ranks.world - 1)  # a part at a time, as far as there is room


@pytest.fixture(scope="module")
def checkpoint(prepared: Path, tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Path:
    """The checkpoint of a run long enough for a BLEU above 0."""
    run = tmp_path_factory.mktemp("gather") / "run"
    warm.train(1, prepared / "recipe.yaml", f"run={run}", "train.updates=80", "train.validate_every=1000",
               "train.save_every=80", "train.valid_bleu=false", "batch.tokens=512")
    assert warm.wait() == [0], warm.said()
    return run / "checkpoints" / "update-00000080"


@pytest.fixture(scope="module")
def validated(checkpoint: Path, prepared: Path, warm: Warm) -> Callable[[tuple[int, str, int]], dict[str, Any]]:
    """Loss and BLEU of the validation text in a layout, how the source is used, and the bytes of one weight of the
    gathered model; each layout is run once."""
    @cache
    def run(layout: tuple[int, str, int]) -> dict[str, Any]:
        world, name, stages = layout
        output = checkpoint.parent / f"{world}-{name}-{stages}.json"
        warm.run(world, "test_gather:trial", prepared / "recipe.yaml", checkpoint, name, stages, output)
        return json.loads(output.read_text())

    return run


# processes, layout, stages; what it is compared with, and how close losses and BLEU must be. In bf16 the weights are
# the same bits, but under ZeRO-3 DeepSpeed's linear rounds a product before it adds the bias (without its
# memory_efficient_linear the losses are ZeRO-1's); a pipeline of one stage has ZeRO-1's losses, of two stages nearly.
@pytest.mark.parametrize(("layout", "control", "of_loss", "of_bleu"), [
    ((2, "zero3_fp32", 0), (1, "local", 0), 1e-6, 0.0),
    ((2, "zero3_bf16", 0), (2, "zero1_bf16", 0), 1e-3, 1.0),
    ((2, "zero1_fp32", 2), (1, "local", 0), 1e-6, 0.0),
    ((3, "zero0_fp32", 3), (1, "local", 0), 1e-6, 0.0),
    ((4, "zero1_fp32", 2), (1, "local", 0), 1e-6, 0.0),
    ((1, "zero1_bf16", 1), (1, "zero1_bf16", 0), 1e-6, 0.0),
    ((2, "zero1_bf16", 2), (2, "zero1_bf16", 0), 1e-4, 0.0),
])
def test_validation_equals_that_of_other_layouts(
    layout: tuple[int, str, int], control: tuple[int, str, int], of_loss: float, of_bleu: float,
    validated: Callable[[tuple[int, str, int]], dict[str, Any]]
) -> None:
    ours, theirs = validated(layout), validated(control)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=of_loss)
    assert ours["bleu"] == pytest.approx(theirs["bleu"], abs=of_bleu) and theirs["bleu"] > 0
    assert ours["bytes"] == theirs["bytes"]
    (our_gain, *our_shares), (gain, *shares) = ours["source"], theirs["source"]
    assert our_gain == pytest.approx(gain, abs=2 * max(1e-6, of_loss) * theirs["loss"])  # of two losses, each so close
    assert our_shares == pytest.approx(shares, abs=max(1e-5, 3 * of_loss))
    assert 0 < theirs["source"][1] < 1
