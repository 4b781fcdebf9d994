"""Who takes notes in this process: a recorder for every synchronizer, unless it was told otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.nn import Parameter

from gradsync.comm.base import Communicator
from gradsync.profiling.clocks import meet
from gradsync.profiling.cuda import CudaRecorder
from gradsync.profiling.files import Writer
from gradsync.profiling.recorder import KEEP_STEPS, Recorder
from gradsync.profiling.seam import SILENT, Recording


class _Process:
    """What holds for the synchronizers to come."""

    enabled = True
    keep_steps = KEEP_STEPS
    folder: Path | None = None
    stop_after_steps: int | None = None
    num_written = 0  # synchronizers whose notes go to files


def set_recording(
    *,
    enabled: bool = True,
    keep_steps: int = KEEP_STEPS,
    folder: Path | str | None = None,
    stop_after_steps: int | None = None,
) -> None:
    """Say how later calls of ``synchronize`` are recorded, in this process: for launchers and benchmarks.

    Args:
        enabled: False: no notes at all, and ``sync.record`` raises.
        keep_steps: how many steps each recorder keeps. More => longer means, and more memory.
        folder: also append every step's notes to a file there, a file a rank.
        stop_after_steps: end the script, in order, once its first synchronizer has done so many steps.

    >>> from gradsync.profiling import set_recording
    >>> set_recording(keep_steps=1000)
    >>> set_recording()                                     # as it was
    """
    if keep_steps < 1:
        raise ValueError(f"expected at least 1 step to keep; got {keep_steps=}.")
    if stop_after_steps is not None and stop_after_steps < 1:
        raise ValueError(f"expected at least 1 step; got {stop_after_steps=}.")
    _Process.enabled, _Process.keep_steps = enabled, keep_steps
    _Process.folder = None if folder is None else Path(folder)
    _Process.stop_after_steps = stop_after_steps
    _Process.num_written = 0


class StepsDone(SystemExit):
    """The steps that were asked for are recorded: the script ends here, with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


def start(
    comm: Communicator, params: Mapping[str, Parameter], *, strategy: str, bucket_bytes: int | None = None
) -> Recording:
    """The recorder of a synchronizer that begins. Blocks: every rank calls it, to compare clocks."""
    if not _Process.enabled:
        return SILENT
    on_cuda = any(param.is_cuda for param in params.values())
    recorder = (CudaRecorder if on_cuda else Recorder)(comm, meet(comm), keep=_Process.keep_steps)
    if _Process.folder is None:
        return recorder
    recorder.detailed = True
    number, _Process.num_written = _Process.num_written, _Process.num_written + 1
    recorder.send_to(
        Writer(
            _Process.folder,
            recorder,
            comm,
            params,
            strategy=strategy,
            bucket_bytes=bucket_bytes,
            number=number,
        )
    )
    limit = _Process.stop_after_steps
    if limit is not None and number == 0:
        recorder.stop_after(limit, StepsDone)
    return recorder
