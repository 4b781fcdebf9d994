"""MPI as a transport, over mpi4py."""
