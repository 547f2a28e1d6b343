"""Reads result rows and compares them: for the command `compare`, the figures and the docs.

load       finds and reads rows
uses       groups rows by what is run on how many GPUs: method, setting, K
compare    computes the speedup of one configuration over another, with its interval
pair       compares two result rows
best       compares methods at equal K, and each at its own best K
claims     compares SSD with the strongest alternative on as many GPUs

Nothing here needs MPI or a GPU.
"""
