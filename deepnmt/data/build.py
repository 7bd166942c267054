"""What is done to a text when it is prepared, in one piece or in parts: copied, or encoded into arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from deepnmt.config import Corpus, Recipe, Vocab
from deepnmt.data.annotations import Annotated, Annotation
from deepnmt.data.arrays import SideWriter, variant_stem
from deepnmt.data.encoding import CHUNK, EncodingJob, encode_pairs
from deepnmt.data.filters import KEPT, Codes, Rules, tally
from deepnmt.data.prepared import corpora, languages_of, tags_of
from deepnmt.data.shards import TRAIN
from deepnmt.data.text import Pair, cleaning_of, corpora_of, files_by_corpus, input_files, read_pairs, write_pairs
from deepnmt.data.vocab import Vocabulary, train_vocabulary, without_tags
from deepnmt.errors import UserError
from deepnmt.files import sha256
from deepnmt.progress import Progress, no_progress, print_status, show_progress
from deepnmt.tokens import UNK
from deepnmt.visitors import find

# Sentences a second that SentencePiece learns from on one core of an EPYC, for the time that is said beforehand. Whole
# words are only counted.
LEARNED = {"bpe": 60_000, "unigram": 12_000}


def show_pairs(what: str, total: int | None = None) -> AbstractContextManager[Progress]:
    """Shows how many pairs are done, and an ETA if the total is known."""
    return show_progress(f"{what}: {{:,}}{f' of {total:,}' if total else ''} pairs", desc=what, total=total,
                       unit=" pairs", unit_scale=True, mininterval=0.5)


def fingerprints(text: Corpus) -> list[dict[str, Any]]:
    """Name, size, hash and corpus of a text's files, without their folders, which differ between machines. Raises
    `UserError`."""
    entries = []
    for corpus, file in files_by_corpus(text):
        try:
            entries.append({"name": file.name, "bytes": file.stat().st_size, "sha256": sha256(file), "corpus": corpus})
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror or error}; give an existing text file") from None
    return entries


class ChangedTextError(UserError):
    """A text is no longer what it was when its preparation began."""


def require_same(texts: Mapping[str, Corpus], inputs: Mapping[str, list[dict[str, Any]]]) -> None:
    """Raises `ChangedTextError` if texts have other `fingerprints` than when their preparation began."""
    for name, corpus in texts.items():
        files, now = input_files(corpus), fingerprints(corpus)
        if len(now) != len(inputs[name]):
            raise ChangedTextError(
                f"data.{name} names {len(now)} files, and {len(inputs[name])} when its preparation began, so nothing "
                "was kept; wait until all are there, and prepare it again") from None
        for file, then, found in zip(files, inputs[name], now, strict=True):
            if then != found:
                raise ChangedTextError(f"{file} changed while it was prepared, so nothing was kept; wait until nothing "
                                       "writes it any more, and prepare it again") from None


def copy_text(folder: Path, name: str, pairs: Iterable[Pair]) -> Codes:
    """Copies the text of a split, one sentence a line; all its pairs are kept."""
    count = write_pairs([folder / f"{name}.{side}.txt" for side in ("src", "trg")], pairs)
    return np.full(count, KEPT, dtype=np.uint8)


def encode_text(folder: Path, name: str, pairs: Iterable[Pair], codes: Codes, job: EncodingJob, workers: int,
                annotated: Mapping[str, Iterable[Annotated]], first: int = 0, progress: Progress = no_progress
                ) -> tuple[Codes, dict[str, Any]]:
    """Writes the arrays of a text, without the pairs that `codes` leave out.

    Args:
        name: of the split.
        pairs: of the text, one for each of `codes`.
        annotated: the parts of the text with each of its annotations, which are written too, by setting.
        first: the number of the first chunk, see `encode_pairs`.

    Returns:
        The codes after the filters of lengths, and counts for a manifest.
    """
    vocabs = Vocabulary(job.src_model), Vocabulary(job.trg_model)
    writers: list[list[SideWriter]] = []
    for stem in (name, *(variant_stem(name, k) for k in range(job.variants))):
        writers.append([SideWriter(folder, f"{stem}.src", vocabs[0].size),
                        SideWriter(folder, f"{stem}.trg", vocabs[1].size)])
    rows = np.flatnonzero(codes == KEPT)
    encoded: list[Codes] = [np.zeros(0, dtype=np.uint8)]
    done = 0
    unknown = [0, 0]
    chosen = (pair for pair, code in zip(pairs, codes, strict=True) if code == KEPT)
    for chunk in encode_pairs(chosen, job, min(workers, 1 + len(rows) // CHUNK), first):
        for sides, side_writers in zip(chunk.sides, writers, strict=True):
            for pieces, writer in zip(sides, side_writers):
                writer.add(*pieces)
        for side, pieces in enumerate(chunk.sides[0]):
            unknown[side] += int(np.count_nonzero(pieces.tokens == UNK))
        encoded.append(chunk.codes)
        done += len(chunk.codes)
        progress(done)
    final = codes.copy()
    final[rows] = np.concatenate(encoded)
    counts: dict[str, dict[str, int]] = {}
    for setting, parts in annotated.items():
        annotation: Annotation = find("annotations", setting)
        counts[setting] = annotation.write(folder, name, parts, final, vocabs)
    return final, {**counts, "read": len(final), "pairs": int(np.count_nonzero(final == KEPT)),
                   "left_out": tally(final), "src_tokens": writers[0][0].end, "trg_tokens": writers[0][1].end,
                   "src_unknown": unknown[0], "trg_unknown": unknown[1], "variants": job.variants}


def scored_sentences(recipe: Recipe) -> frozenset[str]:
    """All sentences of the validation and test texts, of both sides, without tags."""
    sentences: set[str] = set()
    tags = frozenset(tags_of(recipe))
    for name, text in corpora(recipe).items():
        if name != TRAIN:
            for src, trg in read_pairs(text, tags=False):
                sentences.update((without_tags(src, tags).lstrip(), trg))
    return frozenset(sentences - {""})


def sentences_to_learn(vocab: Vocab) -> int:
    """The most sentences of a side that a vocabulary is learned from."""
    return max(1, vocab.max_sentences // 2) if vocab.shared else vocab.max_sentences


def learn_vocabularies(vocab: Vocab, text: Callable[..., Iterable[str]], tags: Sequence[str]) -> list[bytes]:
    """The vocabulary, or that of the source and that of the target, from `text(side, ...)`: the sentences of these
    sides, 0 and 1."""
    if vocab.shared:
        return [train_vocabulary(text(0, 1), vocab, tags)]
    return [train_vocabulary(text(0), vocab, tags), train_vocabulary(text(1), vocab)]


def write_vocabularies(folder: Path, models: Sequence[bytes]) -> dict[str, dict[str, Any]]:
    """Writes those of the source and the target, which may be one; returns what a manifest says of them."""
    vocabs = {}
    for side, model in (("src", models[0]), ("trg", models[-1])):
        (folder / f"{side}.spm").write_bytes(model)
        vocab = Vocabulary(model)
        vocabs[side] = {"size": vocab.size, "sha256": vocab.fingerprint}
    return vocabs


def say_what_is_learned(vocab: Vocab, count: int, lines: int) -> None:
    """Says from how many pairs of a text a vocabulary will be trained, and how long that takes."""
    rate = LEARNED.get(vocab.kind, math.inf)
    seconds = 2 * count / rate  # two sides, of one vocabulary or of two
    text = f"training the vocabulary of {vocab.size} {vocab.kind} pieces"
    if not vocab.shared:
        text += " a side"
    if count < lines:
        text += f" on {count:,} of {lines:,} pairs (vocab.max_sentences)"
    if seconds >= 30:
        text += f", some {round(seconds / 60)} min"
    print_status(text)


def rules_of(recipe: Recipe, corpus: Corpus, scored: Collection[str]) -> Rules:
    """How a corpus of the training text is filtered; `scored`: see `scored_sentences`."""
    clean = cleaning_of(corpus)
    near = any(cleaning_of(one).drop_near_duplicates for one in corpora_of(recipe.data.train).values())
    return Rules(recipe.data.filters, clean, languages_of(recipe, clean), scored, near, frozenset(tags_of(recipe)))


def require_pairs(codes: Codes) -> None:
    """Raises `UserError` if no pair is kept."""
    if not np.any(codes == KEPT):
        raise UserError(f"data.filters leave out all {len(codes)} training pairs ({format_reasons(tally(codes))}); "
                        "loosen them, or give another corpus")


def format_reasons(left_out: dict[str, int]) -> str:
    """How many pairs were left out for which reason, as text."""
    return ", ".join(f"{reason} {count:,}" for reason, count in left_out.items() if count) or "none"


def no_pairs_left(left_out: Mapping[str, dict[str, int]], name: str) -> UserError:
    """The error if the filters leave out all pairs of corpora of a text; `left_out`: how many for which reason."""
    empty = [f"{corpus or 'the corpus'} ({format_reasons(counts)})" for corpus, counts in left_out.items()]
    return UserError(f"data.filters leave out all pairs of {', '.join(empty)} in data.{name}; loosen them, or remove "
                     "the corpus")
