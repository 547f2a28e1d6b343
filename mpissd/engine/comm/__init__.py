"""The ranks' roles, the target ranks' collectives, and the messages between lead, draft, followers.

Outside engine/session, lab/ and __main__, only this package imports mpi4py.
"""
