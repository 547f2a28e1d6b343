"""Sweeps: read a grid, order its configurations, measure them, and rank methods."""
