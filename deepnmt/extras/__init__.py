"""Visitors: a folder each, which can be deleted without the core noticing. See `deepnmt.visitors`."""
