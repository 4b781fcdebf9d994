"""For all tests: ranks that are threads or processes share two cores, so none of them brings a pool of its own."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
