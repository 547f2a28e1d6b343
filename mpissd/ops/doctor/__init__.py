"""Finds what is wrong with a machine for a run, without starting the run.

facts     the records of what was seen of the launcher, of hosts, of ranks and of a session
host smi launcher ranks trial      gather facts; a driver is asked in a child with a time limit
check_*   turn facts into findings, by pure functions; one file for each topic
table     prints the findings and the verdict
examine   is the command
"""
