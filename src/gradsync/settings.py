"""How an engine runs, beside its strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradsync.bucket import BUCKET_BYTES, FIRST_BUCKET_BYTES
from gradsync.buffers import BUFFER_MODES, BufferMode


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine runs, beside its strategy. All ranks must have the same."""

    accumulate: int = 1  # higher => fewer synchronizations, larger batches
    accumulation: Literal["mean", "sum"] = "mean"  # "sum": as DDP's users know it, who divide the loss themselves
    bucket_bytes: int = BUCKET_BYTES
    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    buffers: BufferMode = "broadcast"

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1; got {self.accumulate}.")
        if self.accumulation not in ("mean", "sum"):
            raise ValueError(f"accumulation must be 'mean' or 'sum'; got {self.accumulation!r}.")
        if self.buffers not in BUFFER_MODES:
            raise ValueError(f"buffers must be one of {', '.join(BUFFER_MODES)}; got {self.buffers!r}.")
        if self.bucket_bytes < 1 or self.first_bucket_bytes < 1:
            raise ValueError(f"buckets must hold at least a byte; got {self.bucket_bytes=} {self.first_bucket_bytes=}.")
