"""``python -m benchmarks.workers.forking run ...``: `gradsync run` whose workers are forked, and so start at once.

A worker spends seconds of CPU on importing torch before it can join. A benchmark that kills a thousand of them would
mostly measure that. Everything after the imports is as in a worker that was started normally.
"""

from __future__ import annotations

import os
import sys

import torch._dynamo  # noqa: F401 - which the first optimizer would import

import gradsync.cli.main
import gradsync.comm.hierarchical.communicator
import gradsync.comm.shm.communicator
import gradsync.kernels  # noqa: F401 - so that forked workers have it
from tests.support.launching import GRADSYNC, LaunchRequest, run_command

if __name__ == "__main__":
    request = LaunchRequest([*GRADSYNC[1:], *sys.argv[1:]], os.getcwd(), dict(os.environ), ("", ""))
    sys.exit(run_command(request))
