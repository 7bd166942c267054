"""A DeepSpeed JSON that only DeepSpeed itself can judge: what it refuses is a sentence, what deepnmt ships it takes."""

from __future__ import annotations

from typing import Any

from tiny_engines import ROOT, recipe_of
from warm import Warm

from deepnmt.errors import UserError
from deepnmt.parallel.settings import check_by_deepspeed, load_ds_config

# section, its keys, and what is said; each goes into ZeRO-1 in fp16
TYPOS: list[tuple[str, dict[str, Any], str]] = [
    ("zero_optimization", {"overlap_com": True}, "zero_optimization.overlap_com: Extra inputs are not permitted"),
    ("zero_optimization", {"reduce_bucket_size": "x"}, "zero_optimization.reduce_bucket_size: Input should be"),
    ("fp16", {"hystersis": 1}, "fp16.hystersis: Extra inputs are not permitted"),
    ("", {"gradient_allreduce_op": "median"}, "median"),
]


def trial() -> None:
    for path in (ROOT / "ds_configs").glob("*.json"):
        stages = 2 if path.stem.startswith("pipeline") else 0
        check_by_deepspeed(load_ds_config(path, recipe_of(str(path), stages=stages), 2))
    for section, keys, expected in TYPOS:
        settings = load_ds_config(ROOT / "ds_configs" / "zero1_fp16.json", recipe_of("zero1_fp16"), 1)
        (settings.tree[section] if section else settings.tree).update(keys)
        try:
            check_by_deepspeed(settings)
        except UserError as error:
            said = str(error)
        assert "zero1_fp16.json is refused by DeepSpeed:\n  " in said and expected in said, said
        assert said.count("\n") == 1 and "Traceback" not in said


def test_what_deepspeed_refuses_is_a_sentence(warm: Warm) -> None:
    warm.run(1, "test_ds_refusals:trial")
