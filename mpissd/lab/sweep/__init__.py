"""The command `sweep`: measures all configurations of a grid in one job, and compares them."""
