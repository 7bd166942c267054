"""Prepares text in shards as tasks of Dask, for those who have a cluster of it: the same steps, and the same bytes.

    python recipes/launch/prepare_with_dask.py my.yaml                          # on the cores of this machine
    python recipes/launch/prepare_with_dask.py my.yaml tcp://scheduler:8786     # on a cluster, with dask.distributed

The workers need deepnmt and the paths of the recipe. What an interrupted call has done is found again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import dask

from deepnmt.config import load_recipe
from deepnmt.data.parts import Step, Work, prepare_in_steps
from deepnmt.data.sources import Unit


def run(work: Work, units: Sequence[Unit], step: Step) -> None:
    """Takes a step for units, each as a task."""
    dask.compute(*[dask.delayed(step)(work, unit) for unit in units])


def main(file: str, scheduler: str | None = None) -> None:
    """Prepares the data of a recipe."""
    recipe = load_recipe(Path(file))
    if scheduler:
        from dask.distributed import Client

        Client(scheduler)  # which computes from here on
    else:
        dask.config.set(scheduler="processes")
    prepare_in_steps(recipe, Path(recipe.data.folder), run)


if __name__ == "__main__":
    main(*sys.argv[1:])
