"""How often a test of significance calls equal systems different: at p < 0.05 it should be 5 % of all pairs."""

from __future__ import annotations

import random
from pathlib import Path

from deepnmt.config.choices import METRICS
from deepnmt.data.text import read_lines
from deepnmt.errors import UserError
from deepnmt.evaluate.metrics import EvaluationSet, compare

DROPPED = 0.12  # of a system's words
LEVEL = 0.05


def count_stars(text: Path, pairs: int, sentences: int, metric: str) -> str:
    """The share of pairs of equal systems with p < 0.05, by both tests of `evaluate.metrics.Comparison`, as text.

    A pair has test sentences of its own, drawn from the text. They are the references, and each system has them with
    `DROPPED` of the words left out, drawn for itself.

    Raises:
        UserError: the text has fewer sentences, or there is no such metric.
    """
    if metric not in METRICS:
        raise UserError(f"--metric is {metric!r}, must be one of {', '.join(METRICS)}")
    if not text.is_file():
        raise UserError(f"there is no text file {text}; give one with a sentence a line")
    lines = [line for line in read_lines(text) if line.strip()]
    if len(lines) < sentences:
        raise UserError(f"{text} has {len(lines)} sentences, but --sentences is {sentences}; set it lower")
    stars = [0, 0]
    for pair in range(pairs):
        draw = random.Random(pair)
        references = draw.sample(lines, sentences)
        systems = {name: [_damaged(line, draw) for line in references] for name in ("one", "other")}
        found, = compare(systems, EvaluationSet("equal", references, [references]), "en", [metric])
        stars[0] += found.p_value < LEVEL
        stars[1] += found.sacrebleu_p_value < LEVEL
    own, bootstrap = (f"{100 * count / pairs:.1f} %" for count in stars)
    return (f"{pairs:,} pairs of equal systems on {sentences:,} sentences, {METRICS[metric].line}: p < {LEVEL} "
            f"in {own} by approximate randomization, in {bootstrap} by SacreBLEU's paired bootstrap")


def _damaged(line: str, draw: random.Random) -> str:
    return " ".join(word for word in line.split() if draw.random() >= DROPPED)
