"""The command `probe`: measures what a machine gives a pair of models, and saves a device
profile."""
