"""Predicts a job's measurement, and advises which job to run.

costs       seconds of a round's pieces: host work by phase, forwards by row count
grid        the durations of many jobs' rounds, and the draws of their tokens and hits
derive      a job's measured and derived forwards and host costs, from a profile
simulation  the model of a round: simulates many configurations
row         a prediction with the keys of a result row
search      a pair's places on a machine, and the configurations that `plan` weighs there
advisor     which mode, T, K, fan-out and backup to run on given GPUs
verdict     how sure a prediction is: intervals, and the sentences that they allow
advice      plan's text, and the choice of a tree

Pure NumPy: needs neither MPI nor a GPU.
"""
