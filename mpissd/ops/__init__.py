"""Tools for jobs on clusters: the doctor checks a machine, the warden finds lost ranks, and
`slurm` builds batch requests."""
