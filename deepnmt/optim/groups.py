"""Parameter groups: which parameters share a weight decay, a factor of the learning rate and Adam's eps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from deepnmt import config
from deepnmt.config.choices import OPTIMIZERS
from deepnmt.model.blocks import SIDES, LayerPosition, Rule
from deepnmt.model.transfer import factors_of


class GroupKey(NamedTuple):
    """What the parameters of a group have in common: weight decay, the factor of their learning rate, which is 0 if
    they are frozen, whether they are matrices that Muon updates, Adam's eps, and what of the factor is their part's in
    `optimizer.lr_factors`."""

    weight_decay: float
    factor: float
    muon: bool
    eps: float
    part: float = 1.0


def parameter_groups(parameters: Mapping[str, nn.Parameter], recipe: config.Recipe) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, one for each `GroupKey`, whose `factor` `set_rate` multiplies the rate by."""
    groups: dict[GroupKey, list[nn.Parameter]] = {}
    for name, p in parameters.items():  # a weight that ZeRO-3 has partitioned is flat and empty
        groups.setdefault(group_key(name, getattr(p, "ds_shape", p.shape), recipe), []).append(p)
    dicts = [{"params": groups[key], **key._asdict()} for key in sorted(groups, reverse=True)]
    for group in dicts:
        if group["muon"]:
            del group["eps"]  # Muon's is another thing
    return dicts


def group_key(name: str, shape: Sequence[int], recipe: config.Recipe) -> GroupKey:
    """The group of a parameter.

    If `decay_norms_and_biases` is false, matrices are decayed, and vectors and scalars (biases, gains of norms, ω) are
    not. What is frozen has neither rate nor decay. A block may have another rule for parameters of its own.
    """
    settings, rule = recipe.optimizer, _rule_of(name, recipe.model)
    if any(is_in(part, name) for part in recipe.train.freeze):
        return GroupKey(0.0, 0.0, muon=False, eps=settings.eps)
    part = 1.0
    for pattern, factor in settings.lr_factors.items():
        if is_in(pattern, name):
            part = factor
    decayed = settings.decay_norms_and_biases is not False or len(shape) > 1
    if rule.decayed is not None:
        decayed = rule.decayed
    muon = OPTIMIZERS[settings.name].whole_matrices and len(shape) == 2 and ".layers." in name and rule.muon
    carried = factors_of(name, recipe.model, muon)
    return GroupKey(carried.decay * settings.weight_decay if decayed else 0.0,
                    carried.rate * rule.factor * part, muon, carried.eps * settings.eps, part)


def _rule_of(name: str, model: config.Model) -> Rule:
    """The rule of the parameter's block, by its name as in `encoder.layers.3.rule.a` or `encoder.norm.weight`."""
    side, _, rest = name.partition(".")
    found = re.fullmatch(r"(?:layers\.\d+\.rule|norm)\.(.*)", rest)
    if side not in SIDES or found is None:
        return Rule()
    return LayerPosition.of(model, side, 0).block.parameter_rule(found[1])


def is_frozen(side: str, freeze: Iterable[str]) -> bool:
    """Whether the parts of `train.freeze` hold all layers of a side: a layer of any name."""
    return any(is_in(part, f"{side}.layers.any") for part in freeze)


def is_in(part: str, name: str) -> bool:
    """Whether a part of a model has the parameter of this name: the part is its name, the beginning of it, or a pattern
    of one of these with `*`."""
    return fnmatchcase(name, part) or fnmatchcase(name, f"{part}.*")
