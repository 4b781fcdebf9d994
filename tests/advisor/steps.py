"""Steps and networks whose costs can be computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gradsync.advisor import Gradient, Measurement, Network

LAYERS, NUMEL = 10, 1_000_000  # ten gradients of 4 MB: 40 MB in all


def network(rate: float = 100e6, **changes: Any) -> Network:
    """A link that moves ``rate`` bytes a second, and costs nothing else."""
    plain = Network(name="by hand", bytes_per_s=rate, busy_bytes_per_s=rate, call_s=0.0, busy_call_s=0.0)
    return replace(plain, latency_s=0.0, cpu_s_per_byte=0.0, **changes)


def measurement(**changes: Any) -> Measurement:
    """A step of 1 s: 0.3 forward, 0.6 backward in ten equal parts, 0.1 after; nothing of it exposed."""
    gradients = tuple(Gradient(f"layer{at}", (1000, 1000), ready_s=0.3 + 0.06 * (at + 1)) for at in range(LAYERS))
    plain = Measurement(
        gradients=gradients, forward_s=0.3, backward_s=0.6, exposed_s=0.0, after_s=0.1, first_bucket_bytes=4_000_000
    )
    return replace(plain, **changes)
