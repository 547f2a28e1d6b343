"""Compute devices with one small interface: numpy (the reference), cupy (GPUs), emulated (a
model)."""
