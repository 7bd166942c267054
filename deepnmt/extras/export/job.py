"""The export job: writes a model for another program, compares it with deepnmt's, and keeps it if it is the same."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepnmt import folders
from deepnmt.checkpoint.average import warn_if_outdated
from deepnmt.checkpoint.checkpoint import LoadedModel, find_checkpoint, load_model, weights_of
from deepnmt.config import Corpus, Recipe, dump_recipe
from deepnmt.data.prepared import PreparedData, on_this_machine
from deepnmt.data.text import Pair, read_pairs
from deepnmt.errors import UserError
from deepnmt.extras.export.card import model_card
from deepnmt.extras.export.exported import CARD, KIND, require_replaceable
from deepnmt.extras.export.proof import Engine, Native, Proof, compare
from deepnmt.extras.export.targets import EXPORTERS
from deepnmt.progress import print_status


@dataclass(frozen=True)
class Target:
    """How to write for a program, and to load what was written.

    Attributes:
        write, engine: from the model, the folder and a number format.
        vocabularies: the names of the SentencePiece models, which the job writes; none if `write` does.
    """

    write: Callable[[LoadedModel, Path, str], None]
    engine: Callable[[LoadedModel, Path, str], Engine]
    vocabularies: tuple[str, ...] = ("src.spm", "trg.spm")


def _ctranslate2() -> Target:
    from deepnmt.extras.export.ctranslate2 import Engine, write_ctranslate2

    return Target(write_ctranslate2, Engine)


def _huggingface() -> Target:
    from deepnmt.extras.export.huggingface import Engine, write_huggingface

    return Target(write_huggingface, Engine, vocabularies=())


def _onnx() -> Target:
    from deepnmt.extras.export.onnx import engine, write_onnx

    return Target(write_onnx, engine)


# Each imports its library only when asked for. To add one: a row.
TARGETS: dict[str, Callable[[], Target]] = {"ctranslate2": _ctranslate2, "huggingface": _huggingface, "onnx": _onnx}


def export_run(
    recipe: Recipe, to: str, checkpoint: str | Path | None = None, output: str | Path | None = None, *,
    precision: str = "fp32", text: str | None = None, lines: int = 1000, licence: str = "unknown",
) -> str:
    """Exports a run's model; returns lines on what was written and how it compares.

    Args:
        recipe: its `run` is exported.
        to: a name of `TARGETS`.
        checkpoint: a checkpoint or run folder to export instead; by default the run's average, else its newest.
        output: the output folder; by default one named `to` in the run folder.
        precision: the number format of the weights that are written.
        text: "SRC,REF", two text files to compare on; by default the recipe's validation text.
        lines: how many of its lines.
        licence: of the model, for its card.

    Raises:
        UserError: the program cannot compute the model, the folder holds something else or cannot be written, there is
            no text to compare on, or the exported model is not the same. Nothing is kept then.
    """
    target = TARGETS[to]()
    if precision not in (known := EXPORTERS[to].precisions):
        raise UserError(f"--precision is {precision}, but --to {to} writes {', '.join(known)}")
    folder = Path(output) if output is not None else Path(recipe.run) / to
    place = Path(os.path.realpath(folder))
    require_replaceable(folder)
    source = find_checkpoint(Path(checkpoint or recipe.run))
    warn_if_outdated(source)
    loaded = load_model(source)
    pairs = _pairs(loaded.recipe if checkpoint else recipe, text, lines)
    own = Native(loaded.model)
    lang, longest = loaded.recipe.data.trg_lang, loaded.recipe.model.max_length

    def write_and_compare(at: Path, form: str) -> Proof:
        print_status(f"writing the model for {to} in {form}")
        with folders.reporting(place, KIND):
            target.write(loaded, at, form)
        print_status(f"comparing with deepnmt on {len(pairs):,} lines")
        return compare(own, target.engine(loaded, at, form), loaded.vocabs, pairs, longest, lang)

    folders.recover(place)
    with folders.new_folder(place, KIND) as temporary:
        proof = write_and_compare(temporary, "fp32")
        faults = list(proof.faults())
        if faults:
            raise UserError(f"the model for {to} is not the same as that of {source}: {'; '.join(faults)}; nothing was "
                            "kept. Compare on other lines with --text, and report it if it stays")
        report, proofs = [f"{folder}: {proof.sentence()}"], {"fp32": proof.as_json()}
        if precision != "fp32":
            for file in temporary.iterdir():
                file.unlink()
            proof = write_and_compare(temporary, precision)
            report.append(f"weights in {precision}: {proof.sentence()}")
            proofs[precision] = proof.as_json()
        facts = {"format": to, "precision": precision, "checkpoint": str(source), "weights": weights_of(source),
                 "update": loaded.state.update, "proof": proofs}
        with folders.reporting(place, KIND):
            for name, vocab in zip(target.vocabularies, loaded.vocabs):
                (temporary / name).write_bytes(vocab.bytes)
            (temporary / "recipe.yaml").write_text(dump_recipe(loaded.recipe), encoding="utf-8")
            (temporary / CARD).write_text(model_card(to, loaded, recipe, proof, licence, precision),
                                         encoding="utf-8")
        folders.publish(temporary, place, folders.entries_of(temporary, place, KIND), facts, KIND)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    return "\n".join([*report, f"{size:.1f} MiB"])


def _pairs(recipe: Recipe, text: str | None, lines: int) -> Sequence[Pair]:
    """The first sentence pairs of the text to compare on. Raises `UserError`."""
    if text is not None:
        files = text.split(",")
        if len(files) != 2:
            raise UserError(f"--text is {text!r}, must be SRC,REF: two text files, for example test.en,test.de")
        return list(itertools.islice(read_pairs(Corpus(src=[files[0]], trg=[files[1]])), lines))
    if on_this_machine(recipe.data.valid):
        return list(itertools.islice(read_pairs(recipe.data.valid), lines))
    try:
        valid = PreparedData.open(recipe.data.folder).split("valid")
    except UserError:
        raise UserError("neither the recipe's validation text nor its prepared data is here to compare the models on; "
                        "name two text files with --text SRC,REF") from None
    return list(itertools.islice(zip(valid.src_text(), valid.trg_text(), strict=True), lines))
