"""LayerNorm that computes in fp32, whatever the type of its input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerNorm(nn.LayerNorm):
    """(x - mean) / sqrt(variance + 1e-5) · weight + bias, over the last dimension. Ba et al. 2016, Layer Normalization.

    On a CPU PyTorch's 16-bit LayerNorm keeps mean and deviation in 16 bits for the backward pass and sums the gradients
    of weight and bias in 16 bits over all tokens (with 2,000 of them 11 eps off, here 0.3), so there all of it is done
    in fp32. On a GPU PyTorch does so by itself.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] to the same shape and type."""
        if x.dtype in (torch.float32, torch.float64) or x.device.type != "cpu":
            return super().forward(x)
        y = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return y.to(x.dtype)
