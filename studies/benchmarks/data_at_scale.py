"""How long training waits for its data, and what they take, by the number of pairs: on made-up shards.

The offsets of a made-up shard are those of random sentences; its tokens are zeros that take no room on the disk.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepnmt import folders
from deepnmt.config import Cleaning, Corpus, Vocab
from deepnmt.data.arrays import KIND, OFFSET
from deepnmt.data.batching import WINDOW, Position, Stream, plan_epoch, plan_updates, share_out
from deepnmt.data.filters import Rules, apply_text_filters
from deepnmt.data.mixing import Mixture
from deepnmt.data.prepared import PreparedData, publish
from deepnmt.data.shards import FORMAT, SHARD, Entry, ShardedText, content_of, shard_name
from deepnmt.data.text import read_pairs
from deepnmt.data.vocab import train_vocabulary
from deepnmt.data.windows import Windows
from deepnmt.files import markdown_table

PIECES = 22.0  # a sentence has on average, as in the corpora that prepare was measured on
TOKENS, SEED = 4096, 1
DIFFERENT = 10  # shards; the others are links to them
SHARE = 64  # micro-batches of an update, one of which is this process's
BEGINS = ("start", "middle", "end of an epoch")
UPDATES, PAUSE = 180, 0.5  # before the end of a window, of so many seconds each, as if there were a model


def made_up(folder: Path, pairs: int, shard_pairs: int, window_pairs: int, only_read: bool) -> None:
    """Writes prepared data of so many pairs in shards; with `only_read`, of the shards that `measure` does not read
    the manifest alone."""
    count = pairs // shard_pairs
    empty = {"": [Entry(pairs=shard_pairs, src_tokens=0, trg_tokens=0, key="", content="")] * count}
    windows = Windows(ShardedText(folder, empty, 0, {}), Mixture([pairs], [1.0]), SEED, window_pairs)
    wanted = {shard for epoch, number in read_windows(windows.windows(0)) for _, shard, _, _ in
              windows.ranges(epoch, number)} if only_read else range(count)
    with folders.new_folder(folder, KIND) as made:
        entries: list[Entry] = []
        first: list[int] = []  # the shards that were made; the others are links to them
        for number in range(count):
            shard = made / shard_name("", number)
            if number not in wanted:
                entries.append(Entry(pairs=shard_pairs, src_tokens=0, trg_tokens=0, key="", content="0" * 64))
            elif len(first) < DIFFERENT:
                entries.append(_shard(shard, number, shard_pairs))
                first.append(number)
            else:
                entries.append(entries[first[number % DIFFERENT]])
                shard.mkdir()
                for file in (made / shard_name("", first[number % DIFFERENT])).iterdir():
                    os.link(file, shard / file.name)
        vocabulary = train_vocabulary(["some words of a text"] * 50, Vocab(size=16))
        for side in ("src", "trg"):
            (made / f"{side}.spm").write_bytes(vocabulary)
        publish(made, folder, {"settings": {}, "inputs": {}, "vocab": {}, "splits": {"train": {"variants": 0}},
                               "shards": {"": [entry.model_dump() for entry in entries]}})


def _shard(folder: Path, number: int, pairs: int) -> Entry:
    draw = np.random.Generator(np.random.PCG64(number))
    src = np.clip(draw.lognormal(np.log(PIECES) - 0.18, 0.6, pairs), 1, 200).astype(np.int64)
    trg = np.clip(src * draw.lognormal(0, 0.2, pairs), 1, 200).astype(np.int64)
    with folders.new_folder(folder, KIND) as made:
        for side, lengths in (("src", src), ("trg", trg)):
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(OFFSET)
            (made / f"train.{side}.offsets").write_bytes(offsets.tobytes())
            with open(made / f"train.{side}.tokens", "wb") as stream:
                stream.truncate(2 * int(offsets[-1]))
        folders.publish(made, folder, folders.entries_of(made, folder, SHARD), {"format": FORMAT, "version": 1}, SHARD)
    manifest = folders.read_manifest(folder, SHARD)
    return Entry(pairs=pairs, src_tokens=int(src.sum()), trg_tokens=int(trg.sum()), key="",
                 content=content_of(manifest))


def read_windows(count: int) -> list[tuple[int, int]]:
    """The windows that `measure` reads: at the start, in the middle, and over the end of an epoch."""
    middle = count // 2
    return [(0, 0), (0, 1), (0, 2), (0, middle), (0, middle + 1), (0, middle + 2), (0, count - 1), (1, 0), (1, 1)]


def measure(folder: Path, window_pairs: int, begins: Sequence[str] = BEGINS) -> list[dict[str, Any]]:
    """In a process each: start, resume in the middle, and go through the end of an epoch."""
    found = []
    for begin in begins:
        words = [sys.executable, "-m", "studies.benchmarks.data_at_scale", str(folder), str(window_pairs), begin]
        job = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        found.append({"begin": begin, **json.loads(job.stdout)})
    return found


def _train(folder: Path, window_pairs: int, begin: str) -> dict[str, Any]:
    """Takes updates from a position on, without a model, over the end of its window."""
    import torch

    import deepnmt.training.trainer  # noqa: F401 (what a training process imports)

    imported = time.process_time()
    data = PreparedData.open(folder)
    data.verify_as_read()
    text = data.train
    assert isinstance(text, ShardedText)
    windows = Windows(text, Mixture([len(text)], [1.0]), SEED, window_pairs)
    stream = Stream(windows, TOKENS, SEED)
    device = torch.device("cpu")
    window = {"start": 0, "middle": windows.windows(0) // 2}.get(begin, windows.windows(0) - 1)
    position = Position(0, window * WINDOW + 1000 * (window > 0))
    position = stream.update(position, SHARE, 0, SHARE, device).next
    first = time.process_time()
    waits: list[float] = []
    works: list[float] = []
    size = len(stream.plan(0, window))
    position = Position(0, window * WINDOW + max(0, size - UPDATES * SHARE))
    while (position.epoch, position.index // WINDOW) == (0, window):
        before, worked = time.monotonic(), time.thread_time()
        position = stream.update(position, SHARE, 0, SHARE, device).next
        waits.append(time.monotonic() - before)
        works.append(time.thread_time() - worked)
        time.sleep(PAUSE)
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    memory = {name: int(status[name].split()[0]) // 1024 for name in ("VmRSS", "RssAnon", "VmHWM")}
    return {"pairs": len(text), "windows": windows.windows(0), "imports": imported, "first": first - imported,
            "longest_wait": max(waits), "longest_work": max(works), "updates": len(waits),
            "waste": stream.waste(position.epoch), **memory}


def padding(folder: Path, tokens: int) -> str:
    """A Markdown table of the padding of the first epoch of a text in one piece, as it is and in windows."""
    text = PreparedData.open(folder).split("train")
    rows = [["pairs", "windows", "pairs of a window", "padding", "points more", "micro-batches"]]
    whole = 0.0
    for count in (1, 2, 4, 8, 16):
        windows = Windows(OnePiece(len(text)), Mixture([len(text)], [1.0]), SEED, -(-len(text) // count))
        plans = []
        for number in range(count):
            chosen = np.concatenate([np.arange(part.start, part.stop) for part in windows.ranges(0, number)])
            plans.append(plan_epoch(text.src_lengths[chosen], text.trg_lengths[chosen], tokens, SEED, 0, number))
        waste = sum(plan.waste for plan in plans) / count
        whole = whole or waste
        rows.append([f"{len(text):,}", str(count), f"{len(text) // count:,}", f"{waste:.2%}",
                     f"{100 * (waste - whole):+.2f}", f"{sum(map(len, plans)):,}"])
    return markdown_table(rows)


def cleaning(file: Path, pairs: int) -> str:
    """A Markdown table of the CPU time that each rule of cleaning takes, of the first pairs of a table."""
    rows = [(src, trg, 1.0) for src, trg in itertools.islice(read_pairs(Corpus(tsv=[str(file)])), pairs)]
    each: dict[str, dict[str, Any]] = {
        "none": {}, "scripts": {"scripts": ["Latin", "Latin"]}, "same_digits": {"same_digits": True},
        "max_length_ratio": {"max_length_ratio": 4.0}, "min_letters": {"min_letters": 0.5},
        "drop_same_letters": {"drop_same_letters": True}, "min_score": {"score": 3, "min_score": 0.5},
        "drop_near_duplicates": {"drop_near_duplicates": True}}
    each["all"] = {name: value for settings in each.values() for name, value in settings.items()}
    found: list[tuple[str, float]] = []
    for name, settings in each.items():
        begin = time.process_time()
        apply_text_filters(rows, Rules(clean=Cleaning(**settings), near="drop_near_duplicates" in settings))
        found.append((name, (time.process_time() - begin) / len(rows) * 1e6))
    return markdown_table([["rule", "µs a pair", "more than without"],
                           *[[name, f"{taken:.1f}", f"{taken - found[0][1]:.1f}"] for name, taken in found]])


def fixed_updates(folder: Path, tokens: int, update_tokens: int) -> str:
    """A Markdown table of the updates of a fixed size of a text in one piece: their target tokens, and their padding
    by the number of processes."""
    text = PreparedData.open(folder).split("train")
    sides = text.src_lengths, text.trg_lengths
    plan = plan_updates(*sides, update_tokens, SEED, 0)
    updates = [plan.update(number) for number in range(plan.updates)]
    sizes = [int(text.trg_lengths[np.concatenate(groups)].sum()) for groups in updates]
    rows = [["pairs", "updates", "target tokens of one, mean (sd)", "processes", "micro-batches of each", "padding"]]
    for world in (1, 2, 3, 4, 8, 16):
        shared = [share_out(groups, *sides, tokens, world) for groups in updates]
        rows.append([f"{len(text):,}", str(plan.updates), f"{np.mean(sizes):,.0f} ({np.std(sizes):,.0f})", str(world),
                     f"{np.mean([each for _, each in shared]):.1f}",
                     f"{np.mean([share.waste for share, _ in shared]):.2%}"])
    return markdown_table(rows)


class OnePiece(ShardedText):
    """A text in one piece, as if it were one shard."""

    def __init__(self, pairs: int) -> None:
        self._pairs = pairs

    @property
    def sizes(self) -> dict[str, list[int]]:
        return {"": [self._pairs]}


def as_table(rows: list[dict[str, Any]]) -> str:
    """The figures as a Markdown table."""
    head = ["pairs", "begins at", "CPU s to the first micro-batch (imports)", "an update waits at most, s",
            "and works, CPU s", "memory, MiB", "of it its own", "peak"]
    body = [[f"{row['pairs']:,}", row["begin"], f"{row['first']:.1f} ({row['imports']:.1f})",
             f"{row['longest_wait']:.2f}", f"{row['longest_work']:.2f}", f"{row['VmRSS']:,}", f"{row['RssAnon']:,}",
             f"{row['VmHWM']:,}"] for row in rows]
    return markdown_table([head, *body])


if __name__ == "__main__":
    print(json.dumps(_train(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
