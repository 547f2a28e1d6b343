"""The command `plan`: predicts which configuration decodes fastest on given GPUs.

candidates  lists the configurations that fit in memory, and simulates their tokens/s
plan        finds the fastest, with its uncertainty
screen      prints the answer as text or JSON, with the command line that runs it

Nothing here needs MPI or a GPU.
"""
