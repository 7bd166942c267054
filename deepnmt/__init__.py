"""deepnmt: a trainer for very deep encoder-decoder translation Transformers on DeepSpeed.

    import deepnmt

    run = deepnmt.train("my.yaml", {"train.updates": 300})    # or, once it is trained: deepnmt.load("runs/my")
    run.translate(["the old dog sees the house"], beam=5)

`load`, `train`, `prepare`, `average` and `read_recipe` are the Python API, `Run` is a trained model, and `UserError` is
what a mistake in a recipe, a file or an argument raises. They are imported at their first use, so that `import deepnmt`
needs neither torch nor time. See `deepnmt.api`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from deepnmt.version import __version__

if TYPE_CHECKING:
    from deepnmt.api import Hypothesis, Recipe, Run, Scored, average, load, prepare, read_recipe, train
    from deepnmt.errors import UserError

__all__ = ["Hypothesis", "Recipe", "Run", "Scored", "UserError", "__version__", "average", "load", "prepare",
           "read_recipe", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'deepnmt' has no attribute {name!r}")
    value = getattr(importlib.import_module("deepnmt.errors" if name == "UserError" else "deepnmt.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
