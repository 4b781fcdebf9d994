"""Startup code of every Python process that a test starts: the tests put this folder on PYTHONPATH.

Importing torch makes some hundred thousand objects that stay. The garbage collector scans them repeatedly while they
are made, and once more at exit. That takes a third of a short process's time, and the tests start a hundred.
"""

import atexit
import gc

gc.set_threshold(50_000)
atexit.register(gc.freeze)  # registered first, so it runs last
