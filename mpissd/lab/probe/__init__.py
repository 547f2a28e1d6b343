"""The command `probe`: measures a pair of models on a machine, and saves a device profile."""
