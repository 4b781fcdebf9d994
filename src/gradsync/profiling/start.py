"""The recorders of this process: one for every synchronizer, as :func:`set_recording` has set it up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch.nn import Parameter

from gradsync.comm.base import Communicator
from gradsync.profiling.clocks import compare_clocks
from gradsync.profiling.gpu import GpuRecorder
from gradsync.profiling.interface import NOT_RECORDING, Recording
from gradsync.profiling.recorder import KEEP_STEPS, Recorder
from gradsync.profiling.run import Writer


class _Settings:
    """The settings for synchronizers that are made from now on."""

    enabled = True
    keep_steps = KEEP_STEPS
    folder: Path | None = None
    stop_after_steps: int | None = None
    num_written = 0  # synchronizers whose records go to files


def set_recording(
    *,
    enabled: bool = True,
    keep_steps: int = KEEP_STEPS,
    folder: Path | str | None = None,
    stop_after_steps: int | None = None,
) -> None:
    """Set how later calls of ``synchronize`` in this process are recorded: for launchers and benchmarks.

    Args:
        enabled: False: nothing is recorded, and ``sync.record`` raises.
        keep_steps: how many steps each recorder keeps. More => longer means, and more memory.
        folder: also append every raw step to a file there, one file a rank.
        stop_after_steps: end the script, with exit code 0, once its first synchronizer has done this many steps.

    >>> from gradsync.profiling import set_recording
    >>> set_recording(keep_steps=1000)
    >>> set_recording()                                     # back to the defaults
    """
    if keep_steps < 1:
        raise ValueError(f"expected at least 1 step to keep; got {keep_steps=}.")
    if stop_after_steps is not None and stop_after_steps < 1:
        raise ValueError(f"expected at least 1 step; got {stop_after_steps=}.")
    _Settings.enabled, _Settings.keep_steps = enabled, keep_steps
    _Settings.folder = None if folder is None else Path(folder)
    _Settings.stop_after_steps = stop_after_steps
    _Settings.num_written = 0


class StepsDone(SystemExit):
    """Raised when ``stop_after_steps`` steps are recorded: the script ends, with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


def start(
    comm: Communicator,
    params: Mapping[str, Parameter],
    *,
    strategy: str,
    sent: Callable[[], int] = lambda: 0,
    bucket_bytes: int | None = None,
    slot: int | None = None,
) -> Recording:
    """Make the recorder of a new synchronizer. Blocks: every rank calls it, to compare clocks.

    Args:
        comm: the ranks.
        params: the parameters, by name.
        strategy: its spec.
        sent: the bytes that the strategy sends in a step, for steps in which no collective is recorded.
        bucket_bytes: as the script set it.
        slot: in an elastic run, this worker's.
    """
    if not _Settings.enabled:
        return NOT_RECORDING
    on_gpu = not all(param.is_cpu for param in params.values())
    recorder = (GpuRecorder if on_gpu else Recorder)(comm, compare_clocks(comm), keep=_Settings.keep_steps)
    if _Settings.folder is None:
        return recorder
    recorder.detailed = True
    number, _Settings.num_written = _Settings.num_written, _Settings.num_written + 1
    recorder.send_to(
        Writer(
            _Settings.folder,
            recorder,
            comm,
            params,
            strategy=strategy,
            sent=sent,
            bucket_bytes=bucket_bytes,
            number=number,
            slot=slot,
        )
    )
    limit = _Settings.stop_after_steps
    if limit is not None and number == 0:
        recorder.stop_after(limit, StepsDone)
    return recorder
