"""Converts a trained model into another form.

An exporter takes the recipe of a run, a checkpoint (None: the run's average, else its newest) and the output folder
(None: one in the run folder). It returns a line that describes what it wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deepnmt.config import Recipe
from deepnmt.export.post_ln import fold_run

EXPORTERS: dict[str, Callable[[Recipe, str | Path | None, str | Path | None], str]] = {
    "post_ln": fold_run,
}
