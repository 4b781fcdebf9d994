"""``Checked``: a communicator whose ranks compare each call before it starts. ``connect`` returns it to users.

Gloo ends a process that receives a longer message than expected, and MPI truncates it. So each call first compares a
fingerprint (kind, op, dtype, number of values, root) over a control group of its own, and starts the transport's
collective when all ranks' fingerprints are the same. If they differ, every rank raises :class:`gradsync.OutOfStep` with
what each of them asked for.

[Note: two orders] Calls return at once, so several may have been compared before the first is started. The comparisons
of a group follow the order of the calls, and so do the collectives; but how the two interleave differs from rank to
rank. Hence the comparisons have a group of their own.

[Note: calls that are not compared] A comparison costs a small all-reduce for each call. An engine, whose ranks have
agreed on a plan, uses ``comm.unchecked()``. The shared-memory transport compares calls itself: see
kernels/shm/collectives.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradsync.comm.allreduce.executor import poll_in_background
from gradsync.comm.base import Communicator, Finished, ReduceOp, Work, check_op
from gradsync.comm.checks import check_contiguous, check_exchange, check_rows, describe_call, different_calls
from gradsync.comm.forwarding import Forwarding
from gradsync.comm.objects import all_gather_object

Launch = Callable[[], Work]


class CheckedWork(Work):
    """A collective that starts when the ranks' calls are known to be the same."""

    def __init__(self, comm: Checked, description: str, launch: Launch) -> None:
        self._comm = comm
        self.description = description
        self.launch: Launch | None = launch
        self.largest = _fingerprint_and_negative(description)
        self.comparison: Work = Finished()
        self.work: Work | None = None  # the transport's, once it has started
        self.error: BaseException | None = None

    def done(self) -> bool:
        if self.work is None and self.error is None:
            self._comm.poll()
        return self.error is not None or (self.work is not None and self.work.done())

    def wait(self) -> None:
        while self.work is None and self.error is None:
            self._comm.wait_for_next()
        if self.error is not None:
            raise self.error
        assert self.work is not None, "it has started"
        self.work.wait()

    def start(self) -> None:
        """Start the transport's collective."""
        assert self.launch is not None, "it starts once"
        launch, self.launch = self.launch, None  # the closure holds the tensors
        self.work = launch()

    def fail(self, error: BaseException) -> None:
        """End the work without a result: ``wait()`` raises ``error``."""
        self.error, self.launch = error, None


class Checked(Forwarding):
    """Wraps a communicator, and compares the ranks' calls. Its constructor blocks: every rank wraps its own."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._control_group = comm.control_group()
        self._lock = threading.RLock()
        self._queue: deque[CheckedWork] = deque()  # works whose comparisons are under way
        self._broken: BaseException | None = None
        self._diagnosis: threading.Thread | None = None  # once calls differ: it gathers every rank's call

    # -- collectives ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_contiguous(tensor)
        return self._compare(f"all_reduce({op})", tensor, lambda: self.inner.all_reduce(tensor, op=op), op=op)

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        check_rows(out, tensor, self.world_size, ("out", "tensor"))
        return self._compare("all_gather", tensor, lambda: self.inner.all_gather(tensor, out=out))

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_rows(tensor, out, self.world_size, ("tensor", "out"))
        launch = lambda: self.inner.reduce_scatter(tensor, out=out, op=op)  # noqa: E731
        return self._compare(f"reduce_scatter({op})", tensor, launch, op=op)

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        check_exchange(tensor, out, self.world_size)
        launch = lambda: self.inner.all_to_all(tensor, out=out, own=own, used=used)  # noqa: E731
        return self._compare("all_to_all", tensor, launch)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self._check_peer(src, "src")
        check_contiguous(tensor)
        return self._compare(f"broadcast(src={src})", tensor, lambda: self.inner.broadcast(tensor, src))

    def barrier(self) -> None:
        self._compare("barrier", None, Finished).wait()  # the comparison is a barrier

    # -- groups ---------------------------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        group = self.inner.split(ranks)
        return None if group is None else Checked(group)

    def unchecked(self) -> Communicator:
        return self.inner.unchecked()

    def close(self) -> None:
        """Abort what is under way, and close the wrapped communicator."""
        with self._lock:
            self._abort(ValueError("this communicator was closed with work under way."))
        self._control_group.close()
        self.inner.close()

    # -- comparing ------------------------------------------------------------------------------------------------

    def _compare(self, what: str, tensor: Tensor | None, launch: Launch, *, op: ReduceOp | None = None) -> Work:
        if tensor is None:
            description = what
        else:
            self.inner.check_call(what, tensor, op)
            where = "" if tensor.is_cpu else f" on {tensor.device.type}"
            description = describe_call(what, tensor.dtype, tensor.numel()) + where
            launch = _with_current_stream(tensor, launch)
        with self._lock:
            if self._broken is not None:
                raise self._broken
            work = CheckedWork(self, description, launch)
            work.comparison = self._control_group.compare(work.largest, what)
            self._queue.append(work)
            self.poll()
        if self._queue:
            poll_in_background(self)
        return work

    @property
    def oldest(self) -> CheckedWork | None:
        """The work whose comparison is the next to end."""
        with self._lock:
            return self._queue[0] if self._queue else None

    def wait_for_next(self) -> None:
        """Block until the next comparison has ended; if calls differ, until every rank's call is known."""
        oldest, diagnosis = self.oldest, self._diagnosis
        if diagnosis is not None:
            diagnosis.join()  # bounded: its collectives have the communicator's timeout
            return
        if oldest is None:
            return
        try:
            oldest.comparison.wait()
        except Exception as error:
            with self._lock:
                self._abort(error)
        self.poll()

    def poll(self) -> None:
        """Start the works whose comparisons have ended. Errors are raised by the works' ``wait()``."""
        with self._lock:
            while self._diagnosis is None and self._queue:
                work = self._queue[0]
                try:
                    if not work.comparison.done():
                        return
                    work.comparison.wait()  # returns at once, or raises what went wrong
                    if not _all_same(work.largest):
                        # In a thread: it blocks, and the thread that polls this also polls other ranks' collectives.
                        self._diagnosis = threading.Thread(
                            target=self._gather_calls, args=(work.description,), daemon=True
                        )
                        self._diagnosis.start()
                        return
                    work.start()
                except Exception as error:
                    self._abort(error)
                    return
                self._queue.popleft()

    def _gather_calls(self, description: str) -> None:
        """Learn what each rank asked for. All ranks do this. (In a new group: the control group may be ahead.)"""
        try:
            group = self._control_group.clone()
            error: BaseException = different_calls([str(call) for call in all_gather_object(group, description)])
            group.close()
        except Exception as failed:
            error = failed
        with self._lock:
            self._abort(error)

    def _abort(self, error: BaseException) -> None:
        # The ranks no longer agree on how far they have come: nothing can follow.
        self._broken = self._broken or error
        while self._queue:
            self._queue.popleft().fail(self._broken)


def checked(comm: Communicator) -> Communicator:
    """``comm`` for users: calls are compared, by the transport itself or by :class:`Checked`."""
    return comm if comm.compares_calls else Checked(comm)


def _fingerprint_and_negative(description: str) -> Tensor:
    """A call's fingerprint and its negative: their maxima over all ranks show whether all fingerprints are the same."""
    number = int.from_bytes(hashlib.blake2b(description.encode(), digest_size=7).digest(), "little")
    return torch.tensor([number, -number])


def _all_same(largest: Tensor) -> bool:
    top, bottom = largest.tolist()
    return bool(top == -bottom)


def _with_current_stream(tensor: Tensor, launch: Launch) -> Launch:
    """``launch`` for later, perhaps in another thread, on the stream of a GPU that is current now."""
    stream = None if tensor.is_cpu else torch.accelerator.current_stream(tensor.device)

    def launched() -> Work:
        with torch.no_grad(), contextlib.nullcontext() if stream is None else stream:
            return launch()

    return launched
