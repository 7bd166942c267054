"""Labels for texts, and the scores of several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from deepnmt.config import with_settings
from deepnmt.decode.formats import open_output
from deepnmt.decode.translate import check_files
from deepnmt.errors import UserError
from deepnmt.files import read_log, table, write_json
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.classify.data import read_rows, segment
from deepnmt.tasks.classify.metrics import count, interval, scores
from deepnmt.tasks.classify.model import Classifier, build_of
from deepnmt.tasks.classify.settings import ClassifyRecipe
from deepnmt.training.encoders import load_encoder
from deepnmt.training.status import FINISHED
from deepnmt.training.trainer import train

FIGURES = ("accuracy", "f1", "matthews")
BATCH = 64  # examples at a time


def require_classifier(recipe: Any) -> ClassifyRecipe:
    """The recipe. Raises `UserError` if it is of another task."""
    if not isinstance(recipe, ClassifyRecipe):
        raise UserError(f"there is no classifier in {recipe.run}: its task is {recipe.task}; give a recipe or a run of "
                        "task: classify")
    return recipe


def classify_file(run: str | Path, source: str, target: str, device: torch.device, score: bool = False) -> str | None:
    """Writes a line for each of a file's: its label, and the probability of every label, separated by tabs, in the
    order of `data.labels`. The file is there whole or not at all.

    Args:
        run: a run's folder or a checkpoint.
        source: a file with the columns of the recipe's `data.columns`, of which the label may be missing unless it is
            to be scored.
        target: the file to write; - for standard output.
        score: whether to compare with the labels in the file.

    Returns:
        The scores as text, if asked for.

    Raises:
        UserError: see `check_files`, `read_rows` and `segment`; or there is no such model.
    """
    if not Path(source).is_file():  # so also "-", of which `check_files` thinks that it is read
        raise UserError(f"there is no input file {source}; give one of lines with tabs, or of JSON lines (.jsonl)")
    output = check_files([source], target, Ranks.alone())  # no other process reads or writes
    model, trained, vocab = load_encoder(Path(run), lambda recipe, size: build_of(require_classifier(recipe), size))
    recipe = cast(ClassifyRecipe, trained)
    examples = segment(recipe, vocab, read_rows(recipe, [source], score), source)
    model = model.to(device)
    logits = torch.empty(len(examples), len(recipe.data.labels))
    with torch.inference_mode():
        for rows in examples.plan(BATCH):
            logits[torch.from_numpy(rows)] = cast(Classifier, model).logits(examples.batch(rows, 0, device)).cpu()
    with open_output(output) as stream:
        for label, row in zip(logits.argmax(1).tolist(), logits.softmax(1).tolist(), strict=True):
            stream.write("\t".join([recipe.data.labels[label], *(f"{p:.4f}" for p in row)]) + "\n")
    if not score:
        return None
    figures = scores(count(examples.labels, logits.argmax(1).numpy(), len(recipe.data.labels)))
    return f"{len(examples):,} examples: " + ", ".join(f"{name} {figures[name]:.4f}" for name in FIGURES)


def train_seeds(recipe: ClassifyRecipe, seeds: list[int], ranks: Ranks) -> int:
    """Trains a classifier with each seed, into RUN/seed-N, or resumes it; then prints the scores of each at its last
    validation, their mean and the 95 % interval, and writes them into RUN/seeds.json. Collective.

    Returns:
        The exit code of training: not 0 if it was stopped, and the same command resumes.
    """
    by_seed: dict[int, dict[str, float]] = {}
    for seed in seeds:
        run = str(Path(recipe.run) / f"seed-{seed}")
        code = train(with_settings(recipe, {"seed": seed, "run": run}), ranks)
        if code != FINISHED:
            return code
        if ranks.first:
            last = [line for line in read_log(Path(run) / "log.jsonl") if line["type"] == "valid"][-1]
            by_seed[seed] = {name: last[name] for name in ("loss", *FIGURES)}
    if ranks.first:
        means: dict[str, float] = {}
        halves: dict[str, float] = {}
        for name in FIGURES:
            means[name], halves[name] = interval([figures[name] for figures in by_seed.values()])
        rows = [["seed", *FIGURES]]
        for seed, figures in by_seed.items():
            rows.append([str(seed), *(f"{figures[name]:.4f}" for name in FIGURES)])
        rows.append(["mean", *(f"{means[name]:.4f} ± {halves[name]:.4f}" for name in FIGURES)])
        print(table(rows, left=1))
        write_json(Path(recipe.run) / "seeds.json", {"seeds": by_seed, "mean": means, "interval_95": halves})
    return FINISHED
