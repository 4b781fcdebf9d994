"""The fused CPU kernels of the blockwise codecs. Whoever imports a module of this package imports Numba."""
