"""Workloads, and the oracles that decide their tokens."""
