"""Classification of sentences or pairs of sentences: `task: classify`."""

LINE = "an encoder that says what a sentence, or a pair, is"
