"""Faster operations in the place of the model's own (`parallel.overrides`), see `deepnmt.model.overrides`."""
