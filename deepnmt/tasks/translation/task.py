"""Translation: prepared pairs of sentences, an encoder-decoder Transformer, validation by translating."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deepnmt.checkpoint.checkpoint import SRC_VOCAB, TRG_VOCAB
from deepnmt.config import Recipe
from deepnmt.data.batching import Stream
from deepnmt.data.mixing import stream_kind, training_stream
from deepnmt.data.prepared import PreparedData, open_prepared
from deepnmt.evaluate.metrics import make_scorers, outside_of
from deepnmt.parallel.ds_config import Layout
from deepnmt.parallel.engine import Engine
from deepnmt.processes.ranks import Ranks
from deepnmt.tasks.translation.collapse import collapse_note, settled
from deepnmt.tasks.translation.source_use import SourceUse, measure_validation_text
from deepnmt.tasks.translation.validate import validate
from deepnmt.training.dry_run import describe
from deepnmt.training.fine_tuning import check_parts
from deepnmt.training.profile import profile_for
from deepnmt.training.task import Figures, Look, Task
from deepnmt.training.transformers import start_transformer
from deepnmt.visitors import visitor_modules


def _check(recipe: Recipe) -> None:
    check_parts(recipe)
    if recipe.train.valid_bleu:
        for corpus in (recipe.data.valid, *recipe.data.valid.corpora.values()):
            make_scorers(corpus.trg_lang or recipe.data.trg_lang)
    scored = [name for name, metric in recipe.metrics.items() if metric.in_validation]
    if scored:
        make_scorers("", scored, outside_of(recipe))


def _stream(recipe: Recipe, data: PreparedData) -> Stream:
    return training_stream(recipe, data, stream_kind(recipe, data))


def _start(recipe: Recipe, layout: Layout, data: PreparedData, ranks: Ranks, initialise: bool) -> Engine:
    ratio = data.split("train").source_per_target
    return start_transformer(recipe, layout, data.vocabs(), ranks, initialise,
                             lambda: profile_for(recipe, data, ranks), ratio)


def _files(data: PreparedData) -> dict[str, bytes]:
    """The vocabularies. To put another file into every checkpoint, add its name and bytes here: it is hashed and
    checked like the others, and copied into averages and folded models."""
    source, target = data.vocabs()
    return {SRC_VOCAB: source.bytes, TRG_VOCAB: target.bytes}


def _prepare(recipe: Recipe, part: str) -> Path:
    from deepnmt.data.parts import WHOLE, Part
    from deepnmt.data.prepare import prepare  # which training does without

    return prepare(recipe, Part.parse(part) if part else WHOLE)


def _look(recipe: Recipe, data: PreparedData, engine: Engine, ranks: Ranks) -> dict[str, float]:
    use = SourceUse.mean(measure_validation_text(recipe, data, engine, ranks).values())
    return asdict(use) if use else {}


def _describe(record: Mapping[str, Any]) -> str:
    text = ""
    if "bleu" in record:
        text = f" BLEU {record['bleu']:.1f}"
    corpora = [f"{key.removesuffix('/bleu')} {value:.1f}" for key, value in record.items() if key.endswith("/bleu")]
    if corpora:
        text += f" ({', '.join(corpora)})"
    for visitor in visitor_modules("validation"):
        text += visitor.describe(record)
    if "source_gain" in record:
        text += (f" source {record['source_gain']:+.2f} common {record['encoder_common']:.2f} "
                 f"attention {record['cross_attention_entropy']:.2f}")
    return text


def _warn(recipe: Recipe, update: int, figures: Figures) -> str | None:
    use = SourceUse.of(figures)
    return collapse_note(recipe, update, use) if use else None


def _explain(record: Mapping[str, Any]) -> list[str]:
    use = SourceUse.of(record)
    if use is None:
        return []
    return [f"At the validation of update {record['update']}, {use}."]


TASK = Task(_check, open_prepared, PreparedData.verify_as_read, _stream, _start, validate, _files, prepare=_prepare,
            plan=describe, look=Look(settled, _look), describe=_describe, warn=_warn, explain=_explain)
