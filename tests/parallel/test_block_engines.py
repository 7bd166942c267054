"""Blocks with their own parameters or streams compute the same under ZeRO-3, in fp16 and in a pipeline as under the
local engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engines import VOCAB, batches, parallel, recipe_with, step
from warm import Warm

from deepnmt.config import Recipe
from deepnmt.parallel.build import start_engine
from deepnmt.parallel.ds_config import layout_of
from deepnmt.processes.process_group import processes

PUBLISHED = {"init": "published"}
PAIRS: list[tuple[str, str, dict[str, Any]]] = [
    ("admin_closed_form", "fixup", {}), ("rezero_post_ln", "t_fixup", {}), ("looks_linear", "rezero", {}),
    ("b2t_no_ln", "looks_linear", {}),
    ("admin", "pre_ln", {"layer_drop": 0.4, "recompute": 1, "model": {  # the pieces that any block may have
        "norm": "rms_norm", "activation": "swiglu", "positions": "rotary", "tied": "decoder"},
        "of_decoder": {"width": 12, "heads": 3, "ffn": 10}, "train": {"r_drop": 2.0}}),
    ("fixup", "fixup", PUBLISHED), ("looks_linear", "admin_closed_form", PUBLISHED),
    ("dlcl", "dlcl_post", {"layer_drop": 0.4}),
    ("dlcl_post", "dlcl", {**PUBLISHED, "history_window": 2, "history_softmax": True}),
    # each of the blocks that came later once, on the side that has more of it
    ("keel", "siamese", {"layer_drop": 0.4}), ("mhc", "block_attn_res", {"layer_drop": 0.4}),
    ("attn_res", "hyper", {}), ("sub_ln", "keel", {}), ("peri_ln", "lns", {"ramp": 2}), ("siamese", "mix_ln", {})]
NEWER = PAIRS.index(("keel", "siamese", {"layer_drop": 0.4}))  # the first pair of these
MICRO_BATCHES = 2


def recipe(layout: str, world: int, encoder: str, decoder: str, settings: dict[str, Any]) -> Recipe:
    stages, settings = world if layout.startswith("pipeline") else 0, dict(settings)
    more, of_decoder = settings.pop("model", {}), settings.pop("of_decoder", {})
    train, recompute = settings.pop("train", {}), settings.pop("recompute", 0)
    return recipe_with(
        batch={"accumulation": MICRO_BATCHES * max(1, stages) // world},
        model={"width": 16, "heads": 2, "ffn": 24, "dropout": 0.2,
               "encoder": {"block": encoder, "layers": 3, **settings},
               "decoder": {"block": decoder, "layers": 2, **settings, **of_decoder}, **more},
        train={"updates": 10, "clip": 0.5, **train},
        parallel=parallel(layout.removeprefix("pipeline_"), stages, recompute_layers=recompute))


def trial(folder: str, layout: str, first: str = "0") -> None:
    """Runs on each rank: losses and gradient norms of two updates for each pair from this one on."""
    with processes(threads=1, group=True) as ranks:
        traces = []
        for pair in PAIRS[int(first):]:
            made = recipe(layout, ranks.world, *pair)
            engine = start_engine(made, layout_of(made, ranks.world), (VOCAB, VOCAB), ranks)
            traces.append([step(engine, batches(update, MICRO_BATCHES), ranks)[:2] for update in range(2)])
            engine.close()
        if ranks.first:
            Path(folder, f"{layout}.json").write_text(json.dumps(traces), encoding="utf-8")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> torch.Tensor:
    """Losses and norms [pairs, updates, 2]."""
    folder = tmp_path_factory.mktemp("local")
    warm.run(1, "test_block_engines:trial", folder, "local")
    return torch.tensor(json.loads((folder / "local.json").read_text()))


# fp16 rounds weights and activations to 11 bits. Adam's first updates go by the gradient's signs, so a small gradient
# that is rounded moves its weight by a whole step: later norms differ more than losses, by 6e-3 with Pre-LN alone.
@pytest.mark.parametrize(("layout", "of_losses", "of_norms"), [
    ("zero3_fp32", 1e-6, 1e-5), ("pipeline_zero1_fp32", 1e-6, 1e-5), ("zero1_fp16", 1e-3, 1e-2)
])
def test_layout_equals_the_local_engine(
    layout: str, of_losses: float, of_norms: float, local: torch.Tensor, tmp_path: Path, warm: Warm
) -> None:
    warm.run(2, "test_block_engines:trial", tmp_path, layout)
    ours = torch.tensor(json.loads((tmp_path / f"{layout}.json").read_text()))
    torch.testing.assert_close(ours[..., 0], local[..., 0], rtol=of_losses, atol=0)
    torch.testing.assert_close(ours[..., 1], local[..., 1], rtol=of_norms, atol=0)


@pytest.mark.parametrize(("layout", "world"), [
    ("zero0_fp32", 2), ("zero2_fp32", 2), ("pipeline_zero1_fp32", 3)])
def test_newer_blocks_in_the_other_layouts(
    layout: str, world: int, local: torch.Tensor, tmp_path: Path, warm: Warm
) -> None:
    """Streams go through three stages, too."""
    warm.run(world, "test_block_engines:trial", tmp_path, layout, NEWER)
    ours = torch.tensor(json.loads((tmp_path / f"{layout}.json").read_text()))
    torch.testing.assert_close(ours[..., 0], local[NEWER:, :, 0], rtol=1e-6, atol=0)
