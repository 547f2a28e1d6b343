"""Communication between ranks: their roles, the all-reduces of the target ranks, and the messages
between the lead (the first target rank), the draft rank and the other target ranks.

Outside engine/session, lab/ and __main__, only this package imports mpi4py.
"""
