"""ZeRO-3 computes what the plain engine computes for the blocks with parameters and streams of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import run_on_ranks
from tiny_engines import ROOT, VOCAB, batches, step

from deepnmt.config import Recipe, check_recipe
from deepnmt.model.transformer import Transformer
from deepnmt.parallel.build import build_engine
from deepnmt.parallel.launch import processes

PAIRS = [("dlcl", "fixup"), ("rezero_post_ln", "t_fixup"), ("looks_linear", "dlcl_post"), ("b2t_no_ln", "rezero")]
MICRO_BATCHES = 2


def recipe(layout: str, world: int, encoder: str, decoder: str) -> Recipe:
    return check_recipe({
        "run": "unused", "seed": 3,
        "data": {"folder": "unused", "src_lang": "a", "trg_lang": "b", "train": {"tsv": "x"}, "valid": {"tsv": "x"}},
        "batch": {"accumulation": MICRO_BATCHES // world},
        "model": {"width": 16, "heads": 2, "ffn": 24, "dropout": 0.2, "encoder": {"block": encoder, "layers": 3},
                  "decoder": {"block": decoder, "layers": 2}},
        "train": {"updates": 10, "clip": 0.5},
        "parallel": {"ds_config": None if layout == "local" else str(ROOT / "ds_configs" / f"{layout}.json")},
    }, "test")


def trial(folder: str, layout: str) -> None:
    """Runs on each rank: losses and gradient norms of three updates for each pair."""
    with processes(threads=1, group=True) as ranks:
        traces = []
        for pair in PAIRS:
            settings = recipe(layout, ranks.world, *pair)
            engine = build_engine(Transformer(settings.model, VOCAB, VOCAB, 3, 0.1), settings, ranks)
            traces.append([step(engine, batches(update, MICRO_BATCHES), ranks)[:2] for update in range(3)])
            engine.close()
        if ranks.first:
            Path(folder, f"{layout}.json").write_text(json.dumps(traces), encoding="utf-8")


@pytest.mark.parametrize("world", [2])
def test_zero3_equals_the_local_engine(world: int, tmp_path: Path) -> None:
    run_on_ranks(1, "test_block_engines:trial", str(tmp_path), "local")
    run_on_ranks(world, "test_block_engines:trial", str(tmp_path), "zero3_fp32")
    ours, theirs = (json.loads((tmp_path / f"{layout}.json").read_text()) for layout in ("zero3_fp32", "local"))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=0)
