"""The sets of operations that `parallel.overrides` may list."""

SETS = {"triton": "replacements"}  # from a name to a module of this folder
