"""DeepSpeed itself checks the JSON: its faults become a message, and it accepts all files that deepnmt ships."""

from __future__ import annotations

from typing import Any

from tiny_engines import ROOT, recipe_of
from warm import Warm

from deepnmt.errors import UserError
from deepnmt.parallel.ds_config import check_with_deepspeed, layout_of

# section, its keys, and the message; each with ZeRO-1 in fp16
TYPOS: list[tuple[str, dict[str, Any], str]] = [
    ("zero_optimization", {"overlap_com": True}, "zero_optimization.overlap_com: Extra inputs are not permitted"),
    ("zero_optimization", {"reduce_bucket_size": "x"}, "zero_optimization.reduce_bucket_size: Input should be"),
    ("fp16", {"hystersis": 1}, "fp16.hystersis: Extra inputs are not permitted"),
    ("", {"gradient_allreduce_op": "median"}, "median"),
    ("", {"zero_optimisation": {"stage": 2}}, "zero_optimisation is no key of it; did you mean zero_optimization?"),
    ("", {"foo": 3}, "foo is no key of it"),
]


def trial() -> None:
    for path in (ROOT / "ds_configs").glob("*.json"):
        for precision in ("fp32", "bf16", "fp16"):
            check_with_deepspeed(layout_of(recipe_of(f"{path.stem}_{precision}"), 2))
    known = {"flops_profiler": {"enabled": False}, "csv_monitor": {"enabled": False}, "memory_breakdown": False,
             "aio": {}, "tensor_parallel": {}, "seq_parallel_communication_data_type": "fp32"}
    layout = layout_of(recipe_of("zero1_fp32"), 1)
    assert layout.config is not None
    layout.config.update(known)
    check_with_deepspeed(layout)
    for section, keys, expected in TYPOS:
        layout = layout_of(recipe_of("zero1_fp16"), 1)
        assert layout.config is not None
        (layout.config[section] if section else layout.config).update(keys)
        try:
            check_with_deepspeed(layout)
        except UserError as error:
            message = str(error)
        assert "zero1.json is rejected by DeepSpeed:\n  " in message and expected in message, message
        assert message.count("\n") == 1 and "Traceback" not in message


def test_deepspeeds_faults_become_a_message(warm: Warm) -> None:
    warm.run(1, "test_ds_refusals:trial")
