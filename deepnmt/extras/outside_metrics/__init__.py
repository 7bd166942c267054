"""The metrics of other programs (`metrics` in a recipe): in evaluation, in validation, and as what chooses."""
