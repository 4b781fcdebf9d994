"""What every Python process does first that a test starts: the tests put this folder on PYTHONPATH.

Importing torch makes some hundred thousand objects that stay. Looking through them for garbage, again and again while
they are made and once more at the end, takes a third of a short process's time, and the tests start a hundred.
"""

import atexit
import gc

gc.set_threshold(50_000)
atexit.register(gc.freeze)  # the first to be registered is the last to run
