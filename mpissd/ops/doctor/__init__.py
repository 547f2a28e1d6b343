"""Reports what is wrong with a machine for a run, without starting the run.

machine   reads what shows before MPI starts: Python, the MPI library, mpirun, GPUs and their driver
ranks     starts the ranks, compares what they see, opens and closes a session as a run would
checks    turns these facts into the lines of a table, by pure functions
command   is the command
"""
