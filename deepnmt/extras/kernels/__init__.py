"""Faster operations in the place of the model's own: `parallel.overrides` lists their names.

A module of `SETS` has `REPLACEMENTS`, rows (owner, attribute, make): `make(plain)` returns what takes the place of the
owner's attribute, and computes the same. Its `check(device)` raises `UserError` if this machine cannot run them.
"""

SETS = {"triton": "replacements"}  # from a name to a module of this folder
