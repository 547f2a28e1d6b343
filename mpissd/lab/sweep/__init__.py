"""Sweeps: read a grid, order its configurations, predict their duration, and rank methods."""
