"""`deepnmt tune`: finds learning rates on a small copy of a recipe, by what the source is worth."""
