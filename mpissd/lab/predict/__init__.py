"""Predicts the durations of decoding rounds, for the predictions of `run` and the advice of `plan`.

costs       holds the durations that make up a round: host work by phase, forwards by row count
derive      finds a configuration's durations in a device profile, or derives them from others
simulation  simulates rounds: long-run means of many configurations, or one run's recorded rounds

Nothing here needs MPI or a GPU.
"""
