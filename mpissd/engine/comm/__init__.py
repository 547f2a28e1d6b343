"""Communication between ranks: their roles, the all-reduces of the target ranks, and the messages
of the target's rank 0 with the draft rank and with the other target ranks.

Outside engine/session, lab/ and __main__, only this package imports mpi4py.
"""
