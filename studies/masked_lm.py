"""Masked language models, small: which block trains without a warm-up, and what a classifier gains by such an encoder.

Xiong et al. 2020, sections 3 and 4: Pre-LN needs no warm-up, Post-LN does. Devlin et al. 2019: a classifier that begins
from a masked language model is better than one from scratch. The classifier tells sentences from the same words in
random order. Everything is made from one text; runs are folders that resume, so the same command adds what is missing.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from deepnmt.config import check_recipe
from deepnmt.data.text import read_lines
from deepnmt.errors import UserError
from deepnmt.files import read_log, table, write_text
from deepnmt.processes.process_group import processes
from deepnmt.progress import print_status
from deepnmt.tasks.classify.predict import require_classifier, train_seeds
from deepnmt.training.status import FINISHED
from deepnmt.training.task import prepare
from deepnmt.training.trainer import train

SEEDS = (1, 2, 3, 4, 5, 6)
WARMED = {"pre_ln without warm-up": ("pre_ln", 0), "post_ln without warm-up": ("post_ln", 0),
          "post_ln with warm-up": ("post_ln", 60)}
DEEP = {"width": 64, "heads": 4, "ffn": 256, "layers": 12, "lr": 4e-3, "updates": 240, "tokens": 1024}
SHALLOW = {"width": 128, "heads": 4, "ffn": 512, "layers": 2, "lr": 2e-3, "updates": 400, "tokens": 2048}
EXAMPLES = {"train": 2000, "valid": 600}  # half of them shuffled
LENGTH = 64
LONGEST = 25  # words of a sentence that is classified


def masked_recipe(folder: Path, texts: dict[str, str], name: str, sizes: dict[str, Any], block: str, warmup: int
                  ) -> dict[str, Any]:
    """A masked language model's recipe, as a tree."""
    updates = sizes["updates"]
    return {
        "run": str(folder / name), "task": "masked_lm", "seed": 1, "average_last": 1,
        "data": {"folder": str(folder / "data"), "length": LENGTH, "lowercase": True, **texts},
        "vocab": {"size": 2000}, "batch": {"tokens": sizes["tokens"]},
        "model": _model(sizes, block),
        "optimizer": {"name": "adamw", "lr": sizes["lr"], "betas": [0.9, 0.98], "weight_decay": 0.01,
                      "decay_norms_and_biases": False},
        "schedule": {"name": "linear", "warmup": warmup},
        "train": {"updates": updates, "clip": 1.0, "validate_every": updates // 4, "save_every": updates // 4,
                  "keep_last": 1},
        "parallel": {"ds_config": None, "threads": 1},
    }


def _model(sizes: dict[str, Any], block: str) -> dict[str, Any]:
    return {**{name: sizes[name] for name in ("width", "heads", "ffn")}, "max_length": LENGTH, "decoder": None,
            "encoder": {"block": block, "layers": sizes["layers"]}}


def write_examples(text: str, file: Path, count: int, skip: int) -> None:
    """Writes `count` examples: sentences of a text after the first `skip`, every second one with its words shuffled."""
    drawn, lines = random.Random(1), []
    sentences = (line.strip().lower() for line in read_lines(Path(text)))
    chosen = (line for line in sentences if 5 <= len(line.split()) <= LONGEST and "\t" not in line
              and len({*line.split()}) > 1)  # else it has one order
    for number, line in enumerate(itertools.islice(chosen, skip, skip + count)):
        words = line.split()
        if number % 2:
            while words == line.split():
                drawn.shuffle(words)
        lines.append(f"{' '.join(words)}\t{'shuffled' if number % 2 else 'right'}\n")
    if len(lines) < count:
        raise UserError(f"{text} has only {len(lines)} sentences of 5 to {LONGEST} words after the first {skip}, but "
                        f"{count} are needed; give a longer text")
    write_text(file, "".join(lines))


def classify_recipe(folder: Path, name: str, encoder: Path, begin: bool) -> dict[str, Any]:
    """A classifier's recipe: from the encoder, or from scratch with its vocabulary."""
    return {
        "run": str(folder / name), "task": "classify", "seed": 1, "average_last": 1,
        "data": {"train": str(folder / "train.tsv"), "valid": str(folder / "valid.tsv"),
                 "labels": ["right", "shuffled"], "lowercase": True, "too_long": "cut"},
        "vocab": {"model": str(encoder)}, "batch": {"sentences": 32}, "model": _model(SHALLOW, "pre_ln"),
        "optimizer": {"name": "adamw", "lr": 5e-4, "betas": [0.9, 0.98], "weight_decay": 0.01,
                      "decay_norms_and_biases": False},
        "schedule": {"name": "linear", "warmup": 0},
        "train": {"updates": 60, "clip": 1.0, "validate_every": 30, "save_every": 60, "keep_last": 1,
                  **({"init_from": str(encoder)} if begin else {})},
        "parallel": {"ds_config": None, "threads": 1},
    }


def run_study(folder: Path, text: str, valid: str) -> int:
    """Trains what is missing in `folder`, and prints both tables; returns the exit code of training."""
    texts = {"train": text, "valid": valid}
    folder.mkdir(parents=True, exist_ok=True)
    rows = [("masked language model", "first loss", "last loss", "accuracy %", "updates")]
    encoder = folder / "encoder"
    with processes(1) as ranks:
        def masked(name: str, sizes: dict[str, Any], block: str, warmup: int) -> int:
            """Trains a masked language model; returns the exit code."""
            recipe = check_recipe(masked_recipe(folder, texts, name.replace(" ", "_"), sizes, block, warmup), name)
            prepare(recipe)
            print_status(name)
            code = train(recipe, ranks)
            valids = [line for line in read_log(Path(recipe.run) / "log.jsonl") if line["type"] == "valid"]
            if code == FINISHED:
                rows.append((name, f"{valids[0]['loss']:.3f}", f"{valids[-1]['loss']:.3f}",
                             f"{100 * valids[-1]['accuracy']:.1f}", str(valids[-1]["update"])))
            return code

        if (code := masked("encoder", SHALLOW, "pre_ln", 0)) != FINISHED:
            return code
        for place, count in EXAMPLES.items():
            write_examples(texts[place], folder / f"{place}.tsv", count, 0)
        means = []
        for name, begin in (("from the encoder", True), ("from scratch", False)):
            recipe = check_recipe(classify_recipe(folder, name.replace(" ", "_"), encoder, begin), name)
            print_status(f"classifier {name}")
            if (code := train_seeds(require_classifier(recipe), list(SEEDS), ranks)) != FINISHED:
                return code
            scores = json.loads((Path(recipe.run) / "seeds.json").read_text())
            means.append((name, [each["accuracy"] for each in scores["seeds"].values()],
                          f"{100 * scores['mean']['accuracy']:.1f} ± {100 * scores['interval_95']['accuracy']:.1f}"))
        for name, (block, warmup) in WARMED.items():
            if (code := masked(name, DEEP, block, warmup)) != FINISHED:
                return code
    print(table(rows, left=1))
    head = ("classifier, six seeds", "accuracy %, mean and 95 % interval")
    print(table([head, *((name, said) for name, _, said in means)], left=1))
    (_, ours, _), (_, theirs, _) = means
    pooled = ((variance(ours) + variance(theirs)) / 2) ** 0.5
    gain = fmean(ours) - fmean(theirs)
    print(f"the encoder is worth {100 * gain:.1f} points, {gain / max(pooled, 1e-9):.1f} standard deviations of a seed")
    return FINISHED
