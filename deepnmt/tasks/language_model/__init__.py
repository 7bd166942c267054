"""Language models, a decoder by itself that continues text: `task: language_model`."""

LINE = "a decoder by itself that continues text"
