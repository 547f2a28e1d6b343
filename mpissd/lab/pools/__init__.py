"""Sizes a draft pool: how many targets one draft serves, compared with other uses of the GPUs.

durations   seconds of a shared draft's forwards and host work
fates       accepted tokens and hits of a target's rounds
simulation  the shared draft, forward by forward, for up to thousands of targets; replays of runs
theory      the same means by queueing theory
predict     a predicted row of several groups
search      the pools that fit on N GPUs, and replicas of other uses; advice: plan's text

Pure NumPy: needs neither MPI nor a GPU.
"""
