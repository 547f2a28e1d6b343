"""Requests that come and go: `front` is the process that clients talk to, `ranks` decode.

The two halves speak over a local socket (`protocol`). No module that the front imports imports MPI,
CuPy or Numba. `replicas` joins several servers by a shared `folder`.
"""
