"""Converts trained models for other programs, proves the result, and imports models of other programs."""
