"""The read side, from rows and files only: what `compare` prints, and figures and pages show.

load       rows, and the rows of a name
uses       what a use, a method and a setting are
compare    one configuration over another, with its interval
pair       one result over another
best       methods at equal K and each at its own best K
claims     SSD against the strongest other use of as many GPUs, and which verdicts hold

This needs neither MPI nor a GPU.
"""
