"""Preparing a text, and starting to train on it, beside fairseq and `datasets`: on the same text, in one run.

Every program encodes with the same SentencePiece vocabulary, which is there beforehand. deepnmt and `datasets` encode
as they prepare. `fairseq-preprocess` gets the text in pieces, which one more process has made: its row with them is
the sum of both.

CPU seconds are those of a program and all that it starts. Its start, and what else does not depend on the text, is
taken away by a second, small text. So other work on the machine moves them little.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from deepnmt.config import Vocab
from deepnmt.data.vocab import train_vocabulary
from deepnmt.errors import UserError
from deepnmt.files import markdown_table

SMALL = 2000  # pairs of the small text
PEER = Path(__file__).with_name("in_peer.py")
RECIPE = """\
run: {folder}/run
data: {{folder: {out}, src_lang: src, trg_lang: trg, workers: {workers}, filters: {{max_tokens: 1000, max_ratio: 1000}},
  train: {{src: {src}, trg: {trg}}}, valid: {{src: {valid}.src, trg: {valid}.trg}}}}
vocab: {{model: {vocabulary}}}
batch: {{tokens: 4096}}
model: {{max_length: 2000}}
train: {{updates: 1}}
"""


@dataclass(frozen=True)
class Cost:
    """What a program took: seconds of the clock, CPU seconds, the largest memory of one of its processes in MiB, and
    the bytes of what it wrote."""

    seconds: float
    cpu: float
    memory: float
    size: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.cpu + other.cpu, max(self.memory, other.memory),
                    self.size + other.size)


def cost_of(words: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> Cost:
    """Runs a program that writes a new folder, which is deleted. Raises `UserError` with its last lines if it fails."""
    log = folder.with_suffix(".log")
    started, memory = time.monotonic(), 0.0
    with log.open("w") as out:
        job = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT,
                               env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})})
        ended = 0
        while not ended:  # what the system says at the end counts this process too, which the program began as
            memory = max([memory, *_memory(job.pid)])
            time.sleep(0.1)
            ended, status, usage = os.wait4(job.pid, os.WNOHANG)
        job.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - started
    if job.returncode:
        raise UserError(f"{' '.join(words)} ended with {job.returncode}: {log.read_text()[-500:]}")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.exists() else 0
    shutil.rmtree(folder, ignore_errors=True)
    return Cost(seconds, usage.ru_utime + usage.ru_stime, memory, size)


def _memory(process: int) -> list[float]:
    """MiB of a process and of all that it has started."""
    found = []
    with suppress(psutil.NoSuchProcess):
        program = psutil.Process(process)
        for each in (program, *program.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                found.append(each.memory_info().rss / 2**20)
    return found


def prepare_speed(source: Path, target: Path, folder: Path, workers: Sequence[int], peer: Path | None) -> str:
    """A Markdown table of what preparing a text takes.

    Args:
        source, target: plain text, line by line.
        folder: for what is written meanwhile; made, and deleted at the end.
        peer: the Python of an environment with fairseq, `datasets` and SentencePiece.

    Raises:
        UserError: a program failed, or the text has no more than twice `SMALL` pairs.
    """
    folder.mkdir(parents=True)
    try:
        pairs = _texts(folder, source, target)
        rows: list[list[str]] = [["program", "workers", "pairs a CPU second", "CPU s of its start",
                                  "seconds (of the clock)", "memory of a process, MiB", "of the small text",
                                  "bytes a pair"]]
        encoded = [] if peer is None else [_encoded(folder, name, peer) for name in ("small", "all")]
        for count in workers:
            measured = {"deepnmt prepare": [_deepnmt(folder, name, count) for name in ("small", "all")]}
            if peer is not None:
                binary = [_fairseq(folder, name, count, peer) for name in ("small", "all")]
                measured["fairseq-preprocess of pieces"] = binary
                measured["encoding, then fairseq-preprocess"] = [a + b for a, b in zip(encoded, binary, strict=True)]
                measured["datasets, map"] = [_datasets(folder, name, count, peer) for name in ("small", "all")]
            for program, (small, whole) in measured.items():
                each = (whole.cpu - small.cpu) / (pairs - SMALL)
                rows.append([program, str(count), f"{1 / each:,.0f}", f"{small.cpu - SMALL * each:.1f}",
                             f"{whole.seconds:.1f}", f"{whole.memory:,.0f}", f"{small.memory:,.0f}",
                             f"{(whole.size - small.size) / (pairs - SMALL):.0f}"])
        return f"{pairs:,} pairs\n\n{markdown_table(rows)}"
    finally:
        shutil.rmtree(folder)


def _texts(folder: Path, source: Path, target: Path) -> int:
    """Writes the text as all.src and all.trg, its beginning as small.src and small.trg, and a vocabulary of it."""
    sides = [file.read_text(encoding="utf-8").splitlines() for file in (source, target)]
    pairs = [pair for pair in zip(*sides, strict=True) if all(pair)]
    if len(pairs) <= 2 * SMALL:
        raise UserError(f"{source} has {len(pairs)} pairs, of which {SMALL} are measured by themselves; give more text")
    for name, chosen in (("all", pairs), ("small", pairs[:SMALL]), ("valid", pairs[:100])):
        for number, side in enumerate(("src", "trg")):
            text = "".join(f"{pair[number]}\n" for pair in chosen)
            (folder / f"{name}.{side}").write_text(text, encoding="utf-8")
    model = train_vocabulary([side for pair in pairs[:50_000] for side in pair], Vocab(size=8000))
    (folder / "vocabulary.spm").write_bytes(model)
    return len(pairs)


def _deepnmt(folder: Path, name: str, workers: int) -> Cost:
    recipe, out = folder / f"{name}.yaml", folder / "prepared"
    recipe.write_text(RECIPE.format(folder=folder, out=out, workers=workers, src=folder / f"{name}.src",
                                    trg=folder / f"{name}.trg", valid=folder / "valid",
                                    vocabulary=folder / "vocabulary.spm"))
    return cost_of([sys.executable, "-m", "deepnmt", "prepare", str(recipe)], out)


def _encoded(folder: Path, name: str, peer: Path) -> Cost:
    files = [str(folder / f"{name}.{side}") for side in ("src", "trg")]
    return cost_of([str(peer), str(PEER), "encode", str(folder / "vocabulary.spm"), *files], folder / "encoded")


def _fairseq(folder: Path, name: str, workers: int, peer: Path) -> Cost:
    for side in ("src", "trg"):
        shutil.copy(folder / f"{name}.{side}.pieces", folder / f"pieces.{side}")
    words = folder / "words.txt"
    if not words.exists():
        found = {piece for side in ("src", "trg") for piece in (folder / f"all.{side}.pieces").read_text().split()}
        words.write_text("".join(f"{piece} 1\n" for piece in sorted(found)))
    return cost_of([str(peer.with_name("fairseq-preprocess")), "-s", "src", "-t", "trg", "--trainpref",
                    str(folder / "pieces"), "--srcdict", str(words), "--joined-dictionary", "--destdir",
                    str(folder / "binary"), "--workers", str(workers)], folder / "binary")


def _datasets(folder: Path, name: str, workers: int, peer: Path) -> Cost:
    cache = folder / "rows.cache"
    cost = cost_of([str(peer), str(PEER), "datasets", str(folder / "vocabulary.spm"), str(workers),
                    str(folder / "rows"), str(folder / f"{name}.src"), str(folder / f"{name}.trg")], folder / "rows",
                   {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")})
    shutil.rmtree(cache, ignore_errors=True)
    return cost


def start_speed(folder: Path, pairs: Sequence[int], peer: Path | None, tokens: int, pieces: float) -> str:
    """A Markdown table of what takes training to its first micro-batch, by the number of pairs, on made-up texts.

    Args:
        folder: for what is written meanwhile; made, and deleted after each number of pairs.
        peer: the Python of an environment with fairseq.
    """
    from studies.benchmarks.data_at_scale import made_up, measure

    rows = [["program", "pairs", "CPU s to the first micro-batch", "memory, MiB", "of it its own", "peak"]]
    for count in pairs:
        found: dict[str, dict[str, Any]] = {}
        shard = min(1_000_000, count)
        made_up(folder, count, shard, 2_000_000, only_read=False)
        found["deepnmt, in shards"] = measure(folder, 2_000_000, ["start"])[0]
        shutil.rmtree(folder)
        if peer is not None:
            folder.mkdir(parents=True)
            prefix = str(folder / "train")
            words = [str(peer), str(PEER)]
            subprocess.run([*words, "made-up", prefix, str(count), str(pieces)], check=True)
            job = subprocess.run([*words, "fairseq-start", prefix, str(count), str(tokens)], stdout=subprocess.PIPE,
                                 text=True)
            if job.returncode == 0:
                found["fairseq"] = json.loads(job.stdout.splitlines()[-1])
            else:
                rows.append(["fairseq", f"{count:,}", f"ended with {job.returncode}", "", "", ""])
            shutil.rmtree(folder)
        for program, figures in found.items():
            rows.append([program, f"{count:,}", f"{figures['first']:.1f}", f"{figures['VmRSS']:,}",
                         f"{figures['RssAnon']:,}", f"{figures['VmHWM']:,}"])
    return markdown_table(rows)
