"""Finding the commonest silent mistake: every rank reads the same data."""

from __future__ import annotations

import warnings

from gradsync.buckets.bucket import Bucket
from gradsync.comm.readback import Readback
from gradsync.errors import SameDataWarning
from gradsync.replicas.header import StepHeaders

CHECKED_STEPS = 5  # the first ones only: a sum over all gradients is not free
SUSPICIOUS_STEPS = 3  # this many equal ones in a row are no coincidence


class SameDataDetector:
    """Compares the ranks' gradients in the first steps, by a checksum of the step before in each header."""

    def __init__(self, model: str) -> None:
        self._model = model  # its class's name: a script may have several
        self._steps = 0
        self._num_equal = 0
        self._checksum = 0.0
        self._readbacks: list[Readback] = []  # the buckets' checksums, where gradients are on a GPU

    def update_checksum(self, bucket: Bucket) -> None:
        """Add this rank's contribution to a bucket to the checksum."""
        if self._steps < CHECKED_STEPS:
            checksum = bucket.checksum()
            if isinstance(checksum, float):
                self._checksum += checksum
            else:
                self._readbacks.append(Readback(checksum))

    def take_checksum(self) -> float:
        """The checksum of the step before, for the header of the one that begins."""
        checksum, self._checksum = self._checksum, 0.0
        readbacks, self._readbacks = self._readbacks, []
        return sum((readback.values()[0] for readback in readbacks), checksum)

    def check(self, headers: StepHeaders, rank: int) -> None:
        """Warn, once and on rank 0, when all ranks computed the same gradients several times in a row."""
        self._steps += 1
        if self._steps > CHECKED_STEPS + 1:
            return
        self._num_equal = self._num_equal + 1 if headers.same_gradients else 0
        if self._num_equal == SUSPICIOUS_STEPS and rank == 0:
            warnings.warn(
                f"all {headers.world_size} ranks computed the same gradients of the {self._model} "
                f"{SUSPICIOUS_STEPS} times in a row: do they read the same data, or use the same random seed? "
                "Give each its own part: loader = gradsync.shard(dataset, batch_size=...), or torch's "
                "DistributedSampler; or its own seed: torch.manual_seed(seed + sync.rank), after synchronize().",
                SameDataWarning,
                stacklevel=2,
            )
