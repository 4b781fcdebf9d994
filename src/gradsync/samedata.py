"""Finding the commonest silent mistake: every rank reads the same data."""

from __future__ import annotations

import warnings

from gradsync.bucket import Bucket
from gradsync.errors import SameDataWarning
from gradsync.header import Round

WATCHED_ROUNDS = 5  # the first ones only: a sum over all gradients is not free
SUSPICIOUS_ROUNDS = 3  # so many alike in a row are no coincidence


class SameDataWatch:
    """Compares the ranks' gradients in the first rounds, by a checksum that each header brings of the round before."""

    def __init__(self) -> None:
        self._rounds = 0
        self._alike = 0
        self._checksum = 0.0

    def taste(self, bucket: Bucket) -> None:
        """Add what this rank gives for a bucket to the checksum."""
        if self._rounds < WATCHED_ROUNDS:
            self._checksum += bucket.checksum()

    def take_checksum(self) -> float:
        """The checksum of the round before, for the header of the one that begins."""
        checksum, self._checksum = self._checksum, 0.0
        return checksum

    def judge(self, round: Round, rank: int) -> None:
        """Warn, once and on rank 0, when the ranks brought the same gradients time after time."""
        self._rounds += 1
        if self._rounds > WATCHED_ROUNDS + 1:
            return
        self._alike = self._alike + 1 if round.same_gradients() else 0
        if self._alike == SUSPICIOUS_ROUNDS and rank == 0:
            warnings.warn(
                f"all {len(round.headers)} ranks computed the same gradients {SUSPICIOUS_ROUNDS} times in a row: do "
                "they read the same data? Give each its own part: loader = gradsync.shard(dataset, batch_size=...), or "
                "torch's DistributedSampler.",
                SameDataWarning,
                stacklevel=2,
            )
