"""Sweeps: a grid's text, its configurations in order, how long they take, which were best."""
