"""Guided alignment (`train.guided_alignment`): its loss, and the links of the micro-batches that it needs."""
