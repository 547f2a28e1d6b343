"""An HTTP server in two halves: clients connect to the process `front`, and MPI ranks decode.

The two halves communicate over a local socket (`protocol`). The front never imports MPI, CuPy or
Numba. `replicas` lists several servers that write their addresses into a shared folder.
"""
