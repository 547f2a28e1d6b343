"""Reports faults of a machine for a run, without starting the run.

facts     reads the machine before MPI starts, then starts the ranks, which open and close a session
checks    turns these facts into the lines of a table, by pure functions
command   is the command
"""
