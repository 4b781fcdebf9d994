"""The base of strategies under which a backward's gradients stay with their rank: replicas meet elsewhere, or later."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.bucket import Bucket
from gradsync.comm.base import Solo
from gradsync.header import Header, Round
from gradsync.reducers.sparse import sum_sparse
from gradsync.slot import SparseSlot
from gradsync.strategies.base import Strategy


class Local(Strategy):
    """Every rank steps on its own. A subclass says where the replicas meet: in ``before_step`` or ``after_step``.

    The engine starts no collective of its own under it, so ranks may run at different speeds.
    """

    together = False

    def __init__(self) -> None:
        super().__init__()
        self.header: Header | None = None  # of the last backward: its weight, and the loss scale

    def open(self, header: Header) -> None:
        self.header = header

    def round(self, *, block: bool) -> Round | None:
        assert self.header is not None, "open() comes first"
        return Round((self.header,))

    def on_bucket_ready(self, bucket: Bucket) -> None:
        """Nothing to do: a rank's own gradients are what they shall be."""

    def on_sparse(self, slots: Sequence[SparseSlot], factor: float) -> None:
        sum_sparse(slots, factor, Solo())

    def after_backward(self) -> None:
        """Nothing to wait for."""
