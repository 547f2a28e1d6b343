"""The read side: what `mpissd compare` (cli/commands.py) prints, from rows and files only.

load       rows, and the rows of a name
pair       one result over another
best       methods at equal K and each at its own best K
claims     SSD against the strongest other use of as many GPUs, and which verdicts hold

This needs neither MPI nor a GPU.
"""
