"""Compute devices with one interface: numpy (the reference), cupy (GPUs), and emulated (waits for
modelled times)."""
