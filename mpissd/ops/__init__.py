"""Tools for clusters: a doctor for machines, a watchdog of ranks, and requests to Slurm."""
