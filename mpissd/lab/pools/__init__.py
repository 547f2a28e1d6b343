"""Sizes a draft pool: how many targets one draft serves, and what another use of the GPUs brings.

durations   what the forwards and the host work of a shared draft take
fates       what a round of one target accepts, and which of its outcomes hit
simulation  the shared draft, forward by forward, for up to thousands of targets; replays of runs
theory      the same means by queueing theory
predict     a predicted row of several groups
search      the pools that fit on N GPUs, beside replicas of other uses; advice: what plan says

Pure NumPy: needs neither MPI nor a GPU.
"""
