"""Nouns that every wing speaks of; NumPy alone."""
