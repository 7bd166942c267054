"""Masked language models, as BERT: `task: masked_lm`."""

LINE = "an encoder that fills in masked tokens"
