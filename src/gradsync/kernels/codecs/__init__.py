"""The kernels of the codecs: one module for each family, and ``packing`` (bits) and ``block_layout`` (constants)."""
