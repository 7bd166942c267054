"""Training: `trainer.py` is the job and reads downwards, `updates.py` its loop, `task.py` what is trained."""
