"""Translation by a decoder alone beside an encoder-decoder: as many parameters, the same tokens, one vocabulary.

Both read every pair of the text, none filtered out, as often as each other. The decoder-only models have as many layers
as the two stacks together, and an FFN as wide as makes the parameters equal; they are trained with a loss on the target
and with one on both sides. Runs are those of `long_runs`, which the same command takes up again.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from deepnmt.config import Model, Recipe, check_recipe, dump_recipe
from deepnmt.config.load import override, with_settings
from deepnmt.data.prepared import open_prepared
from deepnmt.errors import UserError
from deepnmt.files import write_text
from deepnmt.tasks.language_model.text import PreparedText
from deepnmt.training.dry_run import count_parameters, micro_batches
from deepnmt.training.task import find_task, prepare
from studies.long_runs import Plan, report, run_plan

CLOSE = 0.02  # of the parameters, by which the models may differ
BASELINE: dict[str, list[str]] = {"encoder_decoder": []}
ARMS = {"decoder_only_target": ["train.loss_on=target"], "decoder_only_both": ["train.loss_on=both"]}


def encoder_decoder(recipe: Recipe, output: Path) -> Recipe:
    """The recipe of the encoder-decoder, which reads every pair. Raises `UserError` if its text is not two files."""
    text = recipe.data.train
    if text.corpora or text.tsv or text.tag or recipe.batch.update_tokens or not recipe.vocab.shared:
        raise UserError("decoder-only compares models of one corpus, src and trg without a tag, one vocabulary, and "
                        "batch.update_tokens: null; give such a recipe")
    return with_settings(recipe, {
        "data.folder": str(output / "data" / "encoder_decoder"), "data.filters.max_ratio": 1e9,
        "data.filters.drop_duplicates": False, "data.filters.drop_identical": False, "data.subword_variants": 0,
        "data.shard_pairs": 0, "train.valid_bleu": False, "train.best_by": "loss"})


def equal_model(model: Model, vocab: int) -> Model:
    """A decoder with the layers of both stacks, and as many parameters as the model. Raises `UserError` if it
    would have more without an FFN."""
    layers = model.encoder.layers + model.decoder.layers
    alone = with_settings(model, {"encoder": None, "decoder.layers": layers})

    def parameters(ffn: int) -> int:
        return count_parameters(with_settings(alone, {"ffn": ffn, "decoder.ffn": None}), vocab, vocab)

    each = parameters(4) - parameters(2)  # of two units; some blocks halve the FFN
    ffn = 2 + 2 * round((count_parameters(model, vocab, vocab) - parameters(2)) / each)
    if ffn < 2:
        raise UserError(f"a decoder of {layers} layers has more parameters than the model; give a wider FFN, model.ffn")
    return with_settings(alone, {"ffn": ffn, "decoder.ffn": None})


def decoder_only(recipe: Recipe, output: Path, settings: list[str]) -> Recipe:
    """The recipe of the decoder-only models, for the text of an encoder-decoder's that is prepared.

    Args:
        settings: changes.
    """
    data, vocab = recipe.data, open_prepared(recipe).vocabs()[1].size
    longest = 2 * (data.filters.max_tokens + 1)
    tree: dict[str, Any] = recipe.model_dump()
    tree["task"] = "language_model"
    tree["data"] = {"folder": str(output / "data" / "decoder_only"), "src_lang": data.src_lang,
                    "trg_lang": data.trg_lang, "block": longest, **{
                        name: {"src": text.src, "trg": text.trg} for name, text in (
                            ("train", data.train), ("valid", data.valid))},
                    "test": {name: {"src": text.src, "trg": text.trg} for name, text in data.test.items()}}
    tree["vocab"] = {"kind": recipe.vocab.kind, "model": data.folder}
    tree["batch"]["tokens"] = 2 * recipe.batch.tokens
    tree["model"] = {**equal_model(recipe.model, vocab).model_dump(), "max_length": longest, "encoder": None}
    tree["optimizer"]["lr_factors"] = {part: rate for part, rate in recipe.optimizer.lr_factors.items()
                                       if not part.startswith("encoder")}
    for assignment in settings:
        override(tree, assignment)
    made = check_recipe(tree, "the decoder-only recipe")
    PreparedText.prepare(made)
    ratio = _updates_of_a_pass(made) / _updates_of_a_pass(recipe)
    scaled = ("train.updates", "train.save_every", "train.validate_every", "schedule.warmup")
    named = {assignment.partition("=")[0] for assignment in settings}
    return with_settings(made, {key: _scaled(made, key, ratio) for key in scaled if key not in named})


def _scaled(recipe: Recipe, key: str, ratio: float) -> int:
    section, name = key.split(".")
    return round(getattr(getattr(recipe, section), name) * ratio)


def _updates_of_a_pass(recipe: Recipe) -> float:
    """Updates of one process in a pass over the text, as `train --dry-run` counts them."""
    task = find_task(recipe.task)
    return task.stream(recipe, task.open(recipe, True)).epoch_size(0) / micro_batches(recipe)


def study(recipe: Recipe, output: Path, seeds: list[int], settings: list[str], seconds: float) -> str:
    """Makes the runs that are missing in `output/runs.jsonl`, seed by seed; returns the table of all.

    Args:
        settings: of the decoder-only models alone.
        seconds: after which no run is started.

    Raises:
        UserError: the text is not two files of pairs, or a pair is empty or too long; a command failed.
    """
    began = time.monotonic()
    two = encoder_decoder(recipe, output)
    prepare(two)
    one = decoder_only(two, output, settings)
    said = _equal(two, one)
    for seed in seeds:
        for made, name, arms in ((two, "encoder_decoder", BASELINE), (one, "decoder_only", ARMS)):
            file = output / f"{name}.yaml"
            write_text(file, dump_recipe(made))
            run_plan(Plan(file, arms, [seed], []), output / "runs.jsonl", output / "runs", [],
                     seconds - (time.monotonic() - began))
    runs = output / "runs.jsonl"
    table = report(runs, None) if runs.exists() and runs.stat().st_size else "no run is done yet"
    return f"{said}\n\n{table}"


def _equal(two: Recipe, one: Recipe) -> str:
    """A sentence about the models' sizes and what they read. Raises `UserError` if they are not equal."""
    pairs, text = open_prepared(two), PreparedText.open(one)
    size = text.vocab.size
    sizes = [count_parameters(recipe.model, size, size) for recipe in (two, one)]
    train = pairs.split("train")
    tokens = int(train.src_lengths.sum()) + int(train.trg_lengths.sum())
    if tokens != (others := text.counts("train")["tokens"]):
        raise UserError(f"the encoder-decoder would read {tokens:,} tokens a pass and the decoder {others:,}, since "
                        "data.filters leaves pairs out; give a clean text")
    apart = sizes[1] / sizes[0] - 1
    if abs(apart) > CLOSE:
        raise UserError(f"the models have {sizes[0]:,} and {sizes[1]:,} parameters, more than {CLOSE:.0%} apart; "
                        "give a wider model")
    passes = [recipe.train.updates / _updates_of_a_pass(recipe) for recipe in (two, one)]
    return (f"encoder-decoder {two.model.encoder.layers}L-{two.model.decoder.layers}L, FFN {two.model.ffn}: "
            f"{sizes[0]:,} parameters, {two.train.updates:,} updates, {passes[0]:.2f} passes\n"
            f"decoder-only {one.model.decoder.layers}L, FFN {one.model.ffn}: {sizes[1]:,} parameters ({apart:+.2%}), "
            f"{one.train.updates:,} updates, {passes[1]:.2f} passes\n"
            f"a pass has {tokens:,} source and target tokens; perplexity is of the targets of the validation text")
