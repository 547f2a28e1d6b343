"""The command `plan`: predicts which configuration decodes fastest on given GPUs.

    candidates  lists the configurations that fit in memory, and simulates their tokens/s
    plan        finds the fastest configuration, and how uncertain that prediction is
    screen      prints the result as text or JSON, with the command that runs this configuration

This package needs neither MPI nor a GPU.
"""
