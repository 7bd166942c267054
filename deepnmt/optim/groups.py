"""Parameter groups: which parameters share a weight decay and a factor of the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from deepnmt import config
from deepnmt.config.choices import OPTIMIZERS


class GroupKey(NamedTuple):
    """What the parameters of a group have in common: weight decay, the factor of their learning rate, which is 0 if
    they are frozen, and whether they are matrices that Muon updates."""

    weight_decay: float
    factor: float
    muon: bool = False


def parameter_groups(parameters: Mapping[str, nn.Parameter], recipe: config.Recipe) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, one for each `GroupKey`, whose `factor` `set_rate` multiplies the rate by."""
    groups: dict[GroupKey, list[nn.Parameter]] = {}
    for name, p in parameters.items():  # a weight that ZeRO-3 has partitioned is flat and empty
        groups.setdefault(group_key(name, getattr(p, "ds_shape", p.shape), recipe), []).append(p)
    return [{"params": groups[key], **key._asdict()} for key in sorted(groups, reverse=True)]


def group_key(name: str, shape: Sequence[int], recipe: config.Recipe) -> GroupKey:
    """The group of a parameter.

    If `decay_norms_and_biases` is false, matrices are decayed, and vectors and scalars (biases, gains of norms, ω) are
    not. What is frozen has neither rate nor decay.
    """
    settings = recipe.optimizer
    if any(is_in(part, name) for part in recipe.train.freeze):
        return GroupKey(0.0, 0.0)
    factors = [factor for part, factor in settings.lr_factors.items() if is_in(part, name)]
    decayed = settings.decay_norms_and_biases is not False or len(shape) > 1
    muon = OPTIMIZERS[settings.name].whole_matrices and len(shape) == 2 and ".layers." in name
    return GroupKey(settings.weight_decay if decayed else 0.0, factors[-1] if factors else 1.0, muon)


def is_in(part: str, name: str) -> bool:
    """Whether a part of a model has the parameter of this name: the part is its name, the beginning of it, or a pattern
    of one of these with `*`."""
    return fnmatchcase(name, part) or fnmatchcase(name, f"{part}.*")


def set_rate(optimizer: Any, rate: float) -> None:
    """Sets the learning rate of every group; `optimizer` is PyTorch's, or one of DeepSpeed's around it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["factor"]
