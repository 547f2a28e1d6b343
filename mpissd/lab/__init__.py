"""Commands for measurements: they decode and time, predict speeds, and compare results."""
