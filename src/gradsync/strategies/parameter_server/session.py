"""One rank's session with the servers: the shard that it may host, its client, and its optimizer's state there."""

from __future__ import annotations

import atexit
import logging
import secrets
import sys
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object
from gradsync.errors import GradSyncError
from gradsync.messaging.key_folder import worker_keys
from gradsync.replicas.batch_context import batch_source
from gradsync.strategies.parameter_server.client import Client
from gradsync.strategies.parameter_server.hosting import host_shard
from gradsync.strategies.parameter_server.job import Job, assign_shards, hyperparameters
from gradsync.strategies.parameter_server.remote_optimizer import RemoteOptimizer
from gradsync.strategies.parameter_server.server.server import Server
from gradsync.strategies.parameter_server.server.staleness import CustomPolicy, Policy, policy_for_spec, policy_text

log = logging.getLogger("gradsync")

RETIRE_S = 30.0  # how long a rank that has closed keeps serving its shard to ranks that have not
EXIT_S = 5.0  # the same if the process exits without close(): it may have failed, and its launcher waits for it
RECONNECT_S = 30.0  # how long a killed server process may take to restart from its snapshot


class ServerSession:
    """Joins the servers, until ``close``. All ranks make one together: the constructor blocks until all have joined.

    Args:
        comm: of the ranks; not used any more once all have joined.
        params: of the optimizer, by name; overwritten with the servers'.
        optimizer: the user's.
        servers: their addresses; empty: each rank hosts a shard in a thread.
        keys: a folder made by `gradsync keys`. None: where each rank hosts a shard, keys are made for this run.
        open: use no keys.
        policy: what to do with stale gradients.
        resume: continue from the servers' weights even if they are an earlier run's.
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
        open: bool,
        policy: Policy | None,
        resume: bool,
        **settings: Any,
    ) -> None:
        self.addresses = list(servers)
        self._params = params
        self._optimizer = optimizer
        self._server: Server | None = None
        self._client: Client | None = None
        self._remote_optimizer: RemoteOptimizer | None = None
        self._exit_hook: Callable[[], None] | None = None
        try:
            self._connect(comm, keys, policy, settings, open=open, resume=resume)
        except BaseException:
            self.close()
            raise

    def _connect(
        self,
        comm: Communicator,
        keys: str | None,
        policy: Policy | None,
        settings: Mapping[str, Any],
        *,
        open: bool,
        resume: bool,
    ) -> None:
        """Find the servers, or host one; join them; pull their parameters."""
        custom = isinstance(policy, CustomPolicy)
        if self.addresses:
            policy_text(policy)  # refuses a function
            own_keys = None if keys is None else worker_keys(keys)
        else:
            hosted = policy if custom else None
            self._server, self.addresses, own_keys = host_shard(comm, keys=keys, open=open, policy=hosted)
        if settings["mirrors"] >= len(self.addresses):
            raise ValueError(
                f"mirrors={settings['mirrors']} needs another server for the copy of a shard; there is "
                f"{len(self.addresses)}."
            )
        text = str(policy_for_spec(policy)) if custom else policy_text(policy)
        job = Job.describe(self._params, self._optimizer, num_workers=comm.world_size, policy=text, **settings)
        joins_late = comm.world_size == 1 and self._server is None
        self._client = Client(
            None if joins_late else comm.rank,
            self.addresses,
            job,
            keys=own_keys,
            timeout_s=comm.timeout_s,
            reconnect_s=RECONNECT_S if self._server is None else 0.0,
            run=str(all_gather_object(comm, secrets.token_hex(8))[0]),
            resume=resume,
        )
        clock = self.join()
        self._remote_optimizer = RemoteOptimizer(self._optimizer, self._params, self._client, uploads=comm.rank == 0)
        if clock == 0 and self._optimizer.state and comm.rank == 0:
            self._remote_optimizer.upload()  # the state of a checkpoint that was loaded before
        comm.barrier()
        with batch_source(comm).waiting():
            self.pull(newest=True)  # from here on there are no collectives, so dead ranks are not waited for
        self._exit_hook = _make_exit_hook(self)
        atexit.register(self._exit_hook)

    @property
    def client(self) -> Client:
        """The connection to the servers."""
        assert self._client is not None, "the session is closed"
        return self._client

    @property
    def remote_optimizer(self) -> RemoteOptimizer:
        """The user's optimizer, whose state is on the servers."""
        assert self._remote_optimizer is not None, "the session is closed"
        return self._remote_optimizer

    def join(self) -> int:
        """Join the servers, at first and after having been an observer; returns the clock to begin at."""
        return self.client.join(self._tensors(), hyperparameters(self._optimizer))

    def push(self, grads: Mapping[str, Tensor], weight: float) -> None:
        """Send gradients, with the optimizer's current settings. With weight 0 the push is empty."""
        self.client.push(grads if weight > 0 else {}, weight=weight, groups=hyperparameters(self._optimizer))

    def pull(self, *, newest: bool = False) -> None:
        """Overwrite the parameters with the servers'. Blocks for as long as the staleness requires."""
        self.client.pull(self._tensors(), newest=newest)

    def upload_weights(self, names: Container[str]) -> None:
        """Set these parameters on the servers to this rank's; optimizer state and clocks stay. Blocks."""
        state = self.client.fetch_state()
        own = {name: tensor for name, tensor in self._tensors().items() if name in names}
        self.client.load_state({**state, "params": {**state["params"], **own}})

    def _tensors(self) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self._params.items()}

    def hosted(self) -> set[str]:
        """The names of the parameters in the shard that this rank hosts, if it does."""
        if self._server is None or self._server.index is None:
            return set()
        return set(assign_shards(self.client.job.params, len(self.addresses))[self._server.index])

    # -- leaving --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the servers and fetch the optimizer's state. A shard hosted here is served for a while yet."""
        # An error is unwinding the script: the other ranks must see at once that this rank and its shard are gone.
        failing = sys.exc_info()[0] is not None
        if self._exit_hook is not None:
            atexit.unregister(self._exit_hook)
            self._exit_hook = None
        if self._remote_optimizer is not None:
            if not failing:
                self._fetch_final_state(self._remote_optimizer)
            self._remote_optimizer.release()
            self._remote_optimizer = None
        if self._client is not None:
            self._client.close()
            self._client = None
        server, self._server = self._server, None
        if server is not None:
            server.retire(0.0 if failing else RETIRE_S)

    def _fetch_final_state(self, remote_optimizer: RemoteOptimizer) -> None:
        """Fetch the optimizer's state, so that it can be saved or used after ``close()``."""
        try:
            remote_optimizer.fetch()
        except GradSyncError as error:
            log.warning(
                "the optimizer's state could not be fetched from the servers, and your optimizer is without it: %s",
                error,
            )

    def close_at_exit(self) -> None:
        """Close at the exit of a process that has not called ``close``: others may still have to read its shard."""
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.retire(EXIT_S)
            self._server.wait(EXIT_S)


def _make_exit_hook(session: ServerSession) -> Callable[[], None]:
    """A function for ``atexit`` that closes the session. Its weak reference does not keep the session alive."""
    reference = weakref.ref(session)

    def close_at_exit() -> None:
        session = reference()
        if session is not None:
            session.close_at_exit()

    return close_at_exit
