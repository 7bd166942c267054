"""`deepnmt new --text`: looks at a text, holds parts out of it, and writes a recipe that says why."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from deepnmt import folders
from deepnmt.config import load_recipe
from deepnmt.data.vocab import shorter
from deepnmt.errors import UserError
from deepnmt.new import SAMPLE, TEXTS, Hardware, check_name, fitting_vocabulary, machine, write_recipe
from deepnmt.shipped import schema_of
from deepnmt.tasks.language_model.text import read_documents

_PART = 50  # lines, at most, held out together where no empty lines separate documents: neighbours are alike
_LEAST = 2 * _PART + 1  # lines


@dataclass(frozen=True)
class Choice:
    """A row of the table: what is chosen for up to `words` words on one kind of machine. `passes` over the text, but so
    many updates at least and at most."""

    words: float
    vocab: int
    width: int
    heads: int
    layers: int
    block: int
    tokens: int
    dropout: float
    rate: float
    passes: int
    updates: tuple[int, int]


TABLE: dict[Hardware, tuple[Choice, ...]] = {
    "cpu": (Choice(2e5, 2_000, 128, 4, 4, 128, 2048, 0.3, 2e-3, 20, (300, 2_000)),
            Choice(3e6, 8_000, 256, 4, 4, 256, 2048, 0.1, 1e-3, 5, (1_000, 8_000)),
            Choice(math.inf, 16_000, 256, 4, 6, 256, 4096, 0.1, 1e-3, 1, (5_000, 40_000))),
    "gpu": (Choice(3e6, 8_000, 256, 4, 6, 256, 16384, 0.3, 1e-3, 30, (1_000, 10_000)),
            Choice(1e8, 16_000, 512, 8, 12, 512, 32768, 0.1, 1e-3, 10, (5_000, 50_000)),
            Choice(math.inf, 32_000, 1024, 16, 16, 512, 65536, 0.1, 6e-4, 3, (20_000, 200_000)))}


def _parts(text: str, apart: bool, size: int) -> Iterator[list[str]]:
    """The documents of a text, or runs of so many of its lines."""
    part: list[str] = []
    for line in read_documents([Path(text)], apart):
        if line.text is not None:
            part.append(line.text)
        if line.text is None or (not apart and len(part) == size):
            yield part
            part = []
    if part:
        yield part


def new_recipe(file: Path, text: str, hardware: Hardware | None = None) -> str:
    """Writes `file`, a recipe for a text, and training, validation and test text into `data/NAME/text`; returns what
    was seen and written, and what to do next.

    Raises:
        UserError: the text cannot be read or is too short, or a file is there already or cannot be written.
    """
    check_name(file)
    folder = Path("data") / file.stem / "text"
    for path in (file, folder):
        if path.exists():
            raise UserError(f"{path} exists already; give the recipe another name, or remove it")
    lines = [line.text for line in read_documents([Path(text)], False)]
    if len(lines) < _LEAST:
        raise UserError(f"{text} has {len(lines)} lines, from which nothing can be held out; give {_LEAST} or more")
    apart = 0 < sum(not line for line in lines) < len(lines) / 2 and bool(lines[0])
    for number, (above, line) in enumerate(itertools.pairwise(lines), 2):
        if apart and not above and not line:
            raise UserError(f"{text}, line {number}: two empty lines follow each other, but one separates documents; "
                            "leave one of them")
    size = min(_PART, len(lines) // 20)
    parts = list(_parts(text, apart, size))
    if len(parts) < 3:
        raise UserError(f"{text} has {len(parts)} documents, too few to hold some out; give more text")
    words = dict.fromkeys(("train", "valid", "test"), 0)
    learned: list[str] = []  # lines that a vocabulary is tried on
    with folders.whole_folder(folder, TEXTS) as place:
        with ExitStack() as opened:
            files = {name: opened.enter_context(open(place / f"{name}.txt", "w", encoding="utf-8")) for name in words}
            for number, part in enumerate(parts):
                drawn = hashlib.sha256(f"{number} {part[0]}".encode()).digest()[0]  # of 256
                name = "train"
                if drawn < 4:
                    name = "valid"
                elif drawn < 8:
                    name = "test"
                if number < len(words):  # each has one at least
                    name = ("valid", "test", "train")[number]
                files[name].write("\n".join(part) + ("\n\n" if apart else "\n"))
                words[name] += sum(len(line.split()) + 1 for line in part)
                if name == "train" and len(learned) < SAMPLE:
                    learned += filter(None, itertools.chain.from_iterable(map(shorter, part)))
        kind, precision, description = machine(hardware)
        row = next(row for row in TABLE[kind] if words["train"] <= row.words)
        pieces = 1.4 * words["train"]
        alphabet = {character for line in lines for character in line or ()}
        _, vocab = fitting_vocabulary(learned, "unigram", max(row.vocab, 2 * len(alphabet)))
        held = f"{words['valid'] / sum(words.values()):.1%} of it"
        updates = round(min(max(row.passes * pieces / row.tokens, row.updates[0]), row.updates[1]))
        engine = "ds_config: null # plain PyTorch"
        if precision != "fp32":
            engine = "ds_config: ds_configs/zero1.json # ZeRO-1"
        every = max(10, updates // 20)
        recipe = f"""\
# yaml-language-server: $schema={schema_of('language_model')}
# A language model of {row.layers} layers, written by `deepnmt new --text` for {description}.

run: runs/{file.stem} # the run folder
task: language_model # a decoder by itself

data: # {words['train']:,} words to train on, {words['valid']:,} and {words['test']:,} held out
  folder: data/{file.stem}/prepared # what deepnmt prepare writes
  train: {folder}/train.txt # the text, less what is held out
  valid: {folder}/valid.txt # {held}, {'whole documents' if apart else f'runs of {size} lines'}
  test: {{test: {folder}/test.txt}} # about as much
  documents: {str(apart).lower()} # {'empty lines separate documents' if apart else 'one stream'}
  block: {row.block} # tokens of a sequence

vocab: # a SentencePiece vocabulary
  kind: unigram # its ids are ranks, as adaptive softmax would need
  size: {vocab} # for a text of this size

batch: # micro-batches
  tokens: {row.tokens} # {row.tokens // row.block} blocks

model: # a decoder without cross-attention
  width: {row.width} # for a text of this size
  heads: {row.heads} # {row.width // row.heads} dimensions each
  ffn: {4 * row.width} # four times the width
  dropout: {row.dropout} # {'high, since the text is read many times' if row.dropout > 0.1 else 'low'}
  max_length: {2 * row.block} # room for a context in deepnmt evaluate
  encoder: null # none
  decoder: {{block: b2t, layers: {row.layers}}} # learns at any depth; every block: docs/reference/blocks.md

optimizer: # Adam
  lr: {row.rate} # peak learning rate

schedule: # the learning rate over the updates
  name: inverse_sqrt # falls as 1 / sqrt(update) after the warm-up
  warmup: {max(20, updates // 10)} # a tenth of the run

train: # length of the run
  updates: {updates} # some {updates * row.tokens / pieces:.0f} passes over the text
  clip: 1.0 # gradient norm above which to clip
  validate_every: {every} # twenty times in the run
  save_every: {every} # with each validation

parallel: # processes and precision
  {engine}
  precision: {precision} # {description}
"""
        write_recipe(file, recipe)
    load_recipe(file, [])
    return (f"{text}: {len(lines):,} lines, {sum(words.values()):,} words, "
            f"{'documents apart' if apart else 'one stream'}\n{file}: {row.layers} layers, width {row.width}, "
            f"{updates:,} updates; each line says why\n"
            f"next: deepnmt run {file} (prepares, trains, averages and evaluates it)")
