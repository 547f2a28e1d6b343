"""What can be wrong with a machine, before a run finds out.

facts     what was seen: of the launcher, of each host, of each rank, of an opened session
host smi launcher ranks trial      gather facts; every question to a driver is a bounded child
check_*   judge facts: pure functions from Facts to findings, one file a topic
table     the findings as text, and the verdict
examine   the command
"""
