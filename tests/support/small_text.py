"""A small text with a structure to learn, and recipes for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from deepnmt.config import Recipe, check_recipe

ROOT = Path(__file__).resolve().parents[2]
NOUNS, VERBS = ("dog", "cat", "bird", "child", "king"), ("sees", "likes", "follows", "calls")


def sentences(count: int, seed: int) -> list[str]:
    """Sentences whose second noun follows from the first noun and the verb."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        noun, verb = draw.randrange(5), draw.randrange(4)
        lines.append(f"the {NOUNS[noun]} {VERBS[verb]} the {NOUNS[(noun + verb + 1) % 5]} .")
    return lines


def write_texts(folder: Path) -> None:
    """train.txt, valid.txt, test.txt, a document of five lines after the other."""
    for number, (name, count) in enumerate((("train", 400), ("valid", 60), ("test", 60))):
        lines = sentences(count, number)
        documents = ["\n".join(lines[at : at + 5]) for at in range(0, count, 5)]
        (folder / f"{name}.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")


def tree(folder: Path, **changes: Any) -> dict[str, Any]:
    """A recipe for these texts; `changes` are updates of its sections."""
    made: dict[str, Any] = {
        "run": str(folder / "run"), "seed": 3, "task": "language_model",
        "data": {"folder": str(folder / "data"), "train": [str(folder / "train.txt")],
                 "valid": [str(folder / "valid.txt")], "test": {"held": [str(folder / "test.txt")]}, "block": 24},
        "vocab": {"kind": "word", "size": 15},
        "batch": {"tokens": 240},
        "model": {"width": 16, "heads": 2, "ffn": 32, "dropout": 0.1, "max_length": 48,
                  "encoder": None, "decoder": {"block": "pre_ln", "layers": 2}},
        "optimizer": {"lr": 0.01}, "schedule": {"name": "constant", "warmup": 0},
        "train": {"updates": 12, "log_every": 1, "validate_every": 6, "save_every": 6},
        "parallel": {"ds_config": None, "threads": 1}, "average_last": 1,
    }
    for section, values in changes.items():
        made[section] = {**made.get(section, {}), **values} if isinstance(values, dict) else values
    return made


def recipe(folder: Path, **changes: Any) -> Recipe:
    """The same, checked."""
    return check_recipe(tree(folder, **changes), "test")
