"""Predicts the durations of decoding rounds, for the predictions of `run` and for `plan`.

    costs       the durations that make up a round: host work by phase, forwards by row count
    derive      finds a job's durations in a device profile, or derives them from others
    simulation  simulates rounds: long-run means of many jobs, or the recorded rounds of one run

This package needs neither MPI nor a GPU.
"""
