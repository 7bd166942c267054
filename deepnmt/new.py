"""`deepnmt new`: looks at a parallel text, holds sentences out of it, and writes a recipe that says why."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import random
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deepnmt import folders
from deepnmt.config import Corpus, Vocab, load_recipe
from deepnmt.config.choices import BLOCKS
from deepnmt.config.load import yaml_line
from deepnmt.data.split import split_corpus
from deepnmt.data.subword_variants import SAMPLERS
from deepnmt.data.text import Pair, read_pairs
from deepnmt.data.vocab import Vocabulary, VocabularySizeError, train_vocabulary
from deepnmt.errors import UserError
from deepnmt.files import reporting, write_text
from deepnmt.progress import show_progress
from deepnmt.shipped import SCHEMA

Hardware = Literal["cpu", "gpu"]
TEXTS = folders.Kind("text", (), "", "free disk space, or go to another folder")
SAMPLE = 20_000  # pairs, or lines, that the vocabulary is tried on
_LEAST = 8  # that `vocab.size` may be
_HELD_OUT = 1_000  # sentences wanted for the test, half as many for validation


@dataclass(frozen=True)
class Choice:
    """A row of the table: what is chosen for up to `pairs` training pairs on one kind of machine.

    Attributes:
        block: of both sides.
        vocab: pieces, both languages together.
        rate: peak learning rate.
        encoder_rate: share of it that the encoder's layers take in the first quarter of the updates. At the whole rate
            an encoder with norms collapses then, the sooner the deeper it is; kept to the end, the share cost Admin
            1.1 to 1.5 BLEU (studies/results/collapse.md).
        tokens: of a micro-batch and side.
        updates: at least and at most; between them the epochs decide.
    """

    pairs: float
    block: str
    vocab: int
    width: int
    heads: int
    ffn: int
    encoder: int
    decoder: int
    dropout: float
    rate: float
    encoder_rate: float
    tokens: int
    epochs: int
    updates: tuple[int, int]


TABLE: dict[Hardware, tuple[Choice, ...]] = {
    "cpu": (
        Choice(10_000, "t_fixup", 2_000, 128, 4, 256, 4, 4, 0.3, 2e-3, 1.0, 1024, 30, (400, 2_500)),
        Choice(25_000, "t_fixup", 8_000, 256, 4, 512, 4, 4, 0.2, 1.5e-3, 1.0, 2048, 27, (2_000, 8_000)),
        Choice(60_000, "t_fixup", 8_000, 256, 4, 512, 4, 4, 0.2, 1.5e-3, 0.2, 2048, 27, (2_000, 9_000)),
        Choice(400_000, "t_fixup", 10_000, 256, 4, 512, 4, 4, 0.1, 1.5e-3, 0.2, 2048, 10, (4_000, 9_000)),
        Choice(math.inf, "admin", 16_000, 256, 4, 1024, 6, 3, 0.1, 1e-3, 0.2, 2048, 2, (9_000, 40_000)),
    ),
    "gpu": (
        Choice(10_000, "admin", 2_000, 256, 4, 1024, 6, 6, 0.4, 1e-3, 0.2, 4096, 80, (1_000, 8_000)),
        Choice(60_000, "admin", 8_000, 256, 4, 1024, 12, 6, 0.3, 1e-3, 0.1, 8192, 50, (2_000, 12_000)),
        Choice(400_000, "admin", 10_000, 512, 8, 2048, 18, 6, 0.3, 1e-3, 0.1, 16384, 30, (4_000, 20_000)),
        Choice(4_000_000, "admin", 32_000, 512, 8, 2048, 36, 12, 0.1, 7e-4, 0.1, 16384, 15, (20_000, 100_000)),
        Choice(math.inf, "admin", 32_000, 512, 8, 2048, 60, 12, 0.1, 7e-4, 0.1, 16384, 10, (50_000, 200_000)),
    ),
}
_VARIANTS_FROM = 8  # epochs from which sampled segmentations help
_ALPHA = 0.04  # of BPE-dropout
_PADDING = 1.06  # a micro-batch's size over the tokens of its sentences' longer sides


def table(hardware: Hardware) -> str:
    """The table for one kind of machine in Markdown, as docs/guide/new_recipe.md shows it."""
    lines = ["| pairs, up to | vocabulary | layers | dropout, peak rate, encoder's share | tokens | epochs |",
             "|---|---|---|---|---|---|"]
    for row in TABLE[hardware]:
        pairs = "more" if math.isinf(row.pairs) else f"{row.pairs:,}"
        lines.append(f"| {pairs} | {row.vocab:,} | "
                     f"`{row.block}` {row.encoder}L-{row.decoder}L, d {row.width}, FFN {row.ffn} | "
                     f"{row.dropout}, {row.rate:g}, {row.encoder_rate:g} | {row.tokens:,} | {row.epochs} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Survey:
    """What a text is like.

    Attributes:
        pairs: lines with text on both sides.
        empty, duplicates, identical: lines without text on a side, repeated pairs, pairs with equal sides.
        characters: a sentence's mean, source and target.
        alphabet: number of different characters, both sides.
        sample: pairs spread evenly over the text.
    """

    pairs: int
    empty: int
    duplicates: int
    identical: int
    characters: tuple[float, float]
    alphabet: int
    sample: list[Pair]

    @property
    def text(self) -> str:
        """In a sentence."""
        return (f"{self.pairs:,} pairs ({self.empty:,} more with an empty side), {self.duplicates:,} of them repeated, "
                f"{self.identical:,} with equal sides; {self.characters[0]:.0f} and {self.characters[1]:.0f} "
                f"characters a sentence, {self.alphabet:,} different ones")


def survey(corpus: Corpus) -> Survey:
    """Reads the text once. Raises `UserError`: it cannot be read, or has no pair."""
    digests: set[bytes] = set()
    alphabet: set[str] = set()
    sample: list[Pair] = []
    stride = 1  # every so many pairs one goes into the sample
    pairs = empty = duplicates = identical = 0
    src_characters = trg_characters = 0
    with show_progress("{:,} pairs read", desc="reading", unit=" pairs") as progress:
        for number, (src, trg) in enumerate(read_pairs(corpus), 1):
            if not (src and trg):
                empty += 1
                continue
            pairs += 1
            digest = hashlib.blake2b(f"{src}\t{trg}".encode(), digest_size=8).digest()
            if digest in digests:
                duplicates += 1
            digests.add(digest)
            if src == trg:
                identical += 1
            src_characters += len(src)
            trg_characters += len(trg)
            alphabet.update(src, trg)
            if pairs % stride == 0:
                sample.append((src, trg))
                if len(sample) == 2 * SAMPLE:
                    sample = sample[1::2]
                    stride *= 2
            progress(number)
    if not pairs:
        raise UserError(f"{(corpus.tsv or corpus.src)[0]} has no pair with text on both sides; give two files with a "
                        "sentence and its translation in the same line")
    characters = (src_characters / pairs, trg_characters / pairs)
    return Survey(pairs, empty, duplicates, identical, characters, len(alphabet), sample)


@dataclass(frozen=True)
class Lengths:
    """Of the sample in pieces of a vocabulary of `size`: target tokens a pair, tokens of a pair's longer side, the same
    with BPE-dropout, and what one pair in 1,000 exceeds: the tokens of the longer side, and the target's share of the
    source after the first ten."""

    size: int
    tokens: float
    longer: float
    sampled: float
    longest: int
    ratio: float


def fitting_vocabulary(lines: Sequence[str], kind: str, size: int) -> tuple[bytes, int]:
    """A vocabulary of `size` pieces, and how many it has: fewer where these lines give fewer, and then a fifth less
    than they give, since some of them are held out; more where their characters need more. Raises `UserError`."""
    while True:
        try:
            return train_vocabulary(lines, Vocab(kind=kind, size=size)), size
        except VocabularySizeError as fault:
            if fault.limit < _LEAST:
                raise
            if fault.limit > size:
                size = fault.limit
            else:
                size = max(_LEAST, fault.limit * 4 // 5)
                if size >= 100:
                    size = size // 50 * 50


def try_vocabulary(sample: Sequence[Pair], size: int) -> Lengths:
    """Segments the sample with a vocabulary trained on it, of `size` or as many pieces as it has text for."""
    model, size = fitting_vocabulary([*itertools.chain.from_iterable(sample)], "bpe", size)
    vocab = Vocabulary(model)
    sources, targets = zip(*sample)
    src = [len(ids) + 1 for ids in vocab.encode_batch(list(sources))]
    trg = [len(ids) + 1 for ids in vocab.encode_batch(list(targets))]
    sampler = SAMPLERS["bpe"](vocab, _ALPHA)
    some = random.Random(1).sample(sample, min(2000, len(sample)))
    sampled = []
    for number, pair in enumerate(some):
        sampled.append(1 + max(map(len, sampler.sample_batch(list(pair), number))))
    longest = sorted(map(max, src, trg))
    ratios = sorted([(t - 10) / s for s, t in zip(src, trg, strict=True)])
    rare = len(sample) * 999 // 1000
    return Lengths(size, sum(trg) / len(trg), sum(longest) / len(longest), sum(sampled) / len(sampled),
                   longest[min(rare, len(longest) - 1)], ratios[min(rare, len(ratios) - 1)])


def machine(wanted: Hardware | None) -> tuple[Hardware, str, str]:
    """Where it will train, the precision there, and both in words. Raises `UserError`: see `device.choose`."""
    import torch

    from deepnmt import device

    if wanted == "gpu":
        return "gpu", "bf16", "a GPU (--machine gpu)"
    if wanted is None and device.choose() == "cuda":
        gpu = torch.device("cuda")
        precision = "fp16" if device.emulates_bf16(gpu) else "bf16"
        return "gpu", precision, f"{torch.cuda.get_device_name()} with {device.memory(gpu) / 2**30:.0f} GiB"
    precision = "bf16" if device.trains_faster_in_bf16() else "fp32"
    count = len(os.sched_getaffinity(0))
    cores = f"{count} CPU cores" if count > 1 else f"{count} CPU core"
    return "cpu", precision, f"{cores}, faster in {precision}"


def check_name(file: Path) -> None:
    """Raises `UserError` if a file has no name of a recipe, or one that YAML would read otherwise in its lines."""
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"{file} is no name of a recipe; give one that ends in .yaml, for example {file}.yaml")
    if not re.fullmatch(r"\w([\w .+-]*[\w.+-])?", file.stem):
        raise UserError(f"{file}: the folders of data and run get the recipe's name, which must begin with a letter or "
                        "digit and have only these, spaces, '.', '_', '+' and '-'; give another")


def write_recipe(file: Path, text: str) -> None:
    """Writes a new recipe. Raises `UserError` if it cannot be written."""
    with reporting(str(file), "free disk space, or give write permission"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)


def new_recipe(
    file: Path, corpus: Corpus, langs: tuple[str, str], hardware: Hardware | None = None,
    valid: Corpus | None = None, test: Corpus | None = None,
) -> str:
    """Writes `file`, a recipe for a text, and the texts it names into `data/NAME/text`.

    Args:
        corpus: the text.
        langs: of source and target.
        hardware: for another machine than this one.
        valid, test: texts of the user's own, instead of sentences held out of `corpus`; both or none.

    Returns:
        What was seen and written, and what to do next.

    Raises:
        UserError: a text cannot be read, is too small, or a file is there already or cannot be written.
    """
    check_name(file)
    if file.exists():
        raise UserError(f"{file} exists already; give another name, or remove it")
    folder = Path("data") / file.stem / "text"
    if folder.exists() and not valid:
        raise UserError(f"{folder}, where the texts would go, exists already; give the recipe another name, or remove "
                        "the folder")
    kind, precision, words = machine(hardware)
    for given in filter(None, (valid, test)):
        for _ in read_pairs(given):
            pass  # for its faults
    facts = survey(corpus)
    report = [facts.text]
    with ExitStack() as unfinished:  # without the recipe there are no texts
        if valid and test:
            texts = {"train": corpus, "valid": valid, "test": test}
            pairs = facts.pairs
            held_out = "given"
        else:
            valid_share, test_share = _share(_HELD_OUT // 2, facts.pairs), _share(_HELD_OUT, facts.pairs)
            place = unfinished.enter_context(folders.whole_folder(folder, TEXTS))
            counts = split_corpus(corpus, place, langs, valid_share, test_share)
            texts = {}
            for part in counts:
                texts[part] = Corpus(src=[f"{folder}/{part}.{langs[0]}"], trg=[f"{folder}/{part}.{langs[1]}"])
            pairs = counts["train"]
            held_out = f"{valid_share} and {test_share} of 1,000 sentences, by a hash of the target sentence"
            written = [f"{count:,} {part}" for part, count in counts.items()]
            report.append(f"{folder}: {', '.join(written)}")
        row = next(row for row in TABLE[kind] if pairs <= row.pairs)
        # Chinese or Japanese has thousands of characters, each of which is a piece; as many more may be words.
        lengths = try_vocabulary(facts.sample, max(row.vocab, 2 * facts.alphabet))
        text, numbers = _recipe(file.stem, row, texts, langs, pairs, lengths, kind, precision, words, held_out, facts)
        write_recipe(file, text)
    load_recipe(file, [])
    report += [f"{file}: {numbers}; each line says why",
               f"next: deepnmt run {file} (prepares, trains, averages and evaluates it)"]
    return "\n".join(report)


def _share(wanted: int, pairs: int) -> int:
    """Of 1,000 pairs, how many are held out to have so many in all."""
    return max(1, min(50, round(1000 * wanted / pairs)))


def _recipe(
    name: str, row: Choice, texts: dict[str, Corpus], langs: tuple[str, str], pairs: int, lengths: Lengths,
    hardware: Hardware, precision: str, machine: str, held_out: str, facts: Survey,
) -> tuple[str, str]:
    """The recipe, and what it does in a few words."""
    for variants, longer in ((16, lengths.sampled), (0, lengths.longer)):  # noqa: B007
        epoch = max(1, math.ceil(pairs * longer * _PADDING / row.tokens))
        fewest, most = row.updates
        updates = math.ceil(min(max(row.epochs * epoch, fewest), most) / 100) * 100
        epochs = updates / epoch
        if epochs >= _VARIANTS_FROM:
            break
    longest = min(250, math.ceil(max(lengths.longest, 40) / 10) * 10)
    max_length = 256 if longest > 120 else 128
    ratio = max(1.5, math.ceil(10 * lengths.ratio) / 10)
    size = f"for {pairs:,} pairs on a {hardware.upper()}, see docs/guide/new_recipe.md"

    def text(part: str, indent: str, why: str) -> list[str]:
        corpus = texts[part]
        if corpus.tsv:
            return [f"{indent}tsv: {yaml_line(corpus.tsv[0])} # {why}",
                    f"{indent}columns: {corpus.columns} # source and target"]
        return [f"{indent}src: {yaml_line(corpus.src[0])} # {why}",
                f"{indent}trg: {yaml_line(corpus.trg[0])} # their translations"]

    held_out_why, test_why = f"held out: {held_out}", "shares no sentence with the others"
    if held_out == "given":
        held_out_why = test_why = "given"
    longest_why = "longer sentences cost memory, and attention is quadratic in them"
    if longest < 250:
        longest_why = "about one pair in 1,000 is longer"
    subwords = [f"  subword_variants: {variants} # {epochs:.0f} epochs: too few for BPE-dropout to pay"]
    if variants:
        subwords = [f"  subword_variants: {variants} # {epochs:.0f} epochs: BPE-dropout against overfitting",
                    f"  subword_alpha: {_ALPHA} # share of merges left out; more makes the text longer"]
    decoder_why = "as deep: a text of this size leaves time for it"
    if row.decoder < row.encoder:
        decoder_why = "shallower: decoding costs a decoder layer for every token"
    factors = []
    if row.encoder_rate < 1:
        factors = [f"  lr_factors: {{encoder: {row.encoder_rate}}} # of it, for the encoder's layers, which may "
                   "collapse at more in the beginning",
                   f"  lr_factors_until: {updates // 4} # then their rate rises to the others' in as many updates"]
    log_every = "  log_every: 10 # updates between progress lines"
    if updates >= 1000:
        log_every = f"  log_every: {max(10, updates // 100)} # a hundred lines of progress"
    engine = [f"  precision: fp32 # {machine}; plain PyTorch"]
    if precision != "fp32":
        engine = ["  ds_config: ds_configs/zero1.json # DeepSpeed; more processes need no other setting",
                  f"  precision: {precision} # {machine}"]
    at_once = []
    if hardware == "gpu":
        at_once = ["  batch_tokens: 65536 # a GPU wants many sentences at once"]

    lines = [
        f"# yaml-language-server: $schema={SCHEMA}",
        f"# {langs[0]} to {langs[1]}, {row.encoder}L-{row.decoder}L, written by `deepnmt new` for {machine}.",
        f"# The text: {facts.pairs:,} pairs, {facts.duplicates:,} repeated, {facts.identical:,} with equal sides.",
        "",
        f"run: runs/{name} # checkpoints, logs, scores",
        "",
        "data:",
        f"  folder: data/{name}/prepared # what `deepnmt prepare` writes",
        f"  src_lang: {yaml_line(langs[0])} # source language",
        f"  trg_lang: {yaml_line(langs[1])} # target language; decides how SacreBLEU tokenises, too",
        "  train:",
        *text("train", "    ", f"{pairs:,} pairs"),
        "  valid:",
        *text("valid", "    ", held_out_why),
        "  test:",
        "    test:",
        *text("test", "      ", test_why),
        "  filters:",
        f"    max_tokens: {longest} # {longest_why}",
        *subwords,
        "",
        "vocab:",
        f"  size: {lengths.size} # a target sentence then has {lengths.tokens:.0f} on average",
        "  shared: true # one for both languages, so that names and numbers are the same pieces",
        "",
        "batch:",
        f"  tokens: {row.tokens} # of a micro-batch and side, with padding",
        "",
        "model:",
        f"  width: {row.width} # like all sizes here, {size}",
        f"  heads: {row.heads} # {row.width // row.heads} wide each",
        f"  ffn: {row.ffn} # inner width of the feed-forward sub-layer, {row.ffn // row.width} times the width",
        f"  dropout: {row.dropout} # the smaller the text, the more",
        "  tied: all # one table for source, target and output, since the vocabulary is shared",
        f"  max_length: {max_length} # above filters.max_tokens",
        f"  encoder: {{block: {row.block}, layers: {row.encoder}}} # {BLOCKS[row.block].advice}",
        f"  decoder: {{block: {row.block}, layers: {row.decoder}}} # {decoder_why}",
        "",
        "optimizer:",
        f"  lr: {row.rate} # peak; wider and deeper models want less",
        *factors,
        "",
        "schedule:",
        "  name: linear # down to 0 at the last update",
        f"  warmup: {min(4000, max(50, updates // 8))} # an eighth of the updates",
        "",
        "train:",
        f"  updates: {updates} # {epochs:.1f} epochs of about {epoch:,} micro-batches",
        "  clip: 1.0 # gradient norm above which to clip; a few bad batches then harm less",
        "  label_smoothing: 0.1 # as in Vaswani et al. 2017",
        log_every,
        f"  validate_every: {max(50, updates // 10)} # ten times",
        f"  save_every: {max(25, updates // 40)} # the last eight, a fifth of the run, are averaged",
        "  keep_last: 8 # checkpoints kept, those that are averaged",
        "  best_by: bleu # what --checkpoint best goes by: translations, not the loss",
        "",
        "parallel:",
        *engine,
        "",
        "translate:",
        "  beam: 5 # hypotheses a sentence; 4 to 6 is usual, more gains little",
        f"  max_ratio: {ratio} # longest translation: max_ratio x source tokens + max_extra,",
        "  max_extra: 10 # which one pair in 1,000 exceeds",
        *at_once,
        "",
        "average_last: 8 # checkpoints whose average is scored",
    ]
    numbers = (f"{row.encoder}L-{row.decoder}L of width {row.width}, {lengths.size:,} pieces, {updates:,} updates of "
               f"up to {row.tokens:,} tokens ({epochs:.1f} epochs), for {machine}")
    return "\n".join(map(_aligned, lines)) + "\n", numbers


def _aligned(line: str) -> str:
    """With its comment at column 35, if it has one."""
    setting, mark, why = line.rpartition(" # ")  # a file's name may have one, too
    if not (setting and mark) or line.startswith("#"):
        return line
    return f"{setting:<33} # {why}"
