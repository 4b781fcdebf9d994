"""A rank's place among the servers: the shard that it may host, its line to them all, its optimizer's state there."""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.errors import GradSyncError
from gradsync.server.client import Client
from gradsync.server.hosting import host_shard
from gradsync.server.job import Job, assign, hyperparameters
from gradsync.server.keyfiles import worker_keys
from gradsync.server.server import Server
from gradsync.server.staleness import Own, Policy, wire_text, written
from gradsync.strategies.served_optimizer import ServedOptimizer

log = logging.getLogger("gradsync")

RETIRE_S = 30.0  # for how long a rank that has closed goes on serving its shard to those who have not
EXIT_S = 5.0  # the same where the process just ends: it may have failed, and its launcher waits for it
RECONNECT_S = 30.0  # how long a killed server process may take to be there again, from its snapshot


class Membership:
    """Lasts from joining the servers to ``close``. All ranks make one together: it blocks until all are in.

    Args:
        comm: of the ranks; nothing is collective once all are in.
        params: what the optimizer steps, by name; overwritten with the servers'.
        optimizer: the user's.
        servers: their addresses; none: each rank hosts a shard in a thread.
        keys: a folder made by `gradsync keys`, or None.
        policy: what becomes of late gradients.
        settings: the other fields of the ``Job``.
    """

    def __init__(
        self,
        comm: Communicator,
        params: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        servers: Sequence[str],
        keys: str | None,
        policy: Policy | None,
        **settings: Any,
    ) -> None:
        self.addresses = list(servers)
        self._params = params
        self._optimizer = optimizer
        self._server: Server | None = None
        self._client: Client | None = None
        self._served: ServedOptimizer | None = None
        self._leave: Callable[[], None] | None = None
        try:
            self._enter(comm, keys, policy, settings)
        except BaseException:
            self.close()
            raise

    def _enter(self, comm: Communicator, keys: str | None, policy: Policy | None, settings: Mapping[str, Any]) -> None:
        """Find the servers, or be one; register with them; begin with their parameters."""
        own = isinstance(policy, Own)
        if self.addresses:
            wire_text(policy)  # refuses a function
        else:
            self._server, self.addresses = host_shard(comm, keys=keys, policy=policy if own else None)
        if settings["mirrors"] >= len(self.addresses):
            raise ValueError(
                f"mirrors={settings['mirrors']} needs another server for the copy of a shard; there is "
                f"{len(self.addresses)}."
            )
        text = str(written(policy)) if own else wire_text(policy)
        job = Job.describe(self._params, self._optimizer, num_workers=comm.world_size, policy=text, **settings)
        newcomer = comm.world_size == 1 and self._server is None
        self._client = Client(
            None if newcomer else comm.rank,
            self.addresses,
            job,
            keys=None if keys is None else worker_keys(keys),
            timeout_s=comm.timeout_s,
            reconnect_s=RECONNECT_S if self._server is None else 0.0,
        )
        clock = self.join()
        self._served = ServedOptimizer(self._optimizer, self._params, self._client, sends=comm.rank == 0)
        if clock == 0 and self._optimizer.state and comm.rank == 0:
            self._served.hand_over()  # of a checkpoint that was loaded before
        comm.barrier()
        with comm.feed.waiting():
            self.pull(newest=True)  # and nothing is collective from here on: nobody waits for the dead
        self._leave = _leaving(self)
        atexit.register(self._leave)

    @property
    def client(self) -> Client:
        """The line to the servers."""
        assert self._client is not None, "it lasts until close()"
        return self._client

    @property
    def served(self) -> ServedOptimizer:
        """The user's optimizer, whose state is at the servers."""
        assert self._served is not None, "it lasts until close()"
        return self._served

    def join(self) -> int:
        """Tell the servers of this rank, at first and after it has stepped aside; returns the clock to begin at."""
        return self.client.join(self._tensors(), hyperparameters(self._optimizer))

    def push(self, grads: Mapping[str, Tensor], weight: float) -> None:
        """Send gradients, with the optimizer's settings as they are now; without weight they have no say."""
        self.client.push(grads if weight > 0 else {}, weight=weight, groups=hyperparameters(self._optimizer))

    def pull(self, *, newest: bool = False) -> None:
        """Overwrite the parameters with the servers'. Blocks for as long as the staleness asks."""
        self.client.pull(self._tensors(), newest=newest)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self._params.items()}

    def hosted_bytes(self) -> int:
        """Of the parameters in the shard that this rank hosts, if it does."""
        if self._server is None or self._server.index is None:
            return 0
        names = assign(self.client.job.params, len(self.addresses))[self._server.index]
        return sum(self._params[name].nbytes for name in names)

    # -- leaving ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the servers, the optimizer with its state; a shard that is hosted here is there for a while yet."""
        # An error that unwinds the script: the others shall see at once that this rank, and its shard, are gone.
        failing = sys.exc_info()[0] is not None
        if self._leave is not None:
            atexit.unregister(self._leave)
            self._leave = None
        if self._served is not None:
            if not failing:
                self._leave_state_behind(self._served)
            self._served.release()
            self._served = None
        if self._client is not None:
            self._client.close()
            self._client = None
        server, self._server = self._server, None
        if server is not None:
            server.retire(0.0 if failing else RETIRE_S)

    def _leave_state_behind(self, served: ServedOptimizer) -> None:
        """So that the optimizer may be saved, or go on alone, after ``close()`` too."""
        try:
            served.fetch()
        except GradSyncError as error:
            log.warning("the optimizer's state stays with the servers, and your optimizer is without it: %s", error)

    def end_with_process(self) -> None:
        """The process ends and nobody has called close(): others may still have to read this rank's shard."""
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.retire(EXIT_S)
            self._server.wait(EXIT_S)


def _leaving(membership: Membership) -> Callable[[], None]:
    """What to do at the end of the process, if the rank is still a member: this does not keep it one."""
    alive = weakref.ref(membership)

    def leave() -> None:
        left = alive()
        if left is not None:
            left.end_with_process()

    return leave
