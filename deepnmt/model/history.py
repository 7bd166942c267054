"""What goes from layer to layer, and the mixture of all earlier layers' outputs that DLCL starts a layer from.

`D` width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepnmt.model.norm import LayerNorm

# What a layer hands to the next: its output [..., D]; with a rule that `needs_history`, what is kept of the stack's
# input and of all layers below, and its output last. So layer l (from 0) is given l + 1 tensors then, layer 0 just one.
Stream = Tensor | tuple[Tensor, ...]


def newest(x: Stream) -> Tensor:
    """The output of the layer below [..., D]."""
    return x if isinstance(x, Tensor) else x[-1]


class Mixture(nn.Module):
    """Σ_{k≤l} w_k·y_k, y_0 the stack's input and y_k the output of the k-th of the l layers below, w trainable.

    Wang et al. 2019, Learning Deep Transformer Models for Machine Translation, section 3: w is row l of a triangular
    matrix, 1/(l+1) at first. Pre-norm form: every y_k counts as LN_k(y_k), normed once, by the first mixture above it.
    Post-norm form: LN_l(Σ w_k·y_k).
    """

    def __init__(self, below: int, width: int, pre_norm: bool) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.full((below + 1,), 1 / (below + 1)))
        self.norm = LayerNorm(width)
        self.pre_norm = pre_norm

    def forward(self, x: Stream) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The stream of the layer below to the mixture [..., D] and what is kept for the layers above.

        Raises:
            ValueError: if the stream does not hold one tensor for each weight.
        """
        kept = x if isinstance(x, tuple) else (x,)
        if self.pre_norm:
            kept = (*kept[:-1], self.norm(kept[-1]))
        mixed = torch.zeros_like(kept[0])
        for weight, y in zip(self.weights.unbind(), kept, strict=True):
            mixed = torch.addcmul(mixed, weight, y)  # keeps no product for the backward pass
        return (mixed if self.pre_norm else self.norm(mixed)), kept


class MixtureTop(nn.Module):
    """The output of a DLCL stack: the mixture of all its layers, in the pre-norm form with a LayerNorm on it."""

    def __init__(self, layers: int, width: int, pre_norm: bool) -> None:
        super().__init__()
        self.mix = Mixture(layers, width, pre_norm)
        self.norm = LayerNorm(width) if pre_norm else nn.Identity()

    def forward(self, x: Stream) -> Tensor:
        """The last layer's stream to the stack's output [..., D]."""
        return self.norm(self.mix(x)[0])
