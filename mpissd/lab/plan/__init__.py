"""The command `plan`: which mode, T, D, K, fan-out and backup to run on given GPUs.

candidates  what could run: every T that fits, every choice there, and their simulated rates
plan        which of them is the fastest, and how sure that is
screen      the answer as text and JSON, with the command that runs it

Pure NumPy: needs neither MPI nor a GPU.
"""
