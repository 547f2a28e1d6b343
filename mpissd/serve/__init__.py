"""Requests that come and go: `front` is the process that clients talk to, `ranks` decode.

The two halves speak over a local socket (`protocol`). `http` is the front's side: no module of it
imports MPI, CuPy or Numba.
"""
