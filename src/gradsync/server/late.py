"""What a staleness policy sees of one push."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Late:
    """One push as its shard is about to apply it.

    Attributes:
        worker: who pushed.
        clock: how many pushes it had made before.
        tau: the updates that the shard has made since this worker last read it.
        grads: by parameter name; may be changed in place.
        params: the shard's own, as they are now; not to be changed.
        backup: what this worker read last; None unless the policy ``needs_backup``.
        state: the policy's own tensors on this shard, by names of its choice; saved with the shard.
    """

    worker: int
    clock: int
    tau: int
    grads: dict[str, Tensor]
    params: dict[str, Tensor]
    backup: dict[str, Tensor] | None
    state: dict[str, Tensor]
