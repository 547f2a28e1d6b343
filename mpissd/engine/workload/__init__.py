"""Workloads: pairs of workers (target, draft) that the decoding loops drive."""
