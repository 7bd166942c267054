"""What the commands do: perplexities of test texts, scores of lines, continuations of a prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import cast

import numpy as np

from deepnmt.checkpoint.checkpoint import require_model
from deepnmt.config import Model, Recipe
from deepnmt.data.prepared import REMEDY
from deepnmt.data.tables import is_whole
from deepnmt.data.text import read_lines
from deepnmt.decode.formats import open_output
from deepnmt.decode.translate import check_files
from deepnmt.errors import UserError
from deepnmt.evaluate.evaluate import file_beside, recipe_of_run, require_different
from deepnmt.files import make_parent_folder, make_run_folder, reporting, sha256, table, write_json
from deepnmt.model.loss import perplexity
from deepnmt.processes.ranks import Ranks
from deepnmt.progress import print_status
from deepnmt.tasks.language_model.model import Loaded, continue_text, load, score_stream
from deepnmt.tasks.language_model.settings import LanguageRecipe
from deepnmt.tasks.language_model.task import figures
from deepnmt.tasks.language_model.text import PreparedText, texts_of
from deepnmt.tokens import EOS


def _load(recipe: Recipe, checkpoint: str | None, ranks: Ranks) -> Loaded:
    return ranks.raise_everywhere(lambda: load(Path(checkpoint or recipe.run), ranks.device))


def evaluate_run(
    recipe: Recipe, tests: list[str] | None, context: int, checkpoint: str | None, ranks: Ranks,
    expected: Model | None = None,
) -> str:
    """A table of perplexities; `RUN/perplexity.json` has the same, for chosen texts, another folder of texts,
    checkpoint, context or window a file beside it. Every rank scores a share. Collective.

    Raises:
        UserError: there is no such test, the context leaves no room, or the text has another vocabulary than the model;
            or see `_require_prepared`.
    """
    data = PreparedText.open(recipe, texts=False)
    window = texts_of(recipe).block
    limit = recipe.model.max_length
    if not 0 <= context < window <= limit:
        raise UserError(f"--context is {context} and data.block {window}; the context must be 0 or more and below "
                        f"data.block, and that at most model.max_length ({limit})")
    loaded = _load(recipe, checkpoint, ranks)
    require_model(loaded.checkpoint, expected)
    if loaded.vocab.fingerprint != data.vocab.fingerprint:
        raise UserError(f"{data.folder} was prepared with another vocabulary than that of {loaded.checkpoint}; set "
                        "data.folder to the text that the run was trained with")
    named = [name.removeprefix("test.") for name in data.manifest["splits"] if name.startswith("test.")]
    for name in tests or []:
        if name not in (*named, "valid"):
            raise UserError(f"--test {name} is not prepared; {data.folder} has {', '.join([*named, 'valid'])}")
    require_different(tests or named)
    _require_prepared(recipe, data, tests or [*texts_of(recipe).test] or ["valid"])
    if ranks.first:
        make_run_folder(Path(recipe.run))  # before the work
    rows = [("text", "words", "tokens", "perplexity a word", "a token", "bits a byte")]
    scores = {}
    for name in tests or named or ["valid"]:
        split = "valid" if name == "valid" else f"test.{name}"
        tokens, documents = data.documents(split)
        every = score_stream(loaded.model, tokens, documents, window, context, max(recipe.batch.tokens, window),
                             ranks.device, slice(ranks.rank, None, ranks.world))
        [nll] = ranks.sum([-float(every.sum())])
        counts = data.counts(split)
        measured = figures(nll, counts)
        scores[name] = {**measured, "perplexity": perplexity(nll, counts["tokens"]), "nll": nll, **counts}
        rows.append((name, f"{counts['words']:,}", f"{counts['tokens']:,}", f"{measured['word_perplexity']:.2f}",
                     f"{scores[name]['perplexity']:.2f}", f"{measured['bits_per_byte']:.4f}"))
    if ranks.first:
        parts = [f"context_{context}"] if context else []
        own = recipe_of_run(recipe)
        if window != texts_of(own).block:
            parts.append(f"block_{window}")
        if data.folder != Path(own.data.folder):
            parts.append(str(data.folder))
        file = file_beside("perplexity", recipe, [checkpoint] if checkpoint else [], [*parts, *(tests or [])])
        with reporting(str(file), "free disk space, or give write permission"):
            write_json(file, {
                "checkpoint": loaded.checkpoint.name, "update": loaded.update, "window": window, "context": context,
                "texts": scores})
        print_status(f"perplexities are in {file}")
    return table(rows)


def _require_prepared(recipe: Recipe, data: PreparedText, names: Sequence[str]) -> None:
    """Raises `UserError` if a folder was prepared from others of these texts than the recipe names."""
    text, of_run = texts_of(recipe), texts_of(recipe_of_run(recipe))
    files = PreparedText.files(cast(LanguageRecipe, recipe))
    for name in names:
        setting = "valid" if name == "valid" else f"test.{name}"
        asked, before = ({**texts.test, "valid": texts.valid}.get(name) for texts in (text, of_run))
        if asked is None:  # only the folder has it
            continue
        if asked == before and data.folder != Path(of_run.folder):  # a folder that need not have the run's texts
            continue
        inputs = data.manifest["inputs"].get(setting)
        if inputs is None:
            raise UserError(f"data.{setting} is not prepared in {data.folder}; choose others with --test, or {REMEDY}")
        if not all(file.is_file() for file in files[setting]):  # what was prepared may go
            continue
        if [sha256(file) for file in files[setting]] != [entry["sha256"] for entry in inputs]:
            raise UserError(f"data.{setting} is another text than {data.folder} was prepared from; restore it, or "
                            f"{REMEDY}")


def score_file(recipe: Recipe, source: str, output: str, pieces: bool, checkpoint: str | None, ranks: Ranks) -> None:
    """Writes the log-probability of every line, each as a text of its own. The first rank does it.

    Raises:
        UserError: a line is longer than the model can read, or the files cannot be used.
    """
    loaded = _load(recipe, checkpoint, ranks)
    if not ranks.first:
        return
    if output != "-":
        make_parent_folder(Path(output))
    target = check_files([source], output, Ranks.alone())  # no other process reads or writes
    limit = loaded.recipe.model.max_length
    file = None if source == "-" else Path(source)
    lines = [line.strip() for line in read_lines(file)]
    encoded = loaded.vocab.encode_batch(lines)
    for number, ids in enumerate(encoded, 1):
        if len(ids) >= limit:
            where = source if file else "standard input"
            raise UserError(f"{where}, line {number}: has {len(ids) + 1} tokens with its end, but the model reads "
                            f"at most {limit} (model.max_length); divide the line")
    lengths = np.array([len(ids) + 1 for ids in encoded], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.array(list(chain.from_iterable([*ids, EOS] for ids in encoded)), dtype=np.int64)
    window = int(lengths.max(initial=1))
    scores = score_stream(loaded.model, tokens, offsets, window, 0, max(recipe.batch.tokens, window), ranks.device)
    with open_output(target) as stream:
        for line, ids, begin, end in zip(lines, encoded, offsets[:-1], offsets[1:], strict=True):
            total = float(scores[begin:end].sum())
            if pieces:
                names = loaded.vocab.to_pieces([*ids, EOS])
                each = [[name, round(float(value), 6)] for name, value in zip(names, scores[begin:end], strict=True)]
                stream.write(json.dumps({"text": line, "score": total, "pieces": each}, ensure_ascii=False) + "\n")
            else:
                stream.write(f"{total:.4f}\n")
    words = sum(len(line.split()) + 1 for line in lines)
    if lines:
        nll = -float(scores.sum())
        print_status(f"{len(lines):,} lines, perplexity {perplexity(nll, words):.2f} a word, "
                     f"{perplexity(nll, len(tokens)):.2f} a token")


def sample_text(
    recipe: Recipe, prompt: str, count: int, length: int, temperature: float, top_k: int, top_p: float,
    checkpoint: str | None, ranks: Ranks,
) -> list[str]:
    """Continuations of a prompt, with it in front. Where it has several lines, each but the last ends.

    Raises:
        UserError: the prompt is no text; or it and the continuation are longer than the model can read.
    """
    if not is_whole(prompt):
        raise UserError(f"--prompt is {prompt!r}, which is not UTF-8; convert it, for example with iconv -t UTF-8")
    loaded = _load(recipe, checkpoint, ranks)
    lines = loaded.vocab.encode_batch(prompt.split("\n"))
    ids, limit = list(chain.from_iterable([*line, EOS] for line in lines))[:-1], loaded.recipe.model.max_length
    if len(ids) + length > limit:
        raise UserError(f"--prompt has {len(ids)} tokens, and --tokens is {length}, but the model reads at most "
                        f"{limit} (model.max_length) together; set --tokens lower")
    drawn = continue_text(loaded.model, ids, count, length, recipe.seed, temperature, top_k, top_p)
    return ["\n".join(_lines(loaded, [*ids, *each])) for each in drawn]


def _lines(loaded: Loaded, ids: list[int]) -> list[str]:
    """The text of tokens, a line for each that an eos ends."""
    lines: list[list[int]] = [[]]
    for token in ids:
        if token == EOS:
            lines.append([])
        else:
            lines[-1].append(token)
    return [loaded.vocab.decode(line) for line in lines]
