"""Speech recognition: `task: speech`."""

LINE = "from speech to text"
