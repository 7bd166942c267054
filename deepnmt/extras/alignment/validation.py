"""The alignment error of a validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from deepnmt.config import Recipe
from deepnmt.data.batching import collate, plan_eval
from deepnmt.data.prepared import PreparedData
from deepnmt.decode.align import align
from deepnmt.extras.alignment.annotations import Links
from deepnmt.model.attention_weights import layer_index
from deepnmt.model.dropout import evaluating
from deepnmt.model.transformer import Transformer
from deepnmt.processes.ranks import Ranks


def measure(recipe: Recipe, data: PreparedData) -> Callable[..., dict[str, float]] | None:
    """What measures sentences of the validation text; None if that has no word alignments."""
    if "alignments" not in data.manifest["splits"]["valid"]:
        return None
    return partial(_measure, recipe, data, Links(data, "valid"))


def describe(record: Mapping[str, Any]) -> str:
    """What a progress line says of a record."""
    if "alignment_error" in record:
        return f" alignment error {record['alignment_error']:.1%}"
    return ""


def _measure(recipe: Recipe, data: PreparedData, links: Links, rows: range, model: Transformer, ranks: Ranks,
             texts: object) -> dict[str, float]:
    """The alignment error rate of these sentences, 0 to 1, as `align` finds links in the guided layer; nothing if none
    has alignments. It is 1 - 2·|A∩G| / (|A| + |G|), A the links found and G the given ones (Och and Ney 2003, A
    Systematic Comparison of Various Statistical Alignment Models, eq. 21, where all given links are sure)."""
    split = data.split("valid").truncated(recipe.model.max_length)
    linked = [row for row in rows if links.of(row)]
    plan = plan_eval(split.src_lengths[linked], split.trg_lengths[linked], recipe.batch.tokens)
    layer = layer_index(recipe.train.guided_layer, len(model.decoder_layers))
    vocabs = data.vocabs()
    right = total = 0.0
    with evaluating(model), torch.inference_mode():
        for index in range(ranks.rank, len(plan), ranks.world):
            numbers = np.array(linked)[plan[index]]
            batch = collate(split, numbers, 0, ranks.device)
            targets = [split.targets[row].tolist() for row in numbers]
            aligned = align(model, layer, batch["src"], batch["src_lengths"], batch["trg_in"], targets, vocabs)
            for row, predicted in zip(numbers, aligned, strict=True):
                gold = set(links.of(row))
                right += len(gold & set(predicted))
                total += len(gold) + len(predicted)
    right, total = ranks.sum([right, total])
    if not total:
        return {}
    return {"alignment_error": 1 - 2 * right / total}
