"""Predicts what a job would measure, says which job to run, and why a result is not faster.

costs       what a round's pieces take: host work by phase, forwards by row count
recurrence  the round by round simulation of the loops in `decode`, replayed or from the laws
closed      its expectation without sampling, over many configurations at once
advisor     which mode, T, K, fan-out and backup to run on given GPUs
why         the largest gaps between a result row and its floor

Pure NumPy: needs neither MPI nor a GPU.
"""
