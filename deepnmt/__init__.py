"""deepnmt: a DeepSpeed trainer for very deep encoder-decoder Transformers."""

__version__ = "0.2.0"
