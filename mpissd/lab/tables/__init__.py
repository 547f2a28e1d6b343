"""Reads result rows and compares them: for the command `compare`, the figures and the docs.

    load       finds and reads rows
    uses       groups rows by mode, options, and numbers of ranks and drafted tokens
    compare    computes the speedup of one configuration over another, with its interval
    pair       compares two result rows
    best       compares modes at equal K (tokens drafted a round), and each at its own best K
    claims     compares SSD with the strongest alternative on as many GPUs

This package needs neither MPI nor a GPU.
"""
