"""Killed at random moments, in the middle of updates, validations and saves: a run loses nothing but time.

One run, with frozen parts and a running average of its weights, is killed again and again until it ends, in each
layout; every loss, every validation, the final weights, moments and averages equal, bit for bit, those of an
uninterrupted run. Several processes save in shards; in tests/checkpoint/test_faults_of_saves.py each of them is killed
at every write. Three moments of 16 updates in each layout; seven of 60 if DEEPNMT_LONG is set. Then the run is killed
before every second of the first 30 changes of files after a start, with the local engine; if DEEPNMT_LONG is set,
before every one, and in the other layouts too.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from kills import kill_before
from run_files import records
from tiny_engines import options as layout_options
from torch import equal
from warm import Warm, train

from deepnmt.checkpoint.checkpoint import moments_in, newest_checkpoint, update_of, weights_in
from deepnmt.processes import heartbeat

LONG = bool(os.environ.get("DEEPNMT_LONG"))
UPDATES, SAVE_EVERY, VALIDATE_EVERY, KILLS = (60, 4, 7, 7) if LONG else (16, 3, 4, 3)
# name: processes, layout, pipeline stages, settings. A new layout is one more row, and may be a slow one.
LAYOUTS: dict[str, tuple[int, str, int, tuple[str, ...]]] = {
    "local": (1, "local", 0, ()),
    "zero1-2": (2, "zero1_fp32", 0, ()),
    "zero3-2": (2, "zero3_fp32", 0, ()),
    # a pipeline, in which several streams have shares that grow with the updates
    "streams": (2, "zero1_fp32", 2, ("model.encoder.block=siamese", "model.decoder.block=mhc", "model.decoder.ramp=6")),
}
SLOW = ("zero3-2", "streams")


def saves(run: Path) -> set[Path]:
    """Folders being written, or left half-written by an earlier kill."""
    return set((run / "checkpoints").glob(".tmp-*"))


def train_until(ranks: str, kind: str, count: str, seconds: str, *arguments: str) -> int:
    """Runs on each rank: `deepnmt train`. These `ranks` are killed so many seconds after they begin, beyond the first
    `count` updates, what is of that kind: by their own alarm, which nobody handles. It is as sudden as kill -9, and
    comes in time whoever has the cores."""
    begun, begin = Counter[str](), heartbeat.begin

    def begin_and_die(what: str) -> None:
        begun[what] += 1
        begin(what)
        if what == kind and begun[heartbeat.UPDATE] > int(count) and not signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, float(seconds))

    if os.environ["RANK"] in ranks:
        heartbeat.begin = begin_and_die
    return train(*arguments)


def strike(warm: Warm, world: int, kind: str, count: int, draw: random.Random, *words: str) -> None:
    """Starts the run and kills one of its processes, or all, at a moment of that kind."""
    everyone = "".join(map(str, range(world)))
    ranks = draw.choice([everyone[:1], everyone[-1:], everyone])
    warm.start(world, "test_kill:train_until", ranks, kind, count, 1e-6 + draw.random() * 0.03, *words)
    codes = warm.wait(180)
    assert -signal.SIGALRM in codes and 0 not in codes, f"{ranks}, {kind}, {count}: {codes}\n{warm.said()}"


@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LAYOUTS])
def test_killed_at_random_moments(layout: str, prepared: Path, tmp_path: Path, warm: Warm) -> None:
    world, name, stages, settings = LAYOUTS[layout]
    recipe, whole, broken = str(prepared / "recipe.yaml"), tmp_path / "whole", tmp_path / "broken"
    options = (*layout_options(name, stages), *settings, f"train.updates={UPDATES}",
               f"train.checkpoint_form={'shards' if world > 1 else 'auto'}", f"train.save_every={SAVE_EVERY}",
               f"train.validate_every={VALIDATE_EVERY}", "train.keep_last=2", "train.ema=0.9",
               "train.freeze=[encoder.layers.0]", "optimizer.lr_factors={decoder: 0.5}",
               "optimizer.lr_factors_until=6")
    warm.train(world, recipe, f"run={whole}", *options)
    assert warm.wait() == [0] * world, warm.said()
    seed = time.time_ns()
    draw = random.Random(seed)
    print(f"seed {seed}")  # shown if the test fails
    kinds = [(heartbeat.UPDATE, heartbeat.VALIDATION, heartbeat.SAVE)[number % 3] for number in range(KILLS)]
    draw.shuffle(kinds)
    for number, kind in enumerate(kinds):
        goal = 1 + number * (UPDATES - 8) // KILLS + draw.randrange(3)
        there = (broken / "checkpoints").exists()
        saved = newest_checkpoint(broken / "checkpoints", lambda why: None) if there else None
        done = 0 if saved is None else update_of(saved)
        strike(warm, world, kind, max(0, goal - done), draw, recipe, f"run={broken}", *options)
    warm.train(world, recipe, f"run={broken}", *options)
    assert warm.wait() == [0] * world, warm.said()
    compare(whole, broken)
    assert not saves(broken), "what a killed save left is swept away"


CHANGES = range(1, 31, 1 if LONG else 2)  # before which of them after a start it is killed; a save makes about 12


def train_to(number: str, checkpoints: str, *arguments: str) -> int:
    """Runs on each rank: `deepnmt train`, whose first process is killed before that change in the folder."""
    if os.environ["RANK"] == "0":
        kill_before(int(number), checkpoints)
    return train(*arguments)


def make_way(checkpoints: Path, number: int) -> None:
    """Damages checkpoints, two times of three, so that the next save does what not every save does."""
    newest = newest_checkpoint(checkpoints, lambda why: None) if checkpoints.exists() else None
    if newest is not None and number % 3 == 1:  # the newest is damaged, computed again and replaced
        newest.joinpath("state.json").write_bytes(b"{")
    if newest is not None and number % 3 == 2:  # a later one is damaged and in the way
        later = shutil.copytree(newest, checkpoints / f"update-{update_of(newest) + 9:08d}", dirs_exist_ok=True)
        later.joinpath("manifest.json").write_bytes(b"{")


@pytest.mark.parametrize("layout", LAYOUTS if LONG else ["local"])
def test_killed_before_every_change_of_a_save(layout: str, prepared: Path, tmp_path: Path, warm: Warm) -> None:
    world, name, stages, settings = LAYOUTS[layout]
    recipe, whole, broken = str(prepared / "recipe.yaml"), tmp_path / "whole", tmp_path / "broken"
    updates = sum(CHANGES) // 10
    options = (*layout_options(name, stages), *settings, f"train.updates={updates}",
               "train.save_every=1", "train.validate_every=100", "train.keep_last=2", "train.keep_best=0")
    warm.train(world, recipe, f"run={whole}", *options)
    assert warm.wait() == [0] * world, warm.said()
    for number in CHANGES:
        make_way(broken / "checkpoints", number)
        warm.start(world, "test_kill:train_to", number, broken / "checkpoints", recipe, f"run={broken}", *options)
        codes = warm.wait()
        assert codes[0] == -9 and 0 not in codes, f"{number}: {codes}\n{warm.said()}"
    warm.train(world, recipe, f"run={broken}", *options)
    assert warm.wait() == [0] * world, warm.said()
    compare(whole, broken, updates)
    assert not saves(broken), "what a killed save left is swept away"


def compare(whole: Path, broken: Path, updates: int = UPDATES) -> None:
    """Compares everything that two runs computed."""
    for kind, keys in (("train", ("update", "loss", "gradient_norm", "learning_rate", "target_tokens")),
                       ("valid", ("update", "loss", "bleu", "best"))):
        ours, theirs = ([[r[key] for key in keys] for r in records(run, kind)] for run in (broken, whole))
        assert ours == theirs and ours, kind
    name = f"checkpoints/update-{updates:08d}"
    for read in (weights_in, moments_in):
        ours, theirs = (dict(read(run / name)) for run in (broken, whole))
        assert ours.keys() == theirs.keys() and all(equal(ours[k], theirs[k]) for k in theirs), read
