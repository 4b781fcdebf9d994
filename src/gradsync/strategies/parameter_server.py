"""The parameter server: workers push gradients and pull parameters; how far they may part is one dial, staleness."""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.bucket import BucketPlan
from gradsync.codecs.dense import Dense
from gradsync.comm.base import Communicator
from gradsync.errors import GradSyncError
from gradsync.reducers.rules import CodecRule, Rules
from gradsync.server.client import Client
from gradsync.server.job import Job, assign, hyperparameters
from gradsync.server.keyfiles import worker_keys
from gradsync.server.server import Server
from gradsync.server.staleness import Own, PolicyLike, resolve_policy, wire_text, written
from gradsync.strategies.base import Verdict
from gradsync.strategies.local import Local
from gradsync.strategies.served_optimizer import ServedOptimizer
from gradsync.training import Training

log = logging.getLogger("gradsync")

RETIRE_S = 30.0  # for how long a rank that has closed goes on serving its shard to those who have not
EXIT_S = 5.0  # the same where the process just ends: it may have failed, and its launcher waits for it
RECONNECT_S = 30.0  # how long a killed server process may take to be there again, from its snapshot
STATE_KEYS = {"clock", "own", "server"}

_said_servers: tuple[str, ...] = ()
_said_keys: str | None = None


def override_servers(addresses: Sequence[str], keys: str | None = None) -> None:
    """Have every later ``parameter_server()`` that names no servers use these: ``gradsync run --servers``."""
    global _said_servers, _said_keys
    _said_servers, _said_keys = tuple(addresses), keys


@spec.register("strategy", "parameter_server")
class ParameterServer(Local):
    """Push gradients to servers that hold the parameters, each a shard of them, and pull what they have become.

    ``optimizer.step()`` pushes this rank's gradients; the user's own optimizer runs at the servers, on each one's
    shard, with the learning rate and other settings that travel with the push; then the parameters are overwritten in
    place with the servers'. Clipping and unscaling have come before: they see this rank's own gradients.

    Args:
        staleness: 0: bulk-synchronous, the same as ``allreduce`` to float rounding. k: a worker may be k pushes ahead
            of the slowest. None: nobody waits for anybody. Higher => less waiting, older gradients.
        push_every: with ``staleness=None``: push the sum of so many steps' gradients at once. Higher => fewer bytes.
        pull_every: with ``staleness=None``: pull at every so manyth step, and step locally in between.
        staleness_policy: what the servers do with late gradients: "scale", "compensate", "drop(older_than=8)", a
            function of the staleness that gives a factor for the learning rate, or None: nothing.
        backup: with ``staleness=0``: go on without the last so many workers; what they bring late is dropped.
        clip_norm: clip the gradient to this norm at the servers, after the sum; a worker can only clip its own.
        codec: what gradients are compressed by on their way to the servers, with error feedback.
        servers: addresses of `gradsync serve` processes, one a shard. None: each rank hosts a shard in a thread.
        mirrors: 1 keeps a second copy of every shard on another server: one that is killed takes nothing with it.
        snapshot_every: servers that have a folder for it (`gradsync serve --snapshots`) write a snapshot after so many
            updates, 0: never. Lower => less is lost when a server is killed, more is written.
        keys: a folder made by `gradsync keys`: without its keys nobody can connect.

    >>> import gradsync, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> asynchronous = "parameter_server(staleness=None, staleness_policy=scale)"
    >>> with gradsync.synchronize(model, optimizer, asynchronous) as sync:
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    ...     sync.stats()["clocks"]
    {0: 1}
    """

    steps_itself = True

    def __init__(
        self,
        *,
        staleness: int | None = 0,
        push_every: int = 1,
        pull_every: int = 1,
        staleness_policy: PolicyLike | None = None,
        backup: int = 0,
        clip_norm: float | None = None,
        codec: CodecRule | None = None,
        servers: Sequence[str] | None = None,
        mirrors: int = 0,
        snapshot_every: int = 100,
        keys: str | None = None,
    ) -> None:
        super().__init__()
        self.staleness = staleness
        self.push_every, self.pull_every = push_every, pull_every
        self.policy = None if staleness_policy is None else resolve_policy(staleness_policy)
        self.backup, self.clip_norm = backup, clip_norm
        self.servers = None if servers is None else list(servers)
        self.mirrors, self.snapshot_every, self.keys = mirrors, snapshot_every, keys
        self._check()
        self._rules = None if codec is None else Rules.read(codec)
        self._server: Server | None = None
        self._client: Client | None = None
        self._training: Training | None = None
        self._params: dict[str, torch.nn.Parameter] = {}  # those that the optimizer has, by name
        self._owed: dict[str, Tensor] = {}  # gradients of steps that were not pushed yet
        self._owed_weight = 0.0
        self._num_steps = 0
        self._served: ServedOptimizer | None = None
        self._leave: Callable[[], None] | None = None

    def _check(self) -> None:
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"staleness is 0 (synchronous), k, or None (asynchronous); got {self.staleness}.")
        if min(self.push_every, self.pull_every) < 1:
            raise ValueError(f"push_every and pull_every are 1 or more; got {self.push_every} and {self.pull_every}.")
        if self.staleness is not None and max(self.push_every, self.pull_every) > 1:
            raise ValueError(
                "push_every and pull_every above 1 would break the bound that staleness sets; got "
                f"staleness={self.staleness}, push_every={self.push_every}, pull_every={self.pull_every}. "
                "Use them with staleness=None, or accumulate=k of synchronize()."
            )
        if self.policy is not None and self.staleness == 0:
            raise ValueError("with staleness=0 no gradient is late: staleness_policy needs staleness=k or None.")
        if self.backup and self.staleness != 0:
            raise ValueError(f"backup is for staleness=0: otherwise nobody waits for late workers; got {self.backup}.")
        if self.backup < 0 or self.mirrors not in (0, 1) or self.snapshot_every < 0:
            raise ValueError(
                f"expected backup >= 0, mirrors of 0 or 1, snapshot_every >= 0; got backup={self.backup}, "
                f"mirrors={self.mirrors}, snapshot_every={self.snapshot_every}."
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm is the norm that a gradient may have, above 0; got {self.clip_norm}.")
        if self.servers is not None and not self.servers:
            raise ValueError("servers=[] names no server. Leave it out to have each rank host a shard.")
        if self.servers is not None:
            wire_text(self.policy)  # refuses a function, before anything is started

    def spec_arguments(self) -> dict[str, Any]:
        """What it was made with, for specs."""
        return {
            "staleness": self.staleness,
            "push_every": self.push_every,
            "pull_every": self.pull_every,
            "staleness_policy": written(self.policy),
            "backup": self.backup,
            "clip_norm": self.clip_norm,
            "codec": None if self._rules is None else self._rules.written(),
            "servers": self.servers,
            "mirrors": self.mirrors,
            "snapshot_every": self.snapshot_every,
            "keys": self.keys,
        }

    # -- the beginning ---------------------------------------------------------------------------------------------

    def meet(self, training: Training) -> None:
        self._training = training
        optimized = {id(param) for group in training.optimizer.param_groups for param in group["params"]}
        self._params = {name: param for name, param in training.params.items() if id(param) in optimized}

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        if self._client is not None:  # the layout has changed, and what is pushed goes by name
            return
        if plan.sparse:
            raise ValueError(
                f"parameter_server pushes whole gradients; {plan.sparse[0].name} has sparse ones. Make its Embedding "
                "with sparse=False, or use allreduce."
            )
        try:
            self._connect(comm)
        except BaseException:
            self.close()
            raise

    def _connect(self, comm: Communicator) -> None:
        """Find the servers, or be one; register with them; begin with their parameters. All ranks call it."""
        from gradsync.server.hosting import host_shard

        addresses: Sequence[str] = self.servers or _said_servers
        keys = self.keys or (None if self.servers else _said_keys)
        own = isinstance(self.policy, Own)
        if addresses:
            wire_text(self.policy)  # refuses a function
        else:
            self._server, addresses = host_shard(comm, keys=keys, policy=self.policy if own else None)
        if self.mirrors >= len(addresses):
            raise ValueError(
                f"mirrors={self.mirrors} needs another server for the copy of a shard; there is {len(addresses)}."
            )
        self._job = Job.describe(
            self._params,
            self._optimizer,
            num_workers=comm.world_size,
            staleness=self.staleness,
            backup=self.backup,
            clip_norm=self.clip_norm,
            policy=str(written(self.policy)) if own else wire_text(self.policy),
            codecs=self.codecs(),
            mirrors=self.mirrors,
            snapshot_every=self.snapshot_every,
        )
        self._addresses = list(addresses)
        newcomer = comm.world_size == 1 and self._server is None
        self._client = Client(
            None if newcomer else comm.rank,
            self._addresses,
            self._job,
            keys=None if keys is None else worker_keys(keys),
            timeout_s=comm.timeout_s,
            reconnect_s=RECONNECT_S if self._server is None else 0.0,
        )
        clock = self._client.join(self._tensors(), hyperparameters(self._optimizer))
        self._served = ServedOptimizer(self._optimizer, self._params, self._client, sends=comm.rank == 0)
        if clock == 0 and self._optimizer.state and comm.rank == 0:
            self._served.hand_over()  # of a checkpoint that was loaded before
        comm.barrier()
        self._pull(newest=True)  # and nothing is collective from here on: nobody waits for the dead
        self._leave = _leaving(self)
        atexit.register(self._leave)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self._params.items()}

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        assert self._training is not None, "meet() comes first"
        return self._training.optimizer

    @property
    def client(self) -> Client:
        """The line to the servers."""
        if self._client is None:
            raise GradSyncError("this parameter_server is closed, or was never attached: there is no line to a server.")
        return self._client

    # -- around a step ---------------------------------------------------------------------------------------------

    def before_step(self, step: int) -> Verdict:
        assert self.header is not None, "open() comes first"
        self._num_steps += 1
        grads = {name: param.grad for name, param in self._params.items() if param.grad is not None}
        if self.push_every == 1:
            self._push(grads, self.header.weight)
        else:
            self._owe(grads, self.header.weight)
            if self._num_steps % self.push_every == 0:
                self._push_owed()
        if self._num_steps % self.pull_every:
            self.client.flush()  # the optimizer is about to change what is on its way
            return Verdict.APPLY
        self._pull()
        return Verdict.DONE_ELSEWHERE

    def skipped_step(self, step: int) -> None:
        # inf on this rank alone: the others have pushed, and must not wait for what does not come.
        self._num_steps += 1
        if self.push_every == 1:
            self._push({}, 0.0)
        if self.pull_every == 1:
            self._pull()

    def _owe(self, grads: dict[str, Tensor], weight: float) -> None:
        for name, grad in grads.items():
            if name in self._owed:
                self._owed[name] += grad
            else:
                self._owed[name] = grad.clone()
        self._owed_weight += weight

    def _push_owed(self) -> None:
        if self._owed:
            self._push(self._owed, self._owed_weight)
            self._owed, self._owed_weight = {}, 0.0

    def _push(self, grads: dict[str, Tensor], weight: float) -> None:
        self.client.push(grads if weight > 0 else {}, weight=weight, groups=hyperparameters(self._optimizer))

    def _pull(self, *, newest: bool = False) -> None:
        """Overwrite the parameters with the servers'. Blocks for as long as the staleness asks."""
        with self.comm.feed.waiting():
            self.client.pull(self._tensors(), newest=newest)

    # -- bringing all together ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        self._push_owed()
        self._settle("settle")
        self._all_have_read()

    def join(self) -> int | None:
        self._push_owed()
        self.client.step_aside()  # nobody waits for this rank's pushes from here on
        clocks = self._settle("join")
        self.client.join(self._tensors(), hyperparameters(self._optimizer))
        self._all_have_read()
        if sorted(clocks) != list(range(self.comm.world_size)) or len(set(clocks.values())) == 1:
            return None
        # Schedules of ranks that had fewer batches have missed steps: all take over those of the rank that had most.
        leader = max(clocks, key=lambda worker: (clocks[worker], -worker))
        assert self._served is not None, "attach() comes first"
        self._served.takes_over = self.comm.rank != leader
        return leader

    def _settle(self, why: str) -> dict[int, int]:
        """Wait until all who live are here, and take the newest parameters; returns everybody's clock. Blocks."""
        self._pull(newest=True)  # also says that this rank's pushes have been applied
        with self.comm.feed.waiting():
            met = self.client.meet(why, self.client.clock, self._buffers())
        self._pull(newest=True)
        self._take_buffers([met[worker].tensors for worker in sorted(met)])
        return {worker: int(message.fields["brought"]) for worker, message in met.items()}

    def _all_have_read(self) -> None:
        """Who went on before would push what others then read; and, bulk-synchronous, step without them."""
        with self.comm.feed.waiting():
            self.client.meet("all have read")

    def _buffers(self) -> dict[str, Tensor]:
        assert self._training is not None, "meet() comes first"
        if self._training.buffers.mode == "none":
            return {}
        return {name: buffer.detach().cpu() for name, buffer in self._training.model.named_buffers()}

    def _take_buffers(self, everyones: Sequence[dict[str, Tensor]]) -> None:
        """The buffers of the lowest worker that lives or, in mode "mean", the mean of the living."""
        assert self._training is not None, "meet() comes first"
        mode = self._training.buffers.mode
        if mode == "none":
            return
        for name, buffer in self._training.model.named_buffers():
            values = [buffers[name] for buffers in everyones]
            mean = mode == "mean" and buffer.is_floating_point()
            buffer.data.copy_(torch.stack(values).mean(0) if mean else values[0])

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        assert self._served is not None, "attach() comes first"
        server = self._served.fetch_rest() if self.comm.rank == 0 else {}  # the others' would be the same
        owed = {name: grad.clone() for name, grad in self._owed.items()}
        own = {"codec": self.client.state_dict(), "owed": owed, "owed_weight": self._owed_weight}
        return {"clock": self.client.clock, "own": {**own, "num_steps": self._num_steps}, "server": server}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != STATE_KEYS:
            raise ValueError(f"expected a parameter_server's state: {sorted(STATE_KEYS)}; got {sorted(state)}.")
        assert self._served is not None, "attach() comes first"
        own = state["own"]
        self.client.load_state_dict(own["codec"])
        self._owed = {name: grad.clone() for name, grad in own["owed"].items()}
        self._owed_weight, self._num_steps = own["owed_weight"], own["num_steps"]
        self.comm.barrier()  # a rank that is still on its way in has made no push, and would not be known as such
        if self.comm.rank == 0:
            self._served.hand_over(state["server"])
        self.comm.barrier()  # all ranks load, as all are there when a run begins
        if self.client.refresh() != state["clock"] and self.staleness == 0:
            raise ValueError(
                f"the state is of {state['clock']} pushes of this rank, and rank 0's says {self.client.clock}. Load "
                "what all ranks have saved at the same time."
            )
        self._pull(newest=True)

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        # What old rank q still owes goes to rank q mod world_size: none is lost, and none sent twice.
        mine = [state["own"] for old, state in enumerate(states) if old % world_size == rank]
        own = {
            "codec": {kind: _added([each["codec"][kind] for each in mine]) for kind in states[0]["own"]["codec"]},
            "owed": _added([each["owed"] for each in mine]),
            "owed_weight": sum(each["owed_weight"] for each in mine),
            "num_steps": states[0]["own"]["num_steps"],
        }
        return {"clock": states[0]["clock"], "own": own, "server": states[0]["server"]}

    def is_own(self, state: dict[str, Any]) -> bool:
        return True

    # -- what there is to know ---------------------------------------------------------------------------------------

    def codecs(self) -> dict[str, str]:
        if self._rules is None:
            return {}
        chosen = {name: self._rules.codec_of(name, param) for name, param in self._params.items()}
        return {name: spec.render(codec) for name, codec in chosen.items() if not isinstance(codec, Dense)}

    def bytes_per_step(self) -> int:
        """Its pushes, and what its own shard answers to everybody's pulls."""
        coded = self.codecs()
        pushed = sum(
            spec.parse(coded[name], "codec").encoded_bytes(param.numel()) if name in coded else param.nbytes
            for name, param in self._params.items()
        )
        answered = 0
        if self._server is not None:
            names = assign(self._job.params, len(self._addresses))[self.comm.rank]
            answered = sum(self._params[name].nbytes for name in names) * self.comm.world_size
        return pushed // self.push_every + answered // self.pull_every

    def stats(self) -> dict[str, Any]:
        return {"servers": self._addresses, **self.client.stats()}

    def close(self) -> None:
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


def _leaving(strategy: ParameterServer) -> Callable[[], None]:
    """What to do at the end of the process, if the strategy is still there: this does not keep it."""
    alive = weakref.ref(strategy)

    def leave() -> None:
        left = alive()
        if left is not None:
            left.end_with_process()

    return leave


def _added(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The sum of what several ranks have kept, by parameter name."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            total[name] = total[name] + tensor if name in total else tensor.clone()
    return total
