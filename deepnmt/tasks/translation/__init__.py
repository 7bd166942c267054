"""Translation, from one language to another: `task: translation`."""

LINE = "from one language to another"
