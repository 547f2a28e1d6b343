"""A measured run: calibration, the pass that counts, its row."""
