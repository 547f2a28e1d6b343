"""Reports faults of a machine for a run, without starting the run.

machine   reads facts known before MPI starts: Python, the MPI library, mpirun, GPUs, their driver
ranks     starts the ranks, compares their facts, opens and closes a session as a run would
checks    turns these facts into the lines of a table, by pure functions
command   is the command
"""
