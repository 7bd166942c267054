"""A task as somebody may add it: a decoder-only language model of the toy task's random walks.

tests/training/test_second_task.py drops this folder into `deepnmt/tasks`.
"""

LINE = "random walks over an alphabet"
