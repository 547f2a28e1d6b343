"""Watches the ranks of a job from outside and names the one at fault when the job cannot go on.

Each host has one small process, the warden, that watches its ranks and outlives them. It sees a
rank that was killed or stopped, or that is stuck in a library that holds Python's lock. It prints
one line with the rank and its phase, and ends the other ranks.
"""
