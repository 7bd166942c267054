"""`deepnmt prepare`: converts the texts of a recipe into a folder of token arrays.

The training text is streamed three times (to filter the pairs, to train the vocabulary, to encode), the others twice.
The result depends on the texts and the settings in `prepared.prepared_settings` only. Neither the number of processes
nor `recipe.seed` changes a byte, so that runs with several seeds share one folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from deepnmt.config import Corpus, Recipe
from deepnmt.data.annotations import annotated_text, annotations_of
from deepnmt.data.arrays import KIND
from deepnmt.data.batching import random_order
from deepnmt.data.build import (
    copy_text,
    encode_text,
    fingerprints,
    format_reasons,
    learn_vocabularies,
    no_pairs_left,
    require_pairs,
    require_same,
    rules_of,
    say_what_is_learned,
    scored_sentences,
    sentences_to_learn,
    show_pairs,
    write_vocabularies,
)
from deepnmt.data.encoding import SEED, EncodingJob
from deepnmt.data.filters import KEPT, Codes, filter_corpora, tally
from deepnmt.data.mixing import stream_kind, training_stream
from deepnmt.data.parts import WHOLE, Part, prepare_in_parts
from deepnmt.data.prepared import (
    REMEDY,
    PreparedData,
    check_settings,
    check_texts,
    check_vocabularies,
    corpora,
    is_free,
    on_this_machine,
    prepared_settings,
    publish,
    tags_of,
    trained_on,
)
from deepnmt.data.text import (
    Pair,
    Row,
    corpora_of,
    count_pairs,
    ending,
    files_of,
    input_files,
    read_pairs,
    read_rows,
)
from deepnmt.data.vocab import given_vocabularies
from deepnmt.device import require_cores
from deepnmt.errors import UserError
from deepnmt.folders import new_folder, recover, reporting
from deepnmt.progress import print_status


def prepare(recipe: Recipe, part: Part = WHOLE) -> Path:
    """Prepares `recipe.data` and returns its folder; a folder that is up to date is not changed.

    Of text in shards, `part` is prepared, and the folder is complete when the last part is (see `parts.py`).

    The folder is written as `folders.py` says. So a killed run leaves no incomplete folder, and the next run deletes
    what it left. Nothing that exists is overwritten. Progress and counts go to standard error.

    Raises:
        UserError: a text is faulty, or changes meanwhile; `vocab.size` does not suit it; the filters leave out all
            pairs; the folder holds other files, or data of other settings or texts; it cannot be written; another
            process is writing it; or the machine is too small for `data.workers`.
    """
    folder = Path(recipe.data.folder)
    target = Path(os.path.realpath(folder))
    texts = corpora(recipe)
    require_cores("data.workers", recipe.data.workers)
    if not is_free(folder):
        data = PreparedData.open(folder)
        if part != WHOLE:  # which would hash everything once for each part
            check_settings(recipe, data)
            print_status(f"{folder} is complete")
            return folder
        _check_up_to_date(recipe, texts, data)
        _warn_of_trained(recipe, data.manifest["inputs"])
        return folder
    for name, corpus in texts.items():
        input_files(corpus)
        annotations_of(corpus)
        _warn_of_exchanged(recipe, name, corpus)
    if recipe.data.shard_pairs:
        if prepare_in_parts(recipe, target, part):
            _warn_of_trained(recipe, PreparedData.open(folder).manifest["inputs"])
            _report(recipe, texts)
        return folder
    if part != WHOLE:
        raise UserError(f"--part prepares part {part.number} of {part.total}, but data.shard_pairs is 0, so that the "
                        "text is one piece; set data.shard_pairs, for example to 1000000")
    with reporting(folder, KIND), only_one_process(target):
        recover(target)
        with new_folder(target, KIND) as temporary:
            with _unchanged(texts) as inputs:
                _warn_of_trained(recipe, inputs)
                contents = _build(recipe, texts, temporary)
            publish(temporary, target, {**contents, "inputs": inputs})
    _report(recipe, texts)
    return folder


def _report(recipe: Recipe, texts: dict[str, Corpus]) -> None:
    """Says what was prepared."""
    data = PreparedData.open(recipe.data.folder)
    for name, split in data.manifest["splits"].items():
        details: list[str] = []
        sentences: list[str] = []
        for setting, annotation in annotations_of(texts[name]).items():
            clause, *more = annotation.describe(split[setting])
            details.append(f"; {clause}")
            sentences += more
        print_status(f"{name}: {split['pairs']:,} of {split['read']:,} pairs; "
                     f"left out: {format_reasons(split['left_out'])}; "
                     f"tokens {split['src_tokens']:,} source, {split['trg_tokens']:,} target; "
                     f"unknown {split['src_unknown']:,}, {split['trg_unknown']:,}{''.join(details)}")
        for sentence in sentences:
            print_status(f"{name}: {sentence}")
        for corpus, counts in split.get("by_corpus", {}).items():
            print_status(f"{name}, {corpus}: {counts['pairs']:,} of {counts['read']:,} pairs; "
                         f"left out: {format_reasons(counts['left_out'])}")
    train = data.manifest["splits"]["train"]
    overlap = train.get("overlap")
    if overlap and not recipe.data.filters.drop_overlap:
        where = ""
        if "by_corpus" in train:
            overlaps = {corpus: counts["overlap"] for corpus, counts in train["by_corpus"].items()}
            where = f" ({format_reasons(overlaps)})"
        print_status(f"warning: {overlap:,} of {train['read']:,} training pairs have a sentence of the validation or a "
                     f"test text{where}; to leave them out, set data.filters.drop_overlap=true")
    stream = training_stream(recipe, data, stream_kind(recipe, data))
    kind = f"micro-batches of up to {recipe.batch.tokens:,} tokens a side"
    if recipe.batch.update_tokens is not None:
        kind = f"updates of about {recipe.batch.update_tokens:,} target tokens"
    print_status(f"an epoch is {stream.epoch_size(0):,} {kind}; {stream.waste(0):.1%} of the positions are padding")


def _warn_of_exchanged(recipe: Recipe, name: str, text: Corpus) -> None:
    """Warns where files end in the languages of the other side; of corpora with a tag there may be any direction."""
    langs = (recipe.data.src_lang, recipe.data.trg_lang)
    for corpus in corpora_of(text).values():
        for files in zip(files_of(corpus.src), files_of(corpus.trg), strict=False):
            if not corpus.tag and (ending(files[1]), ending(files[0])) == langs and langs[0] != langs[1]:
                print_status(f"warning: {name} reads {files[0]} as {langs[0]} and {files[1]} as {langs[1]}; if that is "
                             "the wrong way round, exchange the files, or data.src_lang and data.trg_lang")


def _warn_of_trained(recipe: Recipe, inputs: dict[str, list[dict[str, Any]]]) -> None:
    """Warns where a text that is scored is also trained on."""
    for sentence in trained_on(recipe, inputs):
        print_status(f"warning: {sentence}")


def _read_with_progress(name: str, text: Corpus, ends: dict[str, int], tags: bool) -> Iterator[Pair]:
    """The pairs of a text, see `_corpora_with_progress`."""
    for _, rows in _corpora_with_progress(name, text, ends, tags):
        for src, trg, _ in rows:
            yield src, trg


def _corpora_with_progress(name: str, text: Corpus, ends: dict[str, int], tags: bool
                           ) -> Iterator[tuple[Corpus, Iterator[Row]]]:
    """Each corpus of a text, and its rows, with progress. `ends` is filled: after how many pairs each corpus ends."""
    done = 0

    def counted(corpus: Corpus) -> Iterator[Row]:
        nonlocal done
        for row in read_rows(corpus, tags):
            done += 1
            progress(done)
            yield row

    with show_pairs(f"{name}: reading", count_pairs(text)) as progress:
        for part, corpus in corpora_of(text).items():
            yield corpus, counted(corpus)
            ends[part] = done


def _check_up_to_date(recipe: Recipe, texts: dict[str, Corpus], data: PreparedData) -> None:
    """Raises `UserError`, naming the first difference, if a folder is not what this recipe would prepare.

    Texts that are not on this machine are not compared.
    """
    for name, corpus in texts.items():
        if name not in data.splits:  # a test set that is new: evaluation reads its text
            if recipe.data.filters.drop_overlap:
                raise UserError(f"prepared data {data.folder} has no {name}, so that its sentences were not left out "
                                f"of the training text, as data.filters.drop_overlap asks for; {REMEDY}")
            print_status(f"{name}: not in the prepared data, so it is not known how many of its sentences are in the "
                         "training text; deepnmt evaluate reads it from its files")
            continue
        if not on_this_machine(corpus):
            print_status(f"{name}: the texts are not on this machine, so they are not compared with the prepared ones")
            continue
        check_texts(data, name, fingerprints(corpus))
    check_settings(recipe, data)
    data.verify()
    print_status(f"{data.folder} is up to date")


@contextmanager
def only_one_process(folder: Path) -> Iterator[None]:
    """Raises `UserError` while another process prepares `folder`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_name(f".{folder.name}.lock")
    lock = FileLock(file)  # the system releases it even if this process is killed
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UserError(f"another process is preparing {folder}; wait until it is done") from None
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()


@contextmanager
def _unchanged(texts: dict[str, Corpus]) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """The fingerprints of the files of all texts, which it takes again at the end.

    Raises:
        UserError: a file has changed meanwhile, which also explains whatever else was raised.
    """
    inputs = {name: fingerprints(corpus) for name, corpus in texts.items()}
    try:
        yield inputs
    except Exception:
        require_same(texts, inputs)
        raise
    require_same(texts, inputs)


def _build(recipe: Recipe, texts: dict[str, Corpus], folder: Path) -> dict[str, Any]:
    """Fills an empty folder, and returns the contents of its manifest. The short texts come first, so that their faults
    are reported before the long work."""
    data, vocab = recipe.data, recipe.vocab
    codes: dict[str, Codes] = {}
    tags = tags_of(recipe)
    models: list[bytes] = []
    if vocab.model:
        check_vocabularies(Path(vocab.model))
        models = given_vocabularies(vocab, tags)
    ends: dict[str, dict[str, int]] = {name: {} for name in texts}
    for name in (name for name in texts if name != "train"):
        codes[name] = copy_text(folder, name, _read_with_progress(name, texts[name], ends[name], tags=True))
    train = _corpora_with_progress("train", texts["train"], ends["train"], tags=False)
    scored = scored_sentences(recipe)
    codes["train"], overlaps = filter_corpora((rules_of(recipe, corpus, scored), rows) for corpus, rows in train)
    require_pairs(codes["train"])

    if not models:
        models = _train_vocabularies(recipe, codes["train"], tags)
    vocabs = write_vocabularies(folder, models)
    job = EncodingJob(models[0], models[-1])
    sampled = replace(job, filters=data.filters, variants=data.subword_variants, kind=vocab.kind,
                      alpha=data.subword_alpha)
    workers = data.workers or len(os.sched_getaffinity(0))
    encoded = {}
    for name, text_codes in codes.items():
        of_text = sampled if name == "train" else job
        encoded[name] = _encode(folder, name, texts[name], text_codes, ends[name], of_text, workers)
    splits = {name: counts for name, (counts, _) in encoded.items()}
    splits["train"]["overlap"] = sum(overlaps)
    by_corpus = _count_by_corpus(encoded["train"][1], ends["train"], overlaps)
    if by_corpus:
        splits["train"]["by_corpus"] = by_corpus
    return {"settings": prepared_settings(recipe), "vocab": vocabs, "splits": splits}


def _count_by_corpus(codes: Codes, ends: dict[str, int], overlaps: list[int]) -> dict[str, dict[str, Any]]:
    """What was left out of each of several corpora, whose last pairs are before `ends`."""
    by_corpus: dict[str, dict[str, Any]] = {}
    for (corpus, end), start, overlap in zip(ends.items(), [0, *ends.values()], overlaps):
        own = codes[start:end]
        if corpus:
            by_corpus[corpus] = {"read": len(own), "pairs": int(np.count_nonzero(own == KEPT)), "left_out": tally(own),
                                 "overlap": overlap}
    return by_corpus


def _train_vocabularies(recipe: Recipe, codes: Codes, tags: list[str]) -> list[bytes]:
    """The vocabulary, or that of the source and that of the target. They are trained on the pairs that were kept, or on
    a random sample of them."""
    vocab, most = recipe.vocab, sentences_to_learn(recipe.vocab)
    rows = np.flatnonzero(codes == KEPT)
    sample = rows
    if len(rows) > most:
        sample = rows[random_order(len(rows), SEED)[:most]]
    chosen = np.zeros(len(codes), dtype=bool)
    chosen[sample] = True
    say_what_is_learned(vocab, len(sample), len(rows))

    def text(*sides: int) -> Iterator[str]:
        with show_pairs("vocabulary: reading", len(chosen)) as progress:
            pairs = zip(read_pairs(recipe.data.train, tags=False), chosen, strict=True)
            for done, (pair, is_chosen) in enumerate(pairs, start=1):
                progress(done)
                if is_chosen:
                    yield from (pair[side] for side in sides)

    return learn_vocabularies(vocab, text, tags)


def _encode(folder: Path, name: str, text: Corpus, codes: Codes, ends: dict[str, int], job: EncodingJob, workers: int
            ) -> tuple[dict[str, Any], Codes]:
    """Writes a split's arrays and returns its counts for the manifest, and which pairs are left out; see `encode_text`.

    Args:
        ends: after how many pairs each corpus of the text ends.
    """
    with show_pairs(f"{name}: encoding", int(np.count_nonzero(codes == KEPT))) as progress:
        final, counts = encode_text(folder, name, read_pairs(text), codes, job, workers, annotated_text(text), 0,
                                    progress)
    require_pairs(final)
    corpora = {}
    empty = {}
    start = 0
    for part, end in ends.items():
        corpora[part] = int(np.count_nonzero(final[start:end] == KEPT))
        if not corpora[part]:
            empty[part] = tally(final[start:end])
        start = end
    if empty:
        raise no_pairs_left(empty, name)
    if "" not in corpora:
        counts = {"corpora": corpora, **counts}
    return counts, final
