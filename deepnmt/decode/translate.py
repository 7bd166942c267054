"""The translation job: lines of text in, as many lines out, in the same order.

An empty line gives an empty line; a line that is too long is truncated, with a warning. Several processes share the
lines of one input. The output is UTF-8.
"""

from __future__ import annotations

import itertools
import logging
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deepnmt import config
from deepnmt.config.choices import FORMATS, SEARCHES
from deepnmt.config.fields import either
from deepnmt.data.parts import WHOLE, Part, parts_folder
from deepnmt.data.text import arriving_lines, read_lines, side_by_side
from deepnmt.data.vocab import Vocabulary
from deepnmt.decode import sharing
from deepnmt.decode.align import Links, align, alignment_layer, pharaoh
from deepnmt.decode.formats import WRITERS, open_output
from deepnmt.decode.journal import open_outputs
from deepnmt.decode.mbr import chrf, expected_chrf
from deepnmt.decode.models import Folders, Models, load_models, longest_source, longest_translation, max_length
from deepnmt.decode.next_tokens import LengthPenalty, Rules
from deepnmt.decode.sampling import make_sampler
from deepnmt.decode.search import (
    Candidate,
    Searcher,
    beam_search,
    choose_greedily,
    decode_independently,
)
from deepnmt.decode.sharing import in_chunks, share
from deepnmt.decode.steppers import MakeStepper, stepper_of
from deepnmt.device import free_memory, release
from deepnmt.errors import UserError, enough_memory
from deepnmt.folders import hash_of, read_manifest
from deepnmt.model.dropout import evaluating
from deepnmt.model.transformer import Transformer
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import Progress, no_progress, print_status, show_progress
from deepnmt.tokens import BOS, EOS, PAD, UNK
from deepnmt.version import __version__
from deepnmt.visitors import find, require_visitors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hypothesis:
    """A translation: detokenised text on one line; its score (log-probability over length penalty; where
    something else chooses, its number); its number of tokens, without eos; whether it `ended` with eos or was truncated
    at the length limit; its subword pieces; and the pairs of aligned words, where they were asked for."""

    text: str
    score: float
    log_prob: float
    tokens: int
    ended: bool
    pieces: list[str] = field(default_factory=list)
    alignment: Links | None = None


class Judge(Protocol):
    """A program that scores translations, see `translate.choose`, with its command."""

    command: str
    lower_is_better: bool

    def __call__(self, sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]) -> list[float]:
        """A number for each translation. Raises `UserError`."""


def judge_of(recipe: config.Recipe) -> Judge | None:
    """The program that chooses by the recipe, which a visitor brings; None if none does. Raises `UserError`."""
    if recipe.translate.choose not in recipe.metrics:
        return None
    require_visitors(recipe)
    judge: Judge = find("scorers", "judge")(recipe)
    return judge


# -- the job -----------------------------------------------------------------------------------------------------------


def translate_files(
    folders: Folders,
    source: str,
    target: str,
    settings: config.Translate,
    *,
    prefixes: str | None = None,
    references: str | None = None,
    judge: Judge | None = None,
    alignments: str | None = None,
    output_format: str = "text",
    seed: int = 1,
    part: Part = WHOLE,
    ranks: Ranks | None = None,
    stepper: MakeStepper | None = None,
    expected: config.Model | None = None,
) -> int:
    """Translates a file with the model of a checkpoint or run folder, and returns how many lines it has, 0 on other
    ranks than the first. What an earlier call left of the same work is taken up, see `journal`.

    Args:
        folders: as for `checkpoint.load_model`; several make an ensemble.
        source: UTF-8 text, plain or compressed; "-" is standard input (with one process only).
        target: the output file, compressed if its name says so, which appears when it is complete; "-" is standard
            output. What goes from a pipe or a terminal to standard output is translated as it arrives.
        settings: of the search.
        prefixes: a file with the beginning of each translation, empty lines where nothing is given.
        references: a file with a translation of each line, for `translate.choose`; judge: what else it needs.
        alignments: a file to write, with the word alignment of each line's best translation.
        output_format: of `FORMATS`.
        seed: of sampling.
        part: of the text, if other calls translate the others. The last one writes the output.
        ranks: several processes, see `translate_shards`; by default this one, on the CPU. Rank 0 writes and reports
            progress.
        stepper: the way to compute the next logits; by default that of the model or ensemble.
        expected: the model that the checkpoint must hold; None: any.

    Raises:
        UserError: a file cannot be read or written, or is not UTF-8; `output_format` has no room for the n-best list;
            the prefixes are not as many as the lines; the model is not the one `expected`; what was left is of another
            text, model or search.
    """
    ranks = ranks or Ranks.alone()
    if settings.nbest > 1 and not FORMATS[output_format].many:
        others = either(FORMATS.where(lambda row: row.many))
        raise UserError(f"translate.nbest is {settings.nbest}, but the format {output_format} holds one translation a "
                        f"line; choose the format {others}, or set translate.nbest=1")
    if references and (settings.choose in ("score", "mbr") or (judge and "{ref}" not in judge.command)):
        raise UserError(f"references ({references}) have no effect because translate.choose is {settings.choose}; set "
                        "translate.choose to chrf, and translate.candidates, or leave them out")
    beside = [name for name in (prefixes, references) if name]
    lines_out = check_files([source, *beside], target, ranks)
    outputs = [lines_out]
    if alignments:
        if os.path.realpath(alignments) == os.path.realpath(target):
            raise UserError(f"alignments and translations would go into the same file, {target}; give a file for each")
        outputs.append(check_files([source, *beside], alignments, ranks))
    if part != WHOLE and lines_out and lines_out.exists() and not parts_folder(lines_out).exists():
        print_status(f"{lines_out} is there already; remove it to have it made again")
        return 0
    models = load_models(folders, settings, ranks, expected, alone=True)
    if alignments and "encoder" not in models.all[0].sides:
        raise UserError(f"--alignments {alignments}: alignments are from cross-attention, but the model of "
                        f"{models.members[0].folder} is a decoder by itself, without it; leave the option out")
    at_once = source == target == "-" and not beside and _is_pipe(sys.stdin)
    chunks: Iterable[Sequence[tuple[str, ...]]]
    if at_once:
        arriving = arriving_lines(sys.stdin.fileno(), "standard input")
        chunks = (list(zip(lines)) for lines in arriving)  # rows of one text
    else:
        chunks = in_chunks(in_step(source, *beside))
    facts = {**_facts(models, settings), "seed": seed, "--format": output_format, "--alignments": bool(alignments),
             "--prefix": bool(prefixes), "--references": bool(references),
             "the metric that chooses": _criterion(judge) if judge else None}
    write = WRITERS[output_format].hypotheses
    passed = skipped = 0
    with counted("{:,} lines translated", ranks) as progress, \
            open_outputs(outputs, facts, part, ranks, at_once) as out:

        def translated(items: Sequence[tuple[str, ...]]) -> Iterator[list[str]]:
            lines, *more = zip(*items)
            translations = translate_shards(
                models.all[0], models.vocabs, lines, settings, ranks, prefixes=more[0] if prefixes else None,
                references=more[-1] if references else None, judge=judge, seed=seed, start=passed,
                stepper=stepper or models.stepper, searcher=models.searcher, aligned=bool(alignments),
                progress=lambda count: progress(count - skipped))
            for number, hypotheses in enumerate(translations, start=passed + 1):
                output = [write(number, hypotheses)]
                if alignments:
                    output.append(pharaoh(hypotheses[0].alignment or []) + "\n")
                yield output

        for items in chunks:
            if out.lacks(items):
                out.write(translated(items))
            else:
                skipped += len(items)
            passed += len(items)
    return passed if ranks.first else 0


def _facts(models: Models, settings: config.Translate) -> dict[str, Any]:
    """What translations depend on beside the text, but for how many are computed at once."""
    members = []
    for member in models.members:
        hashes = {}
        for name, file in read_manifest(member.folder)["files"].items():
            if name.endswith((".safetensors", ".spm")) and not name.startswith("moments"):
                hashes[name] = file["sha256"]
        members.append([member.recipe.model.model_dump(mode="json"), hashes])
    facts: dict[str, Any] = {"deepnmt": __version__, "model": hash_of(members)}
    for name, value in settings.model_dump(exclude={"batch_tokens"}).items():
        facts[f"translate.{name}"] = value
    facts["lines of a chunk"] = sharing.CHUNK
    return facts


def check_files(sources: Sequence[str], target: str, ranks: Ranks) -> Path | None:
    """Refuses input files that are not there, or that the output would overwrite.

    Args:
        sources: file names; "-" is standard input.
        target: the output file; "-" is standard output.

    Returns:
        The output file, None for standard output.

    Raises:
        UserError: the files cannot be used.
    """
    if "-" in sources and ranks.world > 1:
        raise UserError(f"standard input reaches one process only, but {ranks.world} were started; give an input file, "
                        "or start one process")
    if sources.count("-") > 1:
        raise UserError("two inputs are standard input; give a file for one of them")
    files = [Path(source) for source in sources if source != "-"]
    for file in files:
        if not file.is_file():
            raise UserError(f"there is no input file {file}; give an existing text or .gz file, or - for standard "
                            "input")
    if target == "-":
        return None
    out = Path(target)
    if out.exists() and any(out.samefile(file) for file in files):
        raise UserError(f"output {out} is the input file itself; give another output file")
    if out.is_dir():
        raise UserError(f"output {out} is a folder; give the name of a file in it")
    if not out.parent.is_dir():
        raise UserError(f"output {out} cannot be written: there is no folder {out.parent}; make it, or give a file in "
                        "an existing one")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise UserError(f"output {out} cannot be written: there is no permission, or the disk is read-only; give "
                        "another file")
    return out


def read_text(name: str) -> Iterator[str]:
    """The lines of a file, or of standard input ("-")."""
    return read_lines(None if name == "-" else Path(name))


def in_step(name: str, *others: str) -> Iterator[tuple[str, ...]]:
    """Line N of a text with line N of others. Raises `UserError` if one has more, of files at once."""
    if name != "-":
        for other in others:
            if other != "-":
                for _ in side_by_side(read_text(name), read_text(other), name, other):
                    pass
    texts = [read_text(each) for each in (name, *others)]
    for row in itertools.zip_longest(*texts):
        if None in row:  # of standard input
            raise UserError(f"{', '.join((name, *others))} have different numbers of lines; line N of one must belong "
                            "to line N of the others")
        yield row


@contextmanager
def counted(line: str, ranks: Ranks) -> Iterator[Progress]:
    """Progress over lines, which rank 0 reports; at the end it says how fast they were."""
    begin, done = time.perf_counter(), 0
    with show_progress(line, unit=" lines", leave=False) as show:

        def report(count: int) -> None:
            nonlocal done
            done = count
            show(count)

        yield report if ranks.first else no_progress
    if ranks.first:
        seconds = time.perf_counter() - begin
        print_status(f"{done:,} lines in {seconds:.1f} s: {done / seconds:.1f} lines/s")


def write_lines(target: Path | None, ranks: Ranks, lines: Iterator[str]) -> None:
    """Writes what rank 0 gets, with line ends."""
    if not ranks.first:
        assert not list(lines)  # the others only take part
        return
    with open_output(target) as out:
        out.writelines(lines)


def _is_pipe(stream: TextIO) -> bool:
    """Whether a program or a person may be waiting for answers at the other end. Notebooks have no descriptor."""
    try:
        return not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False


# -- any number of lines, on any number of processes -------------------------------------------------------------------


def translate_shards(
    model: Transformer,
    vocabs: tuple[Vocabulary, Vocabulary],
    lines: Iterable[str],
    settings: config.Translate,
    ranks: Ranks,
    *,
    prefixes: Iterable[str] | None = None,
    references: Iterable[str] | None = None,
    judge: Judge | None = None,
    seed: int = 1,
    stepper: MakeStepper = stepper_of,
    searcher: Searcher | None = None,
    aligned: bool = False,
    progress: Progress = no_progress,
    warn: bool = True,
    start: int = 0,
) -> Iterator[list[Hypothesis]]:
    """`translate_lines` for any number of lines, shared among processes (see `sharing.share`). Yields every line's
    hypotheses in order on rank 0, nothing on other ranks. `start`: lines translated before these."""

    def work(items: list[tuple[str, str, str]], numbers: list[int], progress: Progress) -> list[list[list[object]]]:
        translations = translate_lines(
            model, vocabs, [text for text, _, _ in items], settings, prefixes=[begin for _, begin, _ in items],
            references=None if references is None else [reference for _, _, reference in items], judge=judge,
            seed=seed, numbers=numbers, stepper=stepper, searcher=searcher, aligned=aligned, progress=progress,
            warn=warn)
        return [[list(asdict(h).values()) for h in hypotheses] for hypotheses in translations]

    nothing = itertools.repeat("")
    items = zip(lines, nothing if prefixes is None else prefixes, nothing if references is None else references)
    for best in share(items, lambda item: len(item[0]), work, ranks, progress, start):
        yield [Hypothesis(*h) for h in best]


def translate_lines(
    model: Transformer,
    vocabs: tuple[Vocabulary, Vocabulary],
    lines: Iterable[str],
    settings: config.Translate,
    *,
    prefixes: Iterable[str] | None = None,
    references: Iterable[str] | None = None,
    judge: Judge | None = None,
    seed: int = 1,
    numbers: Iterable[int] | None = None,
    stepper: MakeStepper = stepper_of,
    searcher: Searcher | None = None,
    aligned: bool = False,
    progress: Progress = no_progress,
    warn: bool = True,
) -> list[list[Hypothesis]]:
    """Translates on the model's device.

    Args:
        model: in any mode, which is restored, and of any float type.
        vocabs: source and target.
        lines: texts. One without tokens gives one empty hypothesis; one longer than the model allows is truncated.
        settings: of the search.
        prefixes: what the translation of each line begins with, tags included; by default nothing.
        references: a translation of each line, for `translate.choose`; judge: the program that it names.
        seed: of sampling. A line's samples depend on the seed, its number and the model alone.
        numbers: line numbers, for sampling and warnings; by default 1, 2, …
        stepper: the way to compute the next logits.
        searcher: another program's search, which takes the place of the stepper.
        aligned: whether to tell the word alignments, by `model` alone.
        progress: called after each batch with the number of lines done.
        warn: whether to warn of truncated lines.

    Returns:
        For each line, in the same order, at most `settings.nbest` hypotheses, best first.

    Raises:
        UserError: the model's scores are NaN, or there is no memory for a single line.
    """
    trg_vocab = vocabs[1]
    texts = list(lines)
    known = None if references is None else list(references)
    begins = [""] * len(texts) if prefixes is None else list(prefixes)
    require_choosable(settings, known, judge)
    count = settings.nbest
    settings = settings.model_copy(update={"nbest": max(count, settings.candidates)})
    encoded = _encode(model, vocabs, texts, begins, numbers or range(1, len(texts) + 1), warn)
    encoded.sort(key=lambda line: -len(line.source))
    # Hypotheses searched at once for a sentence. A batch counts the tokens of each, and padding, so its memory does not
    # grow with the beam.
    wide = SEARCHES[settings.method].width
    width: int = getattr(settings, wide)
    barred = tuple(trg_vocab.tags.values())
    if not settings.unknown:
        barred = (UNK, *barred)
    nothing = Hypothesis("", 0.0, 0.0, 0, True, alignment=[] if aligned else None)
    results = [[nothing] for _ in texts]
    layer = alignment_layer(model, settings.alignment_layer)
    device = model.output_weight.device
    remedy = f"lower translate.beam ({settings.beam:,}) or translate.batch_tokens ({settings.batch_tokens:,})"
    with evaluating(model), torch.inference_mode(), enough_memory(remedy):
        done = 0
        most = len(encoded)  # sentences of a batch, as long as there is memory for so many
        while done < len(encoded):
            longest = len(encoded[done].source)
            room = sentences_that_fit(model, longest, most_steps(model, settings, longest), width)
            size = min(max(1, settings.batch_tokens // (longest * width)), most, room)
            batch = encoded[done : done + size]
            searched = None  # if there is too little memory
            if batch:
                with suppress(torch.OutOfMemoryError):  # it keeps the tensors of the search until here
                    searched = _search(model, batch, settings, seed, stepper, searcher, barred)
            if searched is None:
                most = len(batch) // 2
                if not most:
                    on_cpu = "" if device.type == "cpu" else ", or parallel.device=cpu"
                    raise UserError(f"one line of {longest} tokens needs more memory than {device} has for it; set "
                                    f"translate.{wide} ({width:,}) or translate.max_ratio ({settings.max_ratio:g}) "
                                    f"lower{on_cpu}")
                release(device)
                continue
            for line, candidates in zip(batch, searched, strict=True):
                hypotheses = [_hypothesis(candidate, trg_vocab) for candidate in candidates]
                values = None
                if settings.method == "mbr" or settings.choose == "mbr":
                    values = expected_chrf([h.text for h in hypotheses])
                elif settings.choose == "chrf" and known:
                    values = [chrf(h.text, known[line.place]) for h in hypotheses]
                if values is not None:
                    chosen = _best(hypotheses, values, count)
                    candidates = [candidates[k] for k in chosen]
                    hypotheses = [replace(hypotheses[k], score=values[k]) for k in chosen]
                if aligned:
                    hypotheses = _aligned(model, layer, line.source, candidates, hypotheses, vocabs)
                results[line.place] = hypotheses
            done += len(batch)
            progress(done)
    return results if judge is None else _judged(texts, results, known, judge, count)


class _Line(NamedTuple):
    """A line to translate: its place among the texts of a call, its number, the token ids of the source with eos, and
    those that its translation begins with."""

    place: int
    number: int
    source: list[int]
    given: list[int]


def _encode(
    model: Transformer, vocabs: tuple[Vocabulary, Vocabulary], texts: Sequence[str], begins: Sequence[str],
    numbers: Iterable[int], warn: bool,
) -> list[_Line]:
    """The lines that are not empty; a line of tags alone is."""
    src_vocab, trg_vocab = vocabs
    limit, most_read = max_length(model), longest_source(model)
    setting = "model.max_length"
    if most_read < limit:
        setting = "half of model.max_length"
    lines: list[_Line] = []
    for place, (text, begin, number) in enumerate(zip(texts, begins, numbers, strict=True)):
        source = cut(src_vocab.encode(text.strip()), most_read, f"line {number}", "translated", warn, setting)
        given = []
        if begin:
            room = longest_translation(model, len(source) + 1)
            left = "model.max_length" if room == limit else "what the source leaves of model.max_length"
            given = cut(trg_vocab.encode(begin.strip()), room, f"the prefix of line {number}", "used", warn, left)
        _, words = src_vocab.split_tags(text.strip())
        if source and words:
            lines.append(_Line(place, number, [*source, EOS], given))
    return lines


def _hypothesis(candidate: Candidate, vocab: Vocabulary) -> Hypothesis:
    tokens = candidate.tokens
    return Hypothesis(one_line(vocab.decode(tokens)), candidate.score, candidate.log_prob, len(tokens),
                      candidate.ended, vocab.to_pieces(tokens))


def require_choosable(settings: config.Translate, references: Sequence[str] | None, judge: Judge | None) -> None:
    """Raises `UserError` unless there is what `translate.choose` chooses by."""
    if settings.choose == "chrf" and references is None:
        raise UserError("translate.choose is chrf, against translations that are there already; name their file with "
                        "--references, which translate alone has, or set translate.choose to mbr or score")
    if judge and "{ref}" in judge.command and references is None:
        raise UserError(f"translate.choose is {settings.choose}, whose command reads references, {{ref}}; name their "
                        "file with --references, which translate alone has, or choose by a metric without them")
    if settings.choose not in ("score", "mbr", "chrf") and judge is None:
        raise UserError(f"translate.choose is {settings.choose}, which only the commands translate and evaluate ask; "
                        "set translate.choose=score translate.candidates=1")


def _criterion(judge: Judge) -> str:
    return f"{judge.command}, the lowest" if judge.lower_is_better else judge.command


def _best(hypotheses: Sequence[Hypothesis], values: Sequence[float], count: int) -> list[int]:
    """Which `count` different hypotheses have the highest values, best first."""
    first: dict[str, int] = {}
    for k, hypothesis in enumerate(hypotheses):
        first.setdefault(hypothesis.text, k)  # of equal texts the likeliest
    return sorted(first.values(), key=lambda k: (-values[k], k))[:count]


def _judged(
    texts: Sequence[str], results: Sequence[list[Hypothesis]], references: Sequence[str] | None, judge: Judge,
    count: int,
) -> list[list[Hypothesis]]:
    """The best `count` hypotheses of each line by a program, which is started once."""
    sources, translations, known = [], [], []
    for text, reference, hypotheses in zip(texts, references or [""] * len(texts), results, strict=True):
        for hypothesis in hypotheses:
            sources.append(text)
            translations.append(hypothesis.text)
            known.append(reference)
    values = judge(sources, translations, known)
    chosen, start = [], 0
    for hypotheses in results:
        own = values[start : start + len(hypotheses)]
        best = _best(hypotheses, [-value for value in own] if judge.lower_is_better else own, count)
        chosen.append([replace(hypotheses[k], score=own[k]) for k in best])
        start += len(hypotheses)
    return chosen


def _aligned(
    model: Transformer, layer: int, source: list[int], candidates: list[Candidate], hypotheses: list[Hypothesis],
    vocabs: tuple[Vocabulary, Vocabulary],
) -> list[Hypothesis]:
    """The hypotheses of a sentence with their alignments."""
    device = model.output_weight.device
    targets = [candidate.tokens for candidate in candidates]
    src = padded([source] * len(targets), device)
    lengths = torch.tensor([len(source)] * len(targets), device=device)
    trg_in = padded([[BOS, *target] for target in targets], device)[:, : max_length(model)]
    links = align(model, layer, src, lengths, trg_in, targets, vocabs)
    return [replace(h, alignment=alignment) for h, alignment in zip(hypotheses, links, strict=True)]


def cut(
    ids: list[int], limit: int, name: str, used: str, warn: bool, setting: str = "model.max_length"
) -> list[int]:
    """At most `limit` - 1 token ids, so that eos fits; warns of others, which are not `used`. `setting`: the limit's
    name."""
    if warn and len(ids) >= limit:
        log.warning("%s has %d tokens; only its first %d are %s (%s is %d)",
                    name, len(ids), limit - 1, used, setting, limit)
    return ids[: limit - 1]


def _search(
    model: Transformer, lines: Sequence[_Line], settings: config.Translate, seed: int, stepper: MakeStepper,
    searcher: Searcher | None, barred: tuple[int, ...],
) -> list[list[Candidate]]:
    """Searches one batch; the best hypotheses come first. `barred`: tokens that are not chosen."""
    sources, given, lengths, most = [], [], [], []
    for line in lines:
        sources.append(line.source)
        given.append(line.given)
        lengths.append(len(line.source))
        most.append(most_steps(model, settings, len(line.source), len(line.given)))
    if searcher is not None:
        if any(given):
            raise UserError(f"translate.backend is {settings.backend}, with which deepnmt gives no beginnings of "
                            "translations; set translate.backend=torch")
        return searcher.search(sources, most, settings, barred)
    src = padded(sources, model.output_weight.device)
    numbers = [line.number for line in lines]
    return search_batch(model, src, lengths, most, given, numbers, settings, seed, stepper, barred)


def search_batch(
    model: Transformer, src: Tensor, lengths: Sequence[int], most: Sequence[int], given: Sequence[Sequence[int]],
    numbers: Sequence[int], settings: config.Translate, seed: int, stepper: MakeStepper, barred: tuple[int, ...],
) -> list[list[Candidate]]:
    """deepnmt's own search in one batch of sources of any kind; the best hypotheses come first.

    Args:
        src: as the model's `encode` takes them, token ids [B, S] or others.
        lengths: of the sources, as the encoder counts them.
        most: of each source, the most tokens of a hypothesis.
        given: token ids that the hypotheses of each begin with.
        numbers: their line numbers.
        barred: tokens that are not chosen.
    """
    device = model.output_weight.device
    width = getattr(settings, SEARCHES[settings.method].width)
    state = stepper(model, src, torch.tensor(lengths, device=device), width, max(most))
    limits = torch.tensor(most, device=device)
    prefixes = padded(given, device) if any(given) else None
    rules = Rules(barred, settings.min_length, settings.no_repeat_ngram, prefixes)
    penalty = LengthPenalty(settings.length_penalty, settings.alpha)
    if settings.method == "beam":
        return beam_search(state, limits, width, settings.nbest, penalty, settings.patience, settings.finish, rules)
    if settings.method == "greedy":
        return decode_independently(state, limits, width, choose_greedily, penalty, rules)
    uniforms = torch.zeros(len(numbers), width, max(most))
    for row, number, limit in zip(uniforms, numbers, most, strict=True):
        generator = np.random.default_rng((seed, number))
        row[:, :limit] = torch.from_numpy(generator.random((width, limit), dtype=np.float32))
    sampler = make_sampler(uniforms.to(device), settings.temperature, settings.top_k, settings.top_p, settings.epsilon)
    return decode_independently(state, limits, width, sampler, penalty, rules)


def most_steps(model: Transformer, settings: config.Translate, length: int, given: int = 0) -> int:
    """The longest translation of a sentence of `length` tokens that begins with `given` ones."""
    longest = longest_translation(model, length)
    by_ratio = int(min(settings.max_ratio * length, longest)) + settings.max_extra
    return min(longest, max(given + 1, by_ratio))


def sentences_that_fit(model: Transformer, length: int, steps: int, width: int) -> int:
    """How many sentences of `length` tokens there is memory for; `width` hypotheses of each. At least one on a GPU,
    where too little memory is an error; on a CPU the kernel may end the process."""
    device = model.output_weight.device
    count = int(0.9 * free_memory(device)) // model.decoding_bytes(length, steps, width)
    return count if device.type == "cpu" else max(count, 1)


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Token ids [B, T], pad behind the shorter rows."""
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=PAD).to(device)


def one_line(text: str) -> str:
    """`text` with spaces in place of line breaks and tabs, which a vocabulary with byte pieces can produce."""
    return " ".join(text.splitlines()).replace("\t", " ")
