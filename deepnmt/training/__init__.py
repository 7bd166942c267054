"""Training: `trainer.py` is the job, to be read top to bottom; `updates.py` its loop; `task.py` what is trained."""
