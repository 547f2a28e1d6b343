"""Measures a run: it calibrates the job, measures its rounds, and writes the result row."""
