"""Recipes of this task have no text."""

from __future__ import annotations

from collections.abc import Iterator

from deepnmt.config import Recipe, Section
from deepnmt.config.fields import Fault


class Walks(Section):
    """The data, which are made when they are read."""

    folder: str
    """A name for them."""


class WalksRecipe(Recipe):
    data: Walks
    """The walks."""

    def faults(self) -> Iterator[Fault]:
        if self.data.folder == "nowhere":
            yield Fault(("data.folder",), "data.folder: walks lead somewhere; give another name")


RECIPE = WalksRecipe
