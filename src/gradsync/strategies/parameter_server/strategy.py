"""The parameter_server strategy: workers push gradients to servers and pull parameters from them.

``ParameterServer`` decides when to push and pull. Its ``ServerSession`` holds the connection to the servers, and the
shard that this rank may host. How far workers may run ahead of each other is one option, ``staleness``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.buckets.bucket import BucketPlan
from gradsync.codecs.dense import Dense
from gradsync.comm.base import Communicator
from gradsync.errors import GradSyncError, OutOfStep
from gradsync.reducers.codec_rules import CodecRule, CodecRules
from gradsync.replicas.batch_context import batch_source
from gradsync.replicas.training import Training
from gradsync.strategies.base import OwnStep, Placement, Verdict
from gradsync.strategies.local import Local
from gradsync.strategies.parameter_server.accumulator import GradientAccumulator
from gradsync.strategies.parameter_server.client import Client
from gradsync.strategies.parameter_server.server.staleness import (
    PolicyLike,
    policy_for_spec,
    policy_text,
    resolve_policy,
)
from gradsync.strategies.parameter_server.session import ServerSession
from gradsync.strategies.weight_loads import LoadWatcher

STATE_KEYS = {"clock", "own", "server"}

_default_servers: tuple[str, ...] = ()
_default_keys: str | None = None


def set_default_servers(addresses: Sequence[str], keys: str | None = None) -> None:
    """Set the servers of every later ``parameter_server()`` that names none, for ``gradsync run --servers``."""
    global _default_servers, _default_keys
    _default_servers, _default_keys = tuple(addresses), keys


@spec.register("strategy", "parameter_server")
class ParameterServer(Local):
    """Push gradients to servers, each of which holds a shard of the parameters, and pull the updated parameters.

    ``optimizer.step()`` pushes this rank's gradients; the user's own optimizer runs at the servers, on each one's
    shard, with the learning rate and other settings that are sent with the push; then the parameters are overwritten in
    place with the servers'. Clipping and unscaling come before that, so they see this rank's own gradients.

    Args:
        staleness: 0: bulk-synchronous, the same as ``allreduce`` to float rounding. k: a worker may be k pushes ahead
            of the slowest. None: workers do not wait for each other. Higher => less waiting, older gradients.
        push_every: with ``staleness=None``: push every n-th step, the sum of n steps' gradients. Higher => fewer bytes.
        pull_every: with ``staleness=None``: pull every n-th step, and step locally in between.
        staleness_policy: what the servers do with stale gradients: "scale", "compensate", "drop(older_than=8)", a
            function of the staleness that gives a factor for the learning rate, or None: nothing.
        backup: with ``staleness=0``: do not wait for the slowest n workers; their late pushes are dropped.
        clip_norm: clip the gradient to this norm at the servers, after the sum; a worker can only clip its own.
        codec: compresses the gradients that are sent to the servers, with error feedback.
        servers: addresses of `gradsync serve` processes, one per shard. None: each rank hosts a shard in a thread.
        resume: True => continue from the weights that the servers hold, even if an earlier run has left them there.
            False => such servers refuse this run. A process that joins a run under way always gets its weights.
        mirrors: 1 => every shard has a second copy on another server, so that a killed server loses nothing.
        snapshot_every: servers that have a folder for it (`gradsync serve --snapshots`) write a snapshot after every n
            updates, 0: never. Lower => less is lost when a server is killed, more is written.
        keys: a folder made by `gradsync keys`; only holders of its keys can connect. None: rank 0 makes keys for this
            run and sends them to the other ranks. Required with ``servers``.
        open: True => no keys: every process that reaches a server can read and change the model. For trusted networks.

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
        resume: bool = False,
        mirrors: int = 0,
        snapshot_every: int = 100,
        keys: str | None = None,
        open: bool = False,
    ) -> None:
        super().__init__()
        self.staleness = staleness
        self.push_every, self.pull_every = push_every, pull_every
        self.policy = None if staleness_policy is None else resolve_policy(staleness_policy)
        self.backup, self.clip_norm = backup, clip_norm
        self.servers = None if servers is None else list(servers)
        self.resume = resume
        self.mirrors, self.snapshot_every = mirrors, snapshot_every
        self.keys, self.open_to_all = keys, open
        self._check()
        self._rules = None if codec is None else CodecRules.parse(codec)
        self._training: Training | None = None
        self._params: dict[str, torch.nn.Parameter] = {}  # those that the optimizer has, by name
        self._session: ServerSession | None = None
        self._accumulator = GradientAccumulator()
        self._num_steps = 0
        self._load_watcher: LoadWatcher | None = None
        # Of each parameter torch's version counter and its address, after this strategy's last write.
        self._versions: list[tuple[int, int]] = []
        self._storages: list[
            Tensor
        ] = []  # at these addresses: kept alive, so that no other tensor gets the same address

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
            raise ValueError("with staleness=0 no gradient is stale: staleness_policy needs staleness=k or None.")
        if self.backup and self.staleness != 0:
            raise ValueError(f"backup is for staleness=0, where a step waits for all workers; got {self.backup}.")
        if self.backup < 0 or self.mirrors not in (0, 1) or self.snapshot_every < 0:
            raise ValueError(
                f"expected backup >= 0, mirrors of 0 or 1, snapshot_every >= 0; got backup={self.backup}, "
                f"mirrors={self.mirrors}, snapshot_every={self.snapshot_every}."
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm is the norm that a gradient may have, above 0; got {self.clip_norm}.")
        if self.servers is not None and not self.servers:
            raise ValueError("servers=[] names no server. Leave it out to have each rank host a shard.")
        if self.open_to_all and self.keys is not None:
            raise ValueError(
                f"keys restrict who may connect, and open=True does not; got keys={self.keys!r} and open=True."
            )
        if self.servers is not None:
            policy_text(self.policy)  # refuses a function before anything is started
            if self.keys is None and not self.open_to_all:
                raise ValueError(
                    "servers= needs the keys that the servers have: keys='FOLDER', made by `gradsync keys FOLDER`. If "
                    "they were started with --open, use open=True."
                )

    def spec_arguments(self) -> dict[str, Any]:
        """The arguments for its spec."""
        return {
            "staleness": self.staleness,
            "push_every": self.push_every,
            "pull_every": self.pull_every,
            "staleness_policy": policy_for_spec(self.policy),
            "backup": self.backup,
            "clip_norm": self.clip_norm,
            "codec": None if self._rules is None else self._rules.as_argument(),
            "servers": self.servers,
            "resume": self.resume,
            "mirrors": self.mirrors,
            "snapshot_every": self.snapshot_every,
            "keys": self.keys,
            "open": self.open_to_all,
        }

    # -- setup ----------------------------------------------------------------------------------------------------

    def setup(self, training: Training) -> None:
        super().setup(training)
        optimized = {id(param) for group in training.optimizer.param_groups for param in group["params"]}
        _check_forward_writes_nothing(training.model, optimized)
        self._training = training
        self._load_watcher = LoadWatcher(training.model, training.params)
        self._params = {name: param for name, param in training.params.items() if id(param) in optimized}

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        if self._session is not None:  # only the bucket layout has changed, and pushes go by parameter name
            return
        if plan.sparse:
            raise ValueError(
                f"parameter_server pushes whole gradients; {plan.sparse[0].name} has sparse ones. Make its Embedding "
                "with sparse=False, or use allreduce."
            )
        assert self._training is not None, "setup() comes first"
        self._session = ServerSession(
            comm,
            self._params,
            self._training.optimizer,
            servers=self.servers or _default_servers,
            keys=self.keys if self.servers or not _default_servers else _default_keys,
            open=self.open_to_all,
            policy=self.policy,
            resume=self.resume,
            staleness=self.staleness,
            backup=self.backup,
            clip_norm=self.clip_norm,
            codecs=self.codecs(),
            mirrors=self.mirrors,
            snapshot_every=self.snapshot_every,
        )
        self._record_own_write()

    @property
    def session(self) -> ServerSession:
        """This rank's session with the servers."""
        if self._session is None:
            raise GradSyncError(
                "this parameter_server is closed, or was never attached: there is no connection to a server."
            )
        return self._session

    @property
    def client(self) -> Client:
        """The connection to the servers."""
        return self.session.client

    # -- around a step --------------------------------------------------------------------------------------------

    def own_step(self) -> OwnStep:
        return self._push_and_pull

    def _push_and_pull(self, step: int) -> Verdict:
        """Push the gradients and pull the parameters, or leave the step to the optimizer between two pulls."""
        assert self.header is not None, "a backward comes first"
        self._upload_loaded()
        self._num_steps += 1
        grads = {name: param.grad for name, param in self._params.items() if param.grad is not None}
        if self.push_every == 1:
            self.session.push(grads, self.header.weight)
        else:
            self._accumulator.add(grads, self.header.weight)
            if self._num_steps % self.push_every == 0:
                self._push_accumulated()
        if self._num_steps % self.pull_every:
            self.client.flush()  # the optimizer is about to change tensors that are being sent
            return Verdict.APPLY
        self._pull()
        return Verdict.DONE_ELSEWHERE

    def after_step(self, step: int) -> None:
        self._record_own_write()

    def skipped_step(self, step: int) -> None:
        self._upload_loaded()
        # inf on this rank alone: the others have pushed, and must not wait for a push that never comes.
        self._num_steps += 1
        if self.push_every == 1:
            self.session.push({}, 0.0)
        if self.pull_every == 1:
            self._pull()

    def _push_accumulated(self) -> None:
        if self._accumulator:
            self.session.push(*self._accumulator.take())

    def _pull(self, *, newest: bool = False) -> None:
        """Overwrite the parameters with the servers'. Blocks for as long as the staleness requires."""
        with batch_source(self.comm).waiting():
            self.session.pull(newest=newest)
        self._record_own_write()

    def _versions_now(self) -> list[tuple[int, int]]:
        return [(param._version, param.data_ptr()) for param in self._params.values()]

    def _record_own_write(self) -> None:
        """Remember the parameters' versions after a write by this strategy, or by the optimizer in its step."""
        addresses = [address for _, address in self._versions]
        self._versions = self._versions_now()
        if addresses != [address for _, address in self._versions]:
            self._storages = [param.data for param in self._params.values()]

    # -- weights that the user has loaded -------------------------------------------------------------------------

    def _upload_loaded(self) -> None:
        """Upload weights that the user has loaded: see [Note: loaded weights] in weight_loads.py.

        Blocks until all ranks, which must have loaded the same, are here.
        """
        assert self._load_watcher is not None, "setup() comes first"
        weights_were_loaded = self._load_watcher.was_loaded
        loaded, optimizer_too = self._load_watcher.take_changes(), self.session.remote_optimizer.take_loaded()
        if not weights_were_loaded and self._versions_now() != self._versions:
            self._check_unchanged()
        if loaded is None and not optimizer_too:
            return
        self.client.stats()  # after this every shard has received this rank's earlier pushes
        self._accumulator.take()  # gradients of the replaced weights
        with batch_source(self.comm).waiting():
            arrivals = self.client.barrier(
                "the step after weights or optimizer state were loaded", loaded and loaded.digest
            )
            digests = {worker: message.fields["value"] for worker, message in arrivals.items()}
            if len(set(digests.values())) > 1:
                raise OutOfStep(
                    "different weights were loaded into the model on different workers; their digests are "
                    f"{digests}. Load the same on all ranks, between the same steps."
                )
            if self.client.worker == min(arrivals) and loaded is not None:
                self.session.upload_weights(loaded.names)
            self.client.barrier("the servers have the loaded weights")
        self._record_own_write()

    def _check_unchanged(self) -> None:
        """Refuse writes that the servers do not know of. The same values at another address are not a write."""
        names = [
            name
            for (name, param), (version, address), old in zip(
                self._params.items(), self._versions, self._storages, strict=True
            )
            if param._version != version or (param.data_ptr() != address and not _same_values(old, param.data))
        ]
        if not names:
            return
        raise ValueError(
            f"parameter {names[0]} was written to since the last step ({len(names)} in all), not by load_state_dict(). "
            "The servers hold the weights, so the change would be lost. Make it before synchronize(), or bring it in "
            "by model.load_state_dict() on all ranks."
        )

    # -- settle and join ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self._upload_loaded()
        self._push_accumulated()
        self._settle("settle")
        self._wait_until_all_have_read()

    def join(self) -> int | None:
        self._upload_loaded()
        self._push_accumulated()
        self.client.become_observer()  # nobody waits for this rank's pushes from here on
        clocks = self._settle("join")
        self.session.join()
        self._wait_until_all_have_read()
        if sorted(clocks) != list(range(self.comm.world_size)) or len(set(clocks.values())) == 1:
            return None
        # Schedules of ranks that had fewer batches have missed steps: all take over those of the rank that had most.
        leader = max(clocks, key=lambda worker: (clocks[worker], -worker))
        self.session.remote_optimizer.ignore_next_load = self.comm.rank != leader
        return leader

    def _settle(self, why: str) -> dict[int, int]:
        """Wait for all live workers, and pull the newest parameters; returns the clock of each worker. Blocks."""
        self._pull(newest=True)  # after this the servers have applied this rank's pushes
        with batch_source(self.comm).waiting():
            arrivals = self.client.barrier(why, self.client.clock, self._buffers())
        self._pull(newest=True)
        self._load_buffers([arrivals[worker].tensors for worker in sorted(arrivals)])
        return {worker: int(message.fields["value"]) for worker, message in arrivals.items()}

    def _wait_until_all_have_read(self) -> None:
        """Wait for all: a rank that went on would change what others read and, bulk-synchronous, step without them."""
        with batch_source(self.comm).waiting():
            self.client.barrier("all have read")

    def _buffers(self) -> dict[str, Tensor]:
        assert self._training is not None, "setup() comes first"
        if self._training.buffers.mode == "none":
            return {}
        return {name: buffer.detach().cpu() for name, buffer in self._training.model.named_buffers()}

    def _load_buffers(self, everyones: Sequence[dict[str, Tensor]]) -> None:
        """Set the buffers to those of the lowest live worker or, in mode "mean", to the mean of the live workers."""
        assert self._training is not None, "setup() comes first"
        mode = self._training.buffers.mode
        if mode == "none":
            return
        for name, buffer in self._training.model.named_buffers():
            values = [buffers[name] for buffers in everyones]
            mean = mode == "mean" and buffer.is_floating_point()
            buffer.data.copy_(torch.stack(values).mean(0) if mean else values[0])

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        # Only rank 0 saves it: on the other ranks it would be the same.
        server = self.session.remote_optimizer.fetch_server_state() if self.comm.rank == 0 else {}
        own = {"codec": self.client.state_dict(), **self._accumulator.state_dict(), "num_steps": self._num_steps}
        return {"clock": self.client.clock, "own": own, "server": server}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != STATE_KEYS:
            raise ValueError(f"expected a parameter_server's state: {sorted(STATE_KEYS)}; got {sorted(state)}.")
        own = state["own"]
        assert self._load_watcher is not None, "setup() comes first"
        self._load_watcher.reset()  # loaded weights go to the servers with this state
        self.session.remote_optimizer.take_loaded()
        self.client.load_state_dict(own["codec"])
        self._accumulator.load_state_dict(own)
        self._num_steps = own["num_steps"]
        self.comm.barrier()  # all ranks have joined, without a push, before the upload changes the clocks
        if self.comm.rank == 0:
            self.session.remote_optimizer.upload(state["server"])
        self.comm.barrier()  # every rank loads its state
        if self.client.refresh() != state["clock"] and self.staleness == 0:
            raise ValueError(
                f"the state has {state['clock']} pushes of this rank, and rank 0's state has {self.client.clock}. Load "
                "what all ranks have saved at the same time."
            )
        self._pull(newest=True)

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        # The unsent gradients and residuals of old rank q go to rank q mod world_size: none is lost or sent twice.
        mine = [state["own"] for old, state in enumerate(states) if old % world_size == rank]
        own = {
            "codec": {kind: _added([each["codec"][kind] for each in mine]) for kind in states[0]["own"]["codec"]},
            "owed": _added([each["owed"] for each in mine]),
            "owed_weight": sum(each["owed_weight"] for each in mine),
            "num_steps": states[0]["own"]["num_steps"],
        }
        return {"clock": states[0]["clock"], "own": own, "server": states[0]["server"]}

    def placement(self, path: tuple[str, ...]) -> Placement:
        return Placement.VARYING if path in (("own", "owed"), ("server",)) else Placement.OWN

    # -- information ----------------------------------------------------------------------------------------------

    def codecs(self) -> dict[str, str]:
        if self._rules is None:
            return {}
        chosen = {name: self._rules.codec_of(name, param) for name, param in self._params.items()}
        return {name: spec.render(codec) for name, codec in chosen.items() if not isinstance(codec, Dense)}

    def bytes_per_step(self) -> int:
        """Its pushes to the shards of other ranks, and its own shard's replies to their pulls."""
        coded, hosted = self.codecs(), self.session.hosted()
        pushed = sum(
            spec.parse(coded[name], "codec").encoded_bytes(param.numel()) if name in coded else param.nbytes
            for name, param in self._params.items()
            if name not in hosted
        )
        answered = sum(self._params[name].nbytes for name in hosted) * (self.comm.world_size - 1)
        return pushed // self.push_every + answered // self.pull_every

    def elastic_obstacle(self) -> str:
        return "its servers have a membership of their own, and drop a lost worker: use --keep-going, or --servers"

    def stats(self) -> dict[str, Any]:
        return {"servers": self.session.addresses, **self.client.stats()}

    def close(self) -> None:
        if self._load_watcher is not None:
            self._load_watcher.remove()
        session, self._session = self._session, None
        self._versions, self._storages = [], []
        if session is not None:
            session.close()


def _check_forward_writes_nothing(model: torch.nn.Module, optimized: set[int]) -> None:
    """Refuse layers whose forward changes a parameter in place: the servers would not know of it."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) or module.max_norm is None:
            continue
        if id(module.weight) in optimized:
            raise ValueError(
                f"expected layers whose forward changes no parameter; got {type(module).__name__} {name or 'model'!r} "
                f"with max_norm={module.max_norm}, whose forward scales its rows in place. The servers hold the "
                "weights, so that would be lost. Make it with max_norm=None, or use allreduce."
            )


def _same_values(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one.to(other.device), other, rtol=0.0, atol=0.0, equal_nan=True)


def _added(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The sum of several ranks' tensors, by parameter name."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            total[name] = total[name] + tensor if name in total else tensor.clone()
    return total
