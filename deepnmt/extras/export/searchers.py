"""The searches of other programs, by the names that `translate.backend` gives them."""

from deepnmt.extras.export.searcher import load_exported as ctranslate2

__all__ = ["ctranslate2"]
