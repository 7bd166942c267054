"""Updates against gradients: how far each attention matrix moved between checkpoints, and the gradient it had.

Liu et al. 2020 (Admin), figures 5 and 11: gradients of the attention matrices are unbalanced, the optimizer's updates
are not. A norm is divided by the largest of its checkpoint, gradients by gradients and updates by updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from deepnmt.doctor.probes import matrices


@dataclass(frozen=True)
class Moved:
    """From one checkpoint to the next.

    Attributes:
        update: of the first checkpoint.
        until: of the second.
        gradients, updates: relative norms by matrix, as in `encoder.layers.0.self_attn.q`.
    """

    update: int
    until: int
    gradients: dict[str, float]
    updates: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def spread(self) -> tuple[float, float]:
        """The smallest relative norm among gradients and among updates: 1 means all alike."""
        return min(self.gradients.values()), min(self.updates.values())


def moved(
    update: int, until: int, before: Mapping[str, Tensor], after: Mapping[str, Tensor], gradients: Mapping[str, float]
) -> Moved:
    """Compares the weights of two checkpoints.

    Args:
        update, until: their updates.
        before, after: their weights by parameter name.
        gradients: the norms at `before` by matrix, as `gradient_probe.gradients` names them.
    """
    differences = [(name, after[name] - before[name]) for name in before]
    norms = {name: float(rows.norm()) for name, rows in matrices(differences) if "_attn." in name}
    return Moved(update, until, _relative({name: gradients[name] for name in norms}), _relative(norms))


def _relative(norms: dict[str, float]) -> dict[str, float]:
    top = max(norms.values(), default=0.0)
    return {name: value / top if top else 0.0 for name, value in norms.items()}
