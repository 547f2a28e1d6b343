"""Whole measured jobs: set-up, warm-up, measured rounds, one row."""
