"""Sizes a draft pool: how many targets one draft serves, and what another use of the GPUs brings.

durations   what the forwards and the host work of a shared draft take
fates       what a round of one target accepts, and which of its outcomes hit
simulation  the shared draft, forward by forward, for up to thousands of targets

Pure NumPy: needs neither MPI nor a GPU.
"""
