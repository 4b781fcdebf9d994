"""``with sync.step():``: one step as a block, which a lost peer may end at any place of it.

A lost peer interrupts whatever communicates: a SyncBatchNorm's forward, its backward, the engine's end of a backward.
Without the block an elastic run can only catch what the engine itself starts. Within it every such error leaves the
block, on each survivor, and is caught at its end: there the survivors agree, the step is rolled back, and the rest of
the body was skipped on all of them. So no survivor goes on with a body whose collectives the others have left.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from gradsync.replicas.batch_context import BatchSource

if TYPE_CHECKING:
    from gradsync.engine.engine import Engine


class StepBlock:
    """Made by ``sync.step()``, for one use. In a run that is not elastic it only refuses to be nested."""

    def __init__(self, engine: Engine, source: BatchSource) -> None:
        self._engine = engine
        self._source = source

    def __enter__(self) -> None:
        if self._source.in_step_block:
            raise ValueError(
                "with sync.step() was entered within another one. It goes around the body of one step: expected the "
                "block before to have ended. Leave out the inner one."
            )
        self._engine.enter_block()
        self._source.in_step_block = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._source.in_step_block = False
        return self._engine.leave_block(error)
