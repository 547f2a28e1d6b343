"""An HTTP server: `front` is the process that clients connect to, `ranks` decode.

The two halves communicate over a local socket (`protocol`). The front never imports MPI, CuPy or
Numba. `replicas` joins several servers by a shared folder.
"""
