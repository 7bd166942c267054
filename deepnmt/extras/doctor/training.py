"""What the doctor does inside a training run: probes of the layers, and where a diverged run became non-finite."""

from deepnmt.extras.doctor.nonfinite import explain
from deepnmt.extras.doctor.training_probe import watch

__all__ = ["explain", "watch"]
