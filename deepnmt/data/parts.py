"""Preparing text in shards, in parts: `deepnmt prepare my.yaml --part 3/8` on as many machines as there are.

The training text is divided into units of `data.shard_pairs` lines, and a unit becomes a shard. Four steps are taken,
each as far as all before it are done, and what is done is found again in the folder `DATA.parts` beside the data:

1. *index*: every file is hashed and its lines counted (by one process, the others wait);
2. *read*: of each unit, the filters of text, the hashes of its pairs, and its share of the vocabulary's sample;
3. *join*: duplicates of all units, the vocabulary, validation and test texts (by one process, the others wait);
4. *encode*: each unit becomes a shard. Whoever finishes the last one puts the folder together.

Part i of n reads and encodes every n-th unit. No byte depends on n, on the order, or on what was interrupted.
Duplicates are found by a 64-bit hash: of n different pairs one is wrongly left out with probability n²/2^65, 0.03 for a
billion. Hashes are sorted in each unit and merged in ranges of values, so that memory does not grow with the text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from deepnmt import folders
from deepnmt.config import Corpus, Recipe
from deepnmt.config.plugins import name_plugins, that_have_run
from deepnmt.config.sections import NAMED
from deepnmt.data.annotations import Annotated, annotated_text, annotations_of
from deepnmt.data.arrays import KIND, Indices
from deepnmt.data.build import (
    ChangedTextError,
    copy_text,
    encode_text,
    learn_vocabularies,
    no_pairs_left,
    require_same,
    rules_of,
    say_what_is_learned,
    scored_sentences,
    sentences_to_learn,
    show_pairs,
    write_vocabularies,
)
from deepnmt.data.encoding import EncodingJob, end_with_parent, submit
from deepnmt.data.filters import KEPT, NEAR, Codes, Hashes, apply_text_filters, code_of, tally
from deepnmt.data.prepared import (
    PreparedData,
    check_vocabularies,
    corpora,
    is_free,
    prepared_settings,
    publish,
    tags_of,
)
from deepnmt.data.shards import FORMAT, SHARD, TRAIN, Entry, content_of, shard_name
from deepnmt.data.sources import Scan, Span, Unit, lines_of, pairs_of, rows_of, scan, sides_of, units_of
from deepnmt.data.tables import has_header
from deepnmt.data.text import (
    Pair,
    Row,
    cleaning_of,
    columns_of,
    corpora_of,
    files_by_corpus,
    input_files,
    read_pairs,
)
from deepnmt.data.vocab import given_vocabularies
from deepnmt.errors import UserError
from deepnmt.files import write_json
from deepnmt.progress import Progress, print_status, show_progress

BUCKET = 1 << 22  # hashes that are merged at a time, some 100 bytes each
FIRST_CHUNK = 1 << 24  # chunks that a unit may have; their numbers decide about sampled segmentations


class Part(NamedTuple):
    """Part `number`, from 1, of `total`."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """From "3/8". Raises `UserError`."""
        numbers = text.split("/")
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            raise UserError(f"--part is {text!r}, must be NUMBER/COUNT, for example 3/8")
        part = cls(*map(int, numbers))
        if not 1 <= part.number <= part.total:
            raise UserError(f"--part is {text!r}, but the parts of {part.total} are numbered 1 to {part.total}")
        return part


WHOLE = Part(1, 1)


@dataclass(frozen=True)
class Work:
    """What is being prepared: the recipe, and where its steps leave what they have done."""

    recipe: Recipe
    folder: Path
    lines: int  # of the training text
    plugins: Mapping[str, str]  # which the user named, so that other processes run them, too

    def corpus(self, unit: Unit) -> Corpus:
        """The corpus that a unit is of."""
        return corpora_of(self.recipe.data.train)[unit.corpus]

    def read(self, unit: Unit) -> Path:
        """What the step *read* found in a unit."""
        return self.folder / f"read.{name_of(unit)}"

    def array(self, unit: Unit, name: str) -> npt.NDArray[Any]:
        """One of the arrays that it found, memory-mapped."""
        mapped: npt.NDArray[Any] = np.load(self.read(unit) / f"{name}.npy", mmap_mode="r")
        return mapped

    def codes_file(self, unit: Unit) -> Path:
        """Which pairs of a unit are kept before they are encoded."""
        return self.folder / "joined" / f"{name_of(unit)}.codes"

    def shard(self, unit: Unit) -> Path:
        """The shard that a unit has become."""
        return self.folder / name_of(unit)


Step = Callable[[Work, Unit], None]


def name_of(unit: Unit) -> str:
    """The name of a unit's shard."""
    return shard_name(unit.corpus, unit.number)


def parts_folder(target: Path) -> Path:
    """Where the steps leave what they have done, until `target` is complete."""
    return target.with_name(f"{target.name}.parts")


def prepare_in_parts(recipe: Recipe, target: Path, part: Part = WHOLE) -> bool:
    """Takes the steps for one part, and returns whether the folder `target` is complete now.

    Raises:
        UserError: see `prepare`; or the parts were begun with other settings or texts.
    """
    def step(work: Work, units: Sequence[Unit], step: Step) -> None:
        mine = [unit for unit in units if unit.place % part.total == part.number - 1]
        _in_processes(f"{TRAIN}: {'reading' if step is read_unit else 'encoding'}", work, mine, step)

    missing = prepare_in_steps(recipe, target, step)
    if missing:
        print_status(f"part {part.number} of {part.total} has done what it can; {missing}; give the same command again "
                     "when they have")
    return not missing


def prepare_in_steps(recipe: Recipe, target: Path, run: Callable[[Work, Sequence[Unit], Step], None]) -> str:
    """Takes the steps, those of the units by `run`, which may leave some of them to others.

    Returns:
        What has been left; nothing if the folder `target` is complete now.

    Raises:
        UserError: see `prepare_in_parts`.
    """
    folder = parts_folder(target)
    if not (folder / "joined.json").exists():  # which has the vocabulary
        _given(recipe)  # whose faults are reported before the long work
    with folders.reporting(folder, KIND):
        folder.mkdir(parents=True, exist_ok=True)
        units = _index(recipe, folder)
        work = Work(recipe, folder, sum(unit.lines for unit in units), that_have_run(recipe.plugins))

        run(work, _without(units, work.read), read_unit)
        missing = _without(units, work.read)
        if missing:
            return f"{len(missing)} of {len(units)} units are not read yet, {name_of(missing[0])} among them"
        with _alone(folder):
            if is_free(target) and not (folder / "joined.json").exists():  # else another process was faster
                join(work, units)

        run(work, _without(units, work.shard), encode_unit)
        missing = _without(units, work.shard)
        if missing:
            return f"{len(missing)} of {len(units)} units are not encoded yet, {name_of(missing[0])} among them"
        try:
            with _alone(folder):
                if is_free(target):
                    folders.recover(target)
                    finish(work, units, target)
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            if is_free(target):
                raise
            # else another process, for which this one waited, has finished and removed the folder
    return ""


def _without(units: Sequence[Unit], result: Callable[[Unit], Path]) -> list[Unit]:
    """The units whose result is not there yet."""
    return [unit for unit in units if not result(unit).exists()]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process, of this machine or another, is in the same folder."""
    with FileLock(folder / ".lock"):
        yield


# -- the steps of a unit, which run in processes of their own ----------------------------------------------------------


def _in_processes(what: str, work: Work, units: Sequence[Unit], step: Step) -> None:
    """Takes a step for units, in processes of this machine. Raises what the step raises."""
    workers = min(work.recipe.data.workers or len(os.sched_getaffinity(0)), len(units))
    if units:
        with show_pairs(what, sum(unit.lines for unit in units)) as progress:
            done = 0
            for unit in _results(work, units, step, workers):
                done += unit.lines
                progress(done)


def _results(work: Work, units: Sequence[Unit], step: Step, workers: int) -> Iterator[Unit]:
    if workers == 1:
        for unit in units:
            step(work, unit)
            yield unit
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=end_with_parent) as pool:
        try:
            futures = {submit(pool, step, work, unit): unit for unit in units}
            for future in as_completed(futures):
                future.result()
                yield futures[future]
        except BrokenProcessPool:
            raise UserError(f"one of the {workers} processes that prepare the text was killed, perhaps because memory "
                            "ran out; set data.workers lower") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def read_unit(work: Work, unit: Unit) -> None:
    """Filters the pairs of a unit by their text, and hashes them. Raises `UserError`."""
    digest = hashlib.sha256()
    corpus, target = work.corpus(unit), work.read(unit)
    faults = name_plugins({"plugins": dict(work.plugins)}, NAMED, True)
    if faults:
        raise UserError(faults[0])
    rules = rules_of(work.recipe, corpus, scored_sentences(work.recipe))
    codes, hashes, near, overlap = apply_text_filters(_hashed(unit, corpus, digest), rules)
    rows = np.flatnonzero(codes == KEPT).astype(np.uint32)
    order = np.argsort(hashes, kind="stable")
    near_order = np.argsort(near, kind="stable")
    near_rows = rows[near_order] if rules.near else rows[:0]
    arrays: dict[str, npt.NDArray[Any]] = {
        "codes": codes, "sampled": rows[_sampled(work, hashes)], "overlap": np.array(overlap),
        "hashes": hashes[order], "rows": rows[order], "near_hashes": near[near_order], "near_rows": near_rows}
    with folders.new_folder(target, KIND) as temporary, folders.reporting(target, KIND):
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array)
        (temporary / "digest").write_text(digest.hexdigest(), encoding="utf-8")
        if len(arrays["sampled"]):
            chosen = np.zeros(len(codes), dtype=bool)
            chosen[arrays["sampled"]] = True
            copy_text(temporary, "sample", itertools.compress(pairs_of(unit, corpus), chosen.tolist()))
        folders.entries_of(temporary, target, KIND)  # waits until they are on disk
        temporary.rename(target)


def _sampled(work: Work, hashes: Hashes) -> npt.NDArray[np.bool_]:
    """Which pairs are in the vocabulary's sample, unless another copy of them is: those with the lowest hashes."""
    vocab = work.recipe.vocab
    if vocab.model or work.recipe.data.reuse:
        return np.zeros(len(hashes), dtype=bool)
    return hashes <= np.uint64(min(2**64 * sentences_to_learn(vocab) // work.lines, 2**64 - 1))


def encode_unit(work: Work, unit: Unit) -> None:
    """Makes the shard of a unit, or takes it from data that have it. Raises `UserError`."""
    joined = folders.read_json(work.folder, "joined.json", KIND)
    data, corpus = work.recipe.data, work.corpus(unit)
    codes = np.fromfile(work.codes_file(unit), dtype=np.uint8)
    text = (work.read(unit) / "digest").read_text(encoding="utf-8")
    hash_of_codes = hashlib.sha256(codes.tobytes()).hexdigest()
    annotated: dict[str, list[Annotated]] = {}
    hashes_of_annotations: dict[str, str] = {}
    for setting in annotations_of(data.train):
        files = [span.file for span in unit.columns.get(setting, ())]
        annotated[setting] = [Annotated(corpus.tag, pairs_of(unit, corpus), files, lines_of(unit, setting))]
        hashes_of_annotations[setting] = _hash_of(unit, setting)
    number = unit.number if data.subword_variants else 0
    key = folders.hash_of([text, hash_of_codes, corpus.tag, joined["encoding"],
                           hashes_of_annotations, number])
    target = work.shard(unit)
    with folders.new_folder(target, KIND) as temporary:
        shard = joined["reusable"].get(key)
        if shard and Path(shard).is_dir():
            _link(Path(shard), temporary)
            with folders.reporting(target, KIND):
                temporary.rename(target)
            return
        src_model = (work.folder / "joined" / "src.spm").read_bytes()
        trg_model = (work.folder / "joined" / "trg.spm").read_bytes()
        job = EncodingJob(src_model, trg_model, data.filters, data.subword_variants, work.recipe.vocab.kind,
                          data.subword_alpha)
        digest = hashlib.sha256()
        tag = f"{corpus.tag} " if corpus.tag else ""
        pairs = ((tag + src, trg) for src, trg, _ in _hashed(unit, corpus, digest))
        _, counts = encode_text(temporary, TRAIN, pairs, codes, job, 1, annotated, unit.number * FIRST_CHUNK)
        if digest.hexdigest() != text:
            raise UserError(f"the text of {name_of(unit)} changed after it was read; wait until nothing writes it any "
                            f"more, delete {work.folder}, and prepare it again")
        entries = folders.entries_of(temporary, target, SHARD)
        folders.publish(temporary, target, entries, {"format": FORMAT, "version": 1, "key": key, "counts": counts},
                        SHARD)


def _hashed(unit: Unit, corpus: Corpus, digest: Any) -> Iterator[Row]:
    """The rows of a unit, without tags; `digest` is that of their text."""
    for row in rows_of(unit, corpus):
        digest.update(f"{row[0]}\n{row[1]}\n".encode())
        yield row


def _hash_of(unit: Unit, column: str) -> str:
    digest = hashlib.sha256()
    for _, _, line in lines_of(unit, column):
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _link(source: Path, target: Path, leave: str = "") -> None:
    """Fills a folder with the files of another, without a copy where the file system can; not those that end so."""
    for file in source.iterdir():
        if leave and file.suffix == leave:
            continue
        try:
            os.link(file, target / file.name)
        except OSError:
            shutil.copyfile(file, target / file.name)


# -- the steps of one process ------------------------------------------------------------------------------------------


def _index(recipe: Recipe, folder: Path) -> list[Unit]:
    """The units of the training text. The first process counts the lines; all others check that it was for the same.

    Raises `UserError`.
    """
    file = folder / "index.json"
    sizes: dict[str, list[list[Any]]] = {}
    for name, text in corpora(recipe).items():
        sizes[name] = [[corpus, path.name, path.stat().st_size] for corpus, path in files_by_corpus(text)]
    asked = {"settings": prepared_settings(recipe), "reuse": recipe.data.reuse, "files": sizes}
    with _alone(folder):
        if file.exists():
            index = folders.read_json(folder, file.name, KIND)
            if index["asked"] != json.loads(json.dumps(asked)):
                raise UserError(f"{folder} holds what was prepared of other texts or with other settings; delete it, "
                                "or prepare with those it was begun with")
        else:
            print_status(f"{TRAIN}: counting lines")
            scans: dict[Path, Scan] = {}
            units: list[Unit] = []
            with _show_bytes(input_files(recipe.data.train)) as progress:
                for name, corpus in corpora_of(recipe.data.train).items():
                    units += _units(name, corpus, recipe.data.shard_pairs, scans, len(units), progress)
            inputs: dict[str, list[dict[str, Any]]] = {}
            for name, text in corpora(recipe).items():
                inputs[name] = [_input(path, corpus, scans) for corpus, path in files_by_corpus(text)]
            index = {"asked": asked, "units": units, "inputs": inputs}
            write_json(file, index)
    units = []
    for corpus, number, place, lines, columns in index["units"]:
        spans_by_column = {column: [Span(*span) for span in spans] for column, spans in columns.items()}
        units.append(Unit(corpus, number, place, lines, spans_by_column))
    return units


def _show_bytes(files: Sequence[Path]) -> AbstractContextManager[Progress]:
    """Shows how many bytes of files have been read."""
    total = sum(file.stat().st_size for file in files)
    return show_progress(f"{TRAIN}: counting lines: {{:,}} of {total:,} bytes", desc=f"{TRAIN}: counting lines",
                         total=total, unit="B", unit_scale=True, mininterval=0.5)


def _from(done: int, progress: Progress) -> Progress:
    """Progress of a part of what is done, before which so much was."""
    return lambda more: progress(done + more)


def _units(name: str, corpus: Corpus, step: int, scanned: dict[Path, Scan], place: int, progress: Progress
           ) -> list[Unit]:
    """The units of a corpus, whose files are scanned; the first is number `place` of all."""
    scans: dict[str, list[Scan]] = {}
    done = sum(counted.bytes for counted in scanned.values())
    for column, files in sides_of(corpus).items():
        before, scans[column] = 0, []
        for file in files:
            header = column == "tsv" and has_header(Path(file), columns_of(corpus))
            counted = scan(Path(file), before, step, header, _from(done, progress))
            scanned[Path(file)] = counted
            scans[column].append(counted)
            before += counted.lines
            done += counted.bytes
    return units_of(name, corpus, scans, step, place)


def _input(file: Path, corpus: str, scanned: Mapping[Path, Scan]) -> dict[str, Any]:
    """A file of a corpus in the manifest, as `prepare` has it there for text in one piece."""
    counted = scanned.get(file) or scan(file, 0, 1 << 62)
    return {"name": file.name, "bytes": counted.bytes, "sha256": counted.sha256, "corpus": corpus}


def join(work: Work, units: Sequence[Unit]) -> None:
    """Does what needs all units: leaves out duplicates, and makes the vocabulary and the other texts.

    Raises `UserError`.
    """
    recipe = work.recipe
    data, vocab = recipe.data, recipe.vocab
    with folders.new_folder(work.folder / "joined", KIND) as temporary:
        for unit in units:
            work.array(unit, "codes").tofile(temporary / work.codes_file(unit).name)
        if data.filters.drop_duplicates:
            _leave_out_duplicates(work, units, temporary, "", code_of("duplicate"), {unit.corpus for unit in units})
        near = {unit.corpus for unit in units if cleaning_of(work.corpus(unit)).drop_near_duplicates}
        if near:
            _leave_out_duplicates(work, units, temporary, "near_", code_of(NEAR), near)
        _require_kept(work, units, temporary)
        earlier, models = _given(recipe)
        texts = {name: text for name, text in corpora(recipe).items() if name != TRAIN}
        codes = {name: copy_text(temporary, name, read_pairs(text)) for name, text in texts.items()}
        models = models or _learn_vocabulary(work, units, temporary, tags_of(recipe))
        vocabs = write_vocabularies(temporary, models)
        job = EncodingJob(models[0], models[-1])
        splits = {name: _encode_small(temporary, name, text, codes[name], job) for name, text in texts.items()}
        reusable: dict[str, str] = {}
        for old in reversed(earlier):
            for corpus, entries in old.manifest.get("shards", {}).items():
                for number, entry in enumerate(entries):
                    reusable[entry["key"]] = str(old.folder.absolute() / shard_name(corpus, number))
        sampling = [vocab.kind, data.subword_alpha] if data.subword_variants else []
        encoding = [vocabs, data.filters.model_dump(), data.subword_variants, sampling]
        folders.entries_of(temporary, work.folder / "joined", KIND)
        shutil.rmtree(work.folder / "joined", ignore_errors=True)  # of a process that was killed after the next line
        temporary.rename(work.folder / "joined")
    write_json(work.folder / "joined.json", {"vocab": vocabs, "splits": splits, "encoding": encoding,
                                            "reusable": reusable})


def _encode_small(folder: Path, name: str, text: Corpus, codes: Codes, job: EncodingJob) -> dict[str, Any]:
    """Encodes a validation or test text, all of whose pairs are kept."""
    sizes: dict[str, int] = {}

    def counted() -> Iterator[Pair]:
        for part, corpus in corpora_of(text).items():
            sizes[part] = 0
            for pair in read_pairs(corpus):
                sizes[part] += 1
                yield pair

    _, counts = encode_text(folder, name, counted(), codes, job, 1, annotated_text(text))
    return counts if "" in sizes else {"corpora": sizes, **counts}


def _leave_out_duplicates(
    work: Work, units: Sequence[Unit], folder: Path, kind: str, code: int, corpora: Collection[str]
) -> None:
    """Marks the second and later copies of a pair in the order of the units, one range of hashes after another.

    Args:
        kind: what the names of the arrays begin with.
        corpora: in which pairs are marked.
    """
    arrays = [(work.array(unit, f"{kind}hashes"), work.array(unit, f"{kind}rows")) for unit in units]
    total = sum(len(hashes) for hashes, _ in arrays)
    buckets = max(1, -(-total // BUCKET))
    starts = [0] * len(units)
    with show_pairs(f"{TRAIN}: {kind and 'near-'}duplicates", total) as progress:
        for bucket in range(1, buckets + 1):
            ends = [len(hashes) for hashes, _ in arrays]
            if bucket < buckets:
                limit = np.uint64(2**64 * bucket // buckets)
                ends = [int(np.searchsorted(hashes, limit)) for hashes, _ in arrays]
            together = np.concatenate([hashes[start:end] for (hashes, _), start, end in zip(arrays, starts, ends)])
            order = np.argsort(together, kind="stable")
            repeated = np.zeros(len(together), dtype=bool)
            repeated[order[1:]] = together[order[1:]] == together[order[:-1]]
            begin = 0
            for unit, (_, rows), start, end in zip(units, arrays, starts, ends, strict=True):
                again = rows[start:end][repeated[begin:begin + end - start]]
                begin += end - start
                if len(again) and unit.corpus in corpora:
                    codes = np.memmap(folder / work.codes_file(unit).name, np.uint8, "r+")
                    codes[again[codes[again] == KEPT]] = code
                    codes.flush()
            starts = ends
            progress(sum(ends))


def _require_kept(work: Work, units: Sequence[Unit], temporary: Path) -> None:
    """Raises `UserError` if no pair of the text is kept, or of a corpus."""
    counts: dict[str, list[dict[str, Any]]] = {}
    for unit in units:
        codes = np.fromfile(temporary / work.codes_file(unit).name, dtype=np.uint8)
        of_unit = {"pairs": int(np.count_nonzero(codes == KEPT)), "left_out": tally(codes)}
        counts.setdefault(unit.corpus, []).append(of_unit)
    _require_corpora({corpus: _sum(some) for corpus, some in counts.items()})


def _require_corpora(counts: Mapping[str, Mapping[str, Any]]) -> None:
    empty = {corpus: of_corpus["left_out"] for corpus, of_corpus in counts.items() if not of_corpus["pairs"]}
    if empty:
        raise no_pairs_left(empty, TRAIN)


def _given(recipe: Recipe) -> tuple[list[PreparedData], list[bytes]]:
    """The data that `data.reuse` names, and the vocabulary that there is already; none if it is learned.

    Raises:
        UserError: they cannot be used, or do not fit the recipe; or a tag of the recipe is not in the vocabulary.
    """
    tags, earlier = tags_of(recipe), []
    for folder in recipe.data.reuse:
        if is_free(Path(folder)):
            raise UserError(f"data.reuse names {folder}, where there is no prepared data; correct its path, or remove "
                            "it from data.reuse")
        try:
            earlier.append(PreparedData.open(folder))
        except UserError as fault:
            raise UserError(f"data.reuse names {folder}: {fault}") from None
    if recipe.vocab.model:
        check_vocabularies(Path(recipe.vocab.model))
        return earlier, given_vocabularies(recipe.vocab, tags)
    return earlier, _vocabulary_of(earlier[0], recipe, tags) if earlier else []


def _vocabulary_of(data: PreparedData, recipe: Recipe, tags: Sequence[str]) -> list[bytes]:
    """The vocabulary of earlier data. Raises `UserError` if the recipe asks for another kind, or a tag is not in it."""
    then, now = data.manifest["settings"], prepared_settings(recipe)
    for key in now:
        if "vocab.model" in then and key not in ("vocab.kind", "vocab.shared"):
            continue  # how that vocabulary was learned is not known
        if key.startswith("vocab.") and then.get(key) != now[key]:
            raise UserError(f"data.reuse names {data.folder}, which was made with {key} {then.get(key)}, but the "
                            f"recipe has {now[key]}; set it to that, or remove data.reuse")
    for tag in tags:
        if tag not in data.vocabs()[0].tags:
            raise UserError(f"the tag {tag!r} is not a piece of the vocabulary of {data.folder}, which data.reuse "
                            "names; remove the tag, or data.reuse")
    models = [vocab.bytes for vocab in data.vocabs()]
    return models[:1] if recipe.vocab.shared else models


def _learn_vocabulary(work: Work, units: Sequence[Unit], temporary: Path, tags: Sequence[str]) -> list[bytes]:
    """The vocabulary, or that of the source and that of the target, from the sample that the units were read for."""
    vocab = work.recipe.vocab
    count = kept = 0
    chosen: list[Indices] = []
    for unit in units:
        codes = np.fromfile(temporary / work.codes_file(unit).name, dtype=np.uint8)
        kept += int(np.count_nonzero(codes == KEPT))
        chosen.append(codes[work.array(unit, "sampled")] == KEPT)
        count += int(chosen[-1].sum())
    say_what_is_learned(vocab, count, kept)

    def text(*sides: int) -> Iterator[str]:
        for unit, mask in zip(units, chosen, strict=True):
            files = [work.read(unit) / f"sample.{side}.txt" for side in ("src", "trg")]
            if not len(mask):
                continue
            with (open(files[0], encoding="utf-8", newline="\n") as src,  # not by `read_lines`, which looks whether a
                  open(files[1], encoding="utf-8", newline="\n") as trg):  # file is text by what its first line is
                for pair in itertools.compress(zip(src, trg, strict=True), mask.tolist()):
                    for side in sides:
                        yield pair[side].removesuffix("\n")

    return learn_vocabularies(vocab, text, tags)


def finish(work: Work, units: Sequence[Unit], target: Path) -> None:
    """Puts the folder of the data together. Raises `UserError`, also if a text is no longer what was indexed."""
    joined = folders.read_json(work.folder, "joined.json", KIND)
    index = folders.read_json(work.folder, "index.json", KIND)
    try:
        require_same(corpora(work.recipe), index["inputs"])
    except ChangedTextError:
        shutil.rmtree(work.folder, ignore_errors=True)  # it is not known what was made from which text
        raise
    shards: dict[str, list[dict[str, Any]]] = {}
    counts: list[dict[str, Any]] = []
    parts: dict[str, list[dict[str, Any]]] = {}
    for unit in units:
        manifest = folders.read_manifest(work.shard(unit), SHARD)
        counts.append({**manifest["counts"], "overlap": int(work.array(unit, "overlap"))})
        shards.setdefault(unit.corpus, []).append(Entry(
            pairs=counts[-1]["pairs"], src_tokens=counts[-1]["src_tokens"], trg_tokens=counts[-1]["trg_tokens"],
            key=manifest["key"], content=content_of(manifest)).model_dump())
        parts.setdefault(unit.corpus, []).append(
            {name: counts[-1][name] for name in ("read", "pairs", "left_out", "overlap")})
    by_corpus = {corpus: _sum(some) for corpus, some in parts.items()}
    _require_corpora(by_corpus)
    train = {**_sum(counts), "variants": counts[0]["variants"]}
    if "" not in by_corpus:
        sizes = {corpus: of_corpus["pairs"] for corpus, of_corpus in by_corpus.items()}
        train = {"corpora": sizes, **train, "by_corpus": by_corpus}
    with folders.new_folder(target, KIND) as temporary:
        with folders.reporting(target, KIND):
            _link(work.folder / "joined", temporary, leave=".codes")
            for unit in units:  # links, so that nothing is lost if this process is killed
                (temporary / name_of(unit)).mkdir()
                _link(work.shard(unit), temporary / name_of(unit))
        publish(temporary, target, {"settings": prepared_settings(work.recipe), "vocab": joined["vocab"],
                               "splits": {TRAIN: train, **joined["splits"]}, "inputs": index["inputs"],
                               "shards": shards})


def _sum(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of counts, those in groups each; what some lack is 0 there."""
    total: dict[str, Any] = {}
    for name in itertools.chain.from_iterable(counts):
        if name in total:
            continue
        values = [each[name] for each in counts if name in each]
        total[name] = _sum(values) if isinstance(values[0], Mapping) else sum(values)
    return total
