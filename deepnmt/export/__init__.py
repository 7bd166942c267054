"""A trained model in another form.

An exporter takes a recipe, whose run is exported, a checkpoint (None: the run's average, else its newest) and the
folder to write (None: one in the run); it returns a line that says what was written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deepnmt.config import Recipe
from deepnmt.export.post_ln import fold_run

EXPORTERS: dict[str, Callable[[Recipe, str | Path | None, str | Path | None], str]] = {
    "post_ln": fold_run,
}
