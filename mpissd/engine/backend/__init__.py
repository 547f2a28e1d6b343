"""Compute devices behind one interface: numpy (the reference), cupy (GPUs), and emulated (waits for
modelled times)."""
