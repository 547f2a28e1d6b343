"""Measures how close forwards, all-reduces and launches come to a GPU's hardware limits."""
