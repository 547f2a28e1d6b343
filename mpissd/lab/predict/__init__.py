"""Predicts the durations of rounds, from which `run` replays its rows and `plan` advises.

costs       seconds of a round's pieces: host work by phase, forwards by row count
derive      a job's measured and derived forwards and host costs, from a profile
simulation  the model of a round: long-run means of many configurations, and a run's rounds

Pure NumPy: needs neither MPI nor a GPU.
"""
