"""What fairseq and `datasets` do with a text, run by the Python in whose environment they are; see `peers`.

`python in_peer.py JOB ARGUMENTS`. Nothing of deepnmt is imported, as it is not there.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

STRIDE = 10_000_000  # sentences that are made up at a time


def encode(vocabulary: str, *files: str) -> None:
    """Writes each file X as X.pieces: its lines in the vocabulary's pieces, a space between them."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=vocabulary)
    for name in files:
        with open(name, encoding="utf-8") as lines, open(f"{name}.pieces", "w", encoding="utf-8") as out:
            for line in lines:
                out.write(" ".join(model.encode(line.rstrip("\n"), out_type=str)) + "\n")


def datasets(vocabulary: str, workers: str, folder: str, source: str, target: str) -> None:
    """Reads two files with `datasets`, maps them to pieces and saves the columns."""
    import datasets as library
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=vocabulary)
    cache = f"{folder}.cache"
    sides = [library.load_dataset("text", data_files=file, split="train", cache_dir=cache, sample_by="line")
             for file in (source, target)]
    both = library.concatenate_datasets([sides[0].rename_column("text", "src"), sides[1].rename_column("text", "trg")],
                                        axis=1)

    def to_pieces(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {side: [[*ids, 2] for ids in model.encode(rows[side])] for side in ("src", "trg")}

    kind = library.Features({side: library.List(library.Value("uint16")) for side in ("src", "trg")})
    found = both.map(to_pieces, batched=True, num_proc=int(workers) if workers != "1" else None, features=kind,
                     load_from_cache_file=False)
    found.save_to_disk(folder)


def fairseq_start(prefix: str, pairs: str, tokens: str) -> None:
    """Prints what fairseq takes from opening its data to the first micro-batch: of made-up sentences, see `made_up`."""
    import numpy
    import torch
    from fairseq.data import Dictionary, LanguagePairDataset, data_utils, iterators

    torch.set_num_threads(1)
    begun = time.process_time()
    words = Dictionary()
    for number in range(8000):
        words.add_symbol(f"w{number}")
    sides = [data_utils.load_indexed_dataset(f"{prefix}.{side}", words, "mmap") for side in ("src", "trg")]
    data = LanguagePairDataset(sides[0], sides[0].sizes, words, sides[1], sides[1].sizes, words)
    opened = time.process_time()
    with data_utils.numpy_seed(1):
        order = data.ordered_indices()
    batches = data.batch_by_size(order, max_tokens=int(tokens))
    batches = iterators.EpochBatchIterator(data, data.collater, batches, seed=1)
    next(batches.next_epoch_itr(shuffle=True))
    planned = time.process_time()
    assert isinstance(order, numpy.ndarray) and len(order) == int(pairs)
    print(json.dumps({"open": opened - begun, "first": planned - begun, **memory()}))


def datasets_start(folder: str, pairs: str) -> None:
    """Prints what `datasets` takes from opening a saved text to the first rows of a shuffled epoch."""
    import datasets as library

    begun = time.process_time()
    text = library.load_from_disk(folder)
    opened = time.process_time()
    rows = text.shuffle(seed=1)[:64]
    assert len(rows["src"]) == 64 and len(text) == int(pairs)
    print(json.dumps({"open": opened - begun, "first": time.process_time() - begun, **memory()}))


def made_up(prefix: str, pairs: str, pieces: str) -> None:
    """Writes what fairseq needs to open `pairs` sentences a side, of random lengths; their tokens take no room.

    The form is that of fairseq's mapped index: a head, then lengths (int32) and places (int64).
    """
    import numpy

    count = int(pairs)
    for number, side in enumerate(("src", "trg")):
        draw = numpy.random.Generator(numpy.random.PCG64(number))
        with open(f"{prefix}.{side}.idx", "wb") as index:
            index.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", 8) + struct.pack("<Q", count))
            total = 0
            for part in range(0, count, STRIDE):
                size = min(STRIDE, count - part)
                drawn = draw.lognormal(numpy.log(float(pieces)) - 0.18, 0.6, size)
                lengths = numpy.clip(drawn, 1, 200).astype(numpy.int32) + 1
                index.write(lengths.tobytes())
            index.flush()
            lengths = numpy.memmap(f"{prefix}.{side}.idx", numpy.int32, "r", 26, (count,))
            for part in range(0, count, STRIDE):
                ends = total + numpy.cumsum(lengths[part:part + STRIDE], dtype=numpy.int64)
                places = 2 * numpy.concatenate([[total], ends[:-1]])
                total = int(ends[-1])
                index.write(places.astype(numpy.int64).tobytes())
        with open(f"{prefix}.{side}.bin", "wb") as tokens:
            tokens.truncate(2 * total)


def memory() -> dict[str, int]:
    """Of this process, in MiB."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return {name: int(status[name].split()[0]) // 1024 for name in ("VmRSS", "RssAnon", "VmHWM")}


JOBS: dict[str, Any] = {"encode": encode, "datasets": datasets, "fairseq-start": fairseq_start,
                        "datasets-start": datasets_start, "made-up": made_up}

if __name__ == "__main__":
    JOBS[sys.argv[1]](*sys.argv[2:])
