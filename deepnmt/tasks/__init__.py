"""Tasks, what can be trained: a folder each, which the core finds and does not know. See `training/task.py`."""
