"""What only proves the project's claims; not installed, and nothing in `deepnmt` imports it."""
