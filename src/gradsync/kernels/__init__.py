"""All code that Numba compiles. Importing one of its modules imports Numba, which takes a second: import them late.

``base``, ``pointers`` and ``block_ops`` are the foundation of the others: LLVM intrinsics, then loops over one block.
``codecs/`` holds the kernels of the codecs and ``shm/`` those of the shared-memory communicator. The other modules have
the name of the module that calls them: ``lowrank``, ``onebit_adam``, ``small_parameters``, ``spikes``, ``zero_blocks``;
``streaming`` copies gradients into buckets.
"""
