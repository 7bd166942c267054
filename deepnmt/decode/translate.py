"""The translation job: lines of text in, as many lines out, in the same order.

An empty line gives an empty line; a line that is too long is truncated, with a warning. Several processes share the
lines of one input. The output is UTF-8.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import logging
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from deepnmt import config
from deepnmt.checkpoint.average import warn_if_outdated
from deepnmt.checkpoint.checkpoint import LoadedModel, load_model, require_model
from deepnmt.data.text import arriving_lines, read_lines
from deepnmt.data.vocab import Vocabulary
from deepnmt.decode.next_tokens import LengthPenalty
from deepnmt.decode.search import Candidate, beam_search, choose_greedily, decode_independently, make_sampler
from deepnmt.decode.steppers import CachedStepper, MakeStepper
from deepnmt.device import free_memory, release
from deepnmt.errors import UserError
from deepnmt.files import atomic_write
from deepnmt.model.dropout import evaluating
from deepnmt.model.transformer import Transformer
from deepnmt.progress import Progress, no_progress, print_status, show_progress
from deepnmt.ranks import Ranks
from deepnmt.tokens import EOS, PAD

CHUNK = 10_000  # lines held in memory: they are sorted by length, translated, and written together

OutputFormat = Literal["text", "tsv", "jsonl"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hypothesis:
    """A translation: detokenised text on one line; its score (log-probability over length penalty); its number of
    tokens, without eos; whether it `ended` with eos or was truncated at the length limit."""

    text: str
    score: float
    log_prob: float
    tokens: int
    ended: bool


# -- the job -----------------------------------------------------------------------------------------------------------


def translate_files(
    folder: Path,
    source: str,
    target: str,
    settings: config.Translate,
    *,
    output_format: OutputFormat = "text",
    seed: int = 1,
    ranks: Ranks | None = None,
    stepper: MakeStepper = CachedStepper,
    expected: config.Model | None = None,
) -> int:
    """Translates a file with the model of a checkpoint or run folder, and returns how many lines it wrote.

    Args:
        folder: as for `checkpoint.load_model`.
        source: UTF-8 text, plain or .gz; "-" is standard input (with one process only). Lines of a pipe or a terminal
            are translated as they arrive.
        target: the output file, which appears when it is complete; "-" is standard output.
        settings: of the search.
        output_format: see `format_hypotheses`.
        seed: of sampling.
        ranks: several processes, see `translate_shards`; by default this one, on the CPU. Rank 0 writes and reports
            progress.
        stepper: the way to compute the next logits.
        expected: the model that the checkpoint must hold; None: any.

    Raises:
        UserError: a file cannot be read or written, or is not UTF-8; `output_format` has no room for the n-best list;
            the model is not the one `expected`.
    """
    ranks = ranks or Ranks.alone()
    if output_format == "text" and settings.nbest > 1:
        raise UserError(f"translate.nbest is {settings.nbest}, but the format text holds one translation a line; "
                        "choose the format tsv or jsonl, or set translate.nbest=1")
    if source == "-" and ranks.world > 1:
        raise UserError(f"standard input reaches one process only, but {ranks.world} were started; give an input file, "
                        "or start one process")
    lines_in, lines_out = (None if name == "-" else Path(name) for name in (source, target))
    if lines_in is not None and not lines_in.is_file():
        raise UserError(f"there is no input file {lines_in}; give an existing text or .gz file, or - for standard "
                        "input")
    if lines_in is not None and lines_out is not None and lines_out.exists() and lines_out.samefile(lines_in):
        raise UserError(f"output {lines_out} is the input file itself; give another output file")
    if lines_out is not None and lines_out.is_dir():
        raise UserError(f"output {lines_out} is a folder; give the name of a file in it")
    loaded = load_for_search(folder, settings, ranks, expected)
    begin = time.perf_counter()
    written = 0
    arriving = lines_in is None and _is_pipe(sys.stdin)
    texts = arriving_lines(sys.stdin.fileno(), "standard input") if arriving else [read_lines(lines_in)]
    with (show_progress("{:,} lines translated", unit=" lines", leave=False) as progress,
          open_output(lines_out if ranks.first else Path(os.devnull)) as out):
        for text in texts:
            for hypotheses in translate_shards(loaded.model, loaded.vocabs, text, settings, ranks, seed=seed,
                                               stepper=stepper, start=written,
                                               progress=progress if ranks.first else no_progress):
                written += 1
                out.write(format_hypotheses(written, hypotheses, output_format))
            out.flush()
    if not ranks.first:
        return 0
    seconds = time.perf_counter() - begin
    print_status(f"{written:,} lines in {seconds:.1f} s: {written / seconds:.1f} lines/s")
    return written


def _is_pipe(stream: TextIO) -> bool:
    """Whether a program or a person may be waiting for answers at the other end. Notebooks have no descriptor."""
    try:
        return not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False


def load_for_search(
    folder: Path, settings: config.Translate, ranks: Ranks, expected: config.Model | None
) -> LoadedModel:
    """Loads a model in the precision and on the device of a search; rank 0 warns of an outdated average.

    Raises:
        UserError: see `load_model`; the model is not the one `expected`.
    """
    loaded = load_model(folder)
    require_model(loaded.folder, expected)
    if ranks.first:
        warn_if_outdated(loaded.folder)
    cast_weights(loaded.model, settings.precision).to(ranks.device)
    return loaded


def cast_weights(model: Transformer, precision: Literal["fp32", "bf16"]) -> Transformer:
    """Casts the model's weights in place and returns it. The position table stays fp32."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@contextmanager
def open_output(target: Path | None) -> Iterator[TextIO]:
    """Opens standard output (None), or a file that appears under its name only when it is complete (see
    `files.atomic_write`).

    Raises:
        UserError: the file cannot be created, or the disk is full.
    """
    if target is None:
        out = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", newline="\n")  # in any locale
        try:
            yield out
        finally:
            out.detach()
        return
    opened = False
    try:
        with atomic_write(target) as stream:
            opened = True
            yield stream
    except OSError as error:
        if not opened:
            raise UserError(f"output {target} cannot be written: {error.strerror}; give a file in an existing, "
                            "writable folder") from None
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(f"output {target} cannot be written: no space is left; give a file on another disk") from None


def format_hypotheses(number: int, hypotheses: Sequence[Hypothesis], output_format: OutputFormat) -> str:
    """The output for line `number` (from 1), line end included; `hypotheses` best first.

    text: the best translation alone. tsv: a line "line, rank, score, text" for each hypothesis, rank from 1. jsonl: one
    object.
    """
    if output_format == "text":
        return hypotheses[0].text + "\n"
    if output_format == "tsv":
        return "".join(f"{number}\t{rank}\t{h.score:.6f}\t{h.text}\n" for rank, h in enumerate(hypotheses, start=1))
    return json.dumps({"line": number, "hypotheses": [asdict(h) for h in hypotheses]}, ensure_ascii=False) + "\n"


# -- any number of lines, on any number of processes -------------------------------------------------------------------


def translate_shards(
    model: Transformer,
    vocabs: tuple[Vocabulary, Vocabulary],
    lines: Iterable[str],
    settings: config.Translate,
    ranks: Ranks,
    *,
    seed: int = 1,
    stepper: MakeStepper = CachedStepper,
    progress: Progress = no_progress,
    warn: bool = True,
    start: int = 0,
) -> Iterator[list[Hypothesis]]:
    """`translate_lines` for any number of lines, shared among processes. Yields every line's hypotheses in order on
    rank 0, nothing on other ranks. Collective: all processes pass the same `lines` and exhaust the iterator.

    Works in chunks of `CHUNK` lines. Each process takes every `world`-th line of a chunk in order of length, so that
    all finish at about the same time; `progress` assumes that the others are as far as this process. Results are
    gathered as JSON; nothing is unpickled. `start`: lines translated before these.
    """
    stream = iter(lines)
    while chunk := list(itertools.islice(stream, CHUNK)):
        mine = sorted(range(len(chunk)), key=lambda i: (-len(chunk[i]), i))[ranks.rank :: ranks.world]
        translated = translate_lines(
            model, vocabs, [chunk[i] for i in mine], settings, seed=seed, numbers=[start + i + 1 for i in mine],
            stepper=stepper, warn=warn,
            progress=lambda own: progress(start + min(len(chunk), own * ranks.world)),  # noqa: B023 (called here only)
        )
        shard = [[i, [list(asdict(h).values()) for h in best]] for i, best in zip(mine, translated, strict=True)]
        shards = ranks.gather_bytes(json.dumps(shard).encode())
        start += len(chunk)
        if shards is not None:
            whole = {i: [Hypothesis(*h) for h in best] for part in shards for i, best in json.loads(part)}
            yield from (whole[i] for i in range(len(chunk)))
            progress(start)


def translate_lines(
    model: Transformer,
    vocabs: tuple[Vocabulary, Vocabulary],
    lines: Iterable[str],
    settings: config.Translate,
    *,
    seed: int = 1,
    numbers: Iterable[int] | None = None,
    stepper: MakeStepper = CachedStepper,
    progress: Progress = no_progress,
    warn: bool = True,
) -> list[list[Hypothesis]]:
    """Translates on the model's device.

    Args:
        model: in any mode, which is restored, and of any float type.
        vocabs: source and target.
        lines: texts. One without tokens gives one empty hypothesis; one longer than the model allows is truncated.
        settings: of the search.
        seed: of sampling. A line's samples depend on the seed, its number and the model alone.
        numbers: line numbers, for sampling and warnings; by default 1, 2, …
        stepper: the way to compute the next logits.
        progress: called after each batch with the number of lines done.
        warn: whether to warn of truncated lines.

    Returns:
        For each line, in the same order, at most `settings.nbest` hypotheses, best first.

    Raises:
        UserError: the model's scores are NaN, or there is no memory for a single line.
    """
    src_vocab, trg_vocab = vocabs
    texts = list(lines)
    ids = list(range(1, len(texts) + 1)) if numbers is None else list(numbers)
    longest = max_length(model)
    sources: list[list[int]] = []  # token ids with eos; none for an empty line
    for text, number in zip(texts, ids, strict=True):
        pieces = src_vocab.encode(text.strip())
        if warn and len(pieces) >= longest:
            log.warning("line %d has %d tokens; only its first %d are translated (model.max_length is %d)",
                        number, len(pieces), longest - 1, longest)
        words = src_vocab.split_tags(text.strip())[1]  # a line of tags alone is empty
        sources.append([*pieces[: longest - 1], EOS] if pieces and words else [])
    # Hypotheses searched at once for a sentence. A batch counts the tokens of each, and padding.
    width = {"beam": settings.beam, "greedy": 1, "sample": settings.nbest}[settings.method]
    order = sorted((i for i, source in enumerate(sources) if source), key=lambda i: (-len(sources[i]), i))
    results = [[Hypothesis("", 0.0, 0.0, 0, True)] for _ in texts]
    done, device = 0, model.output_weight.device
    with evaluating(model), torch.inference_mode():
        most = len(order)  # sentences of a batch, as long as there is memory for so many
        while done < len(order):
            longest = len(sources[order[done]])
            size = min(max(1, settings.batch_tokens // (longest * width)), most,
                       _sentences_that_fit(model, longest, _most_steps(model, settings, longest), width))
            batch = order[done : done + size]
            try:
                searched = _search(model, [sources[i] for i in batch], [ids[i] for i in batch], settings, width, seed,
                                   stepper, list(trg_vocab.tags.values()))
            except torch.OutOfMemoryError:
                searched = None  # outside of here, where the error keeps the tensors of the search
            if searched is None:
                most = len(batch) // 2
                if not most:
                    raise UserError(f"one line of {longest} tokens needs more memory than {device} has for it; set "
                                    "translate.beam or translate.max_ratio lower, or parallel.device=cpu")
                release(device)
                continue
            for i, candidates in zip(batch, searched, strict=True):
                results[i] = [Hypothesis(one_line(trg_vocab.decode(c.tokens)), c.score, c.log_prob, len(c.tokens),
                                         c.ended) for c in candidates]
            done += len(batch)
            progress(done)
    return results


def _search(
    model: Transformer, sources: Sequence[Sequence[int]], numbers: Sequence[int], settings: config.Translate,
    width: int, seed: int, stepper: MakeStepper, barred: Sequence[int],
) -> list[list[Candidate]]:
    """Searches one batch; the best hypotheses come first.

    Args:
        sources: token ids with eos.
        numbers: their line numbers.
        barred: tokens that no hypothesis may contain.
    """
    device = model.output_weight.device
    lengths = [len(source) for source in sources]
    most = [_most_steps(model, settings, n) for n in lengths]
    src = pad_sequence([torch.tensor(source) for source in sources], batch_first=True, padding_value=PAD).to(device)
    state = stepper(model, src, torch.tensor(lengths, device=device), width, max(most))
    limits = torch.tensor(most, device=device)
    penalty = LengthPenalty(settings.length_penalty, settings.alpha)
    if settings.method == "beam":
        return beam_search(state, limits, width, settings.nbest, penalty, settings.patience, settings.finish,
                           settings.min_length, barred)
    if settings.method == "greedy":
        return decode_independently(state, limits, width, choose_greedily, penalty, settings.min_length, barred)
    uniforms = torch.zeros(len(numbers), width, max(most))
    for row, number, limit in zip(uniforms, numbers, most, strict=True):
        generator = np.random.default_rng((seed, number))
        row[:, :limit] = torch.from_numpy(generator.random((width, limit), dtype=np.float32))
    return decode_independently(state, limits, width, make_sampler(uniforms.to(device), settings.temperature), penalty,
                                settings.min_length, barred)


def _most_steps(model: Transformer, settings: config.Translate, length: int) -> int:
    """The longest translation of a sentence of `length` tokens."""
    return min(max_length(model), max(1, int(settings.max_ratio * length) + settings.max_extra))


def _sentences_that_fit(model: Transformer, length: int, steps: int, width: int) -> int:
    """How many sentences of `length` tokens there is memory for, at least one; `width` hypotheses of each."""
    each = model.decoding_bytes(length, steps, width)
    return max(1, int(0.9 * free_memory(model.output_weight.device) / each))


def max_length(model: Transformer) -> int:
    """The setting `model.max_length`, eos included."""
    return model.encoder.input.positions.size(0)


def one_line(text: str) -> str:
    """`text` with spaces in place of line breaks and tabs, which a vocabulary with byte pieces can produce."""
    return " ".join(text.splitlines()).replace("\t", " ")
