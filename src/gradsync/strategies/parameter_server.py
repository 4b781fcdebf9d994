"""The parameter server: workers push gradients and pull parameters; how far they may part is one dial, staleness."""

from __future__ import annotations

from collections.abc import Sequence
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
from gradsync.server.staleness import PolicyLike, resolve_policy, wire_text, written
from gradsync.strategies.base import Verdict
from gradsync.strategies.local import Local
from gradsync.strategies.membership import Membership
from gradsync.strategies.owed import Owed
from gradsync.training import Training

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
        self._training: Training | None = None
        self._params: dict[str, torch.nn.Parameter] = {}  # those that the optimizer has, by name
        self._member: Membership | None = None
        self._owed = Owed()
        self._num_steps = 0

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
        if self._member is not None:  # the layout has changed, and what is pushed goes by name
            return
        if plan.sparse:
            raise ValueError(
                f"parameter_server pushes whole gradients; {plan.sparse[0].name} has sparse ones. Make its Embedding "
                "with sparse=False, or use allreduce."
            )
        assert self._training is not None, "meet() comes first"
        self._member = Membership(
            comm,
            self._params,
            self._training.optimizer,
            servers=self.servers or _said_servers,
            keys=self.keys or (None if self.servers else _said_keys),
            policy=self.policy,
            staleness=self.staleness,
            backup=self.backup,
            clip_norm=self.clip_norm,
            codecs=self.codecs(),
            mirrors=self.mirrors,
            snapshot_every=self.snapshot_every,
        )

    @property
    def member(self) -> Membership:
        """This rank's place among the servers."""
        if self._member is None:
            raise GradSyncError("this parameter_server is closed, or was never attached: there is no line to a server.")
        return self._member

    @property
    def client(self) -> Client:
        """The line to the servers."""
        return self.member.client

    # -- around a step ---------------------------------------------------------------------------------------------

    def before_step(self, step: int) -> Verdict:
        assert self.header is not None, "open() comes first"
        self._num_steps += 1
        grads = {name: param.grad for name, param in self._params.items() if param.grad is not None}
        if self.push_every == 1:
            self.member.push(grads, self.header.weight)
        else:
            self._owed.add(grads, self.header.weight)
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
            self.member.push({}, 0.0)
        if self.pull_every == 1:
            self._pull()

    def _push_owed(self) -> None:
        if self._owed:
            self.member.push(*self._owed.take())

    def _pull(self, *, newest: bool = False) -> None:
        """Overwrite the parameters with the servers'. Blocks for as long as the staleness asks."""
        with self.comm.feed.waiting():
            self.member.pull(newest=newest)

    # -- bringing all together ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        self._push_owed()
        self._settle("settle")
        self._all_have_read()

    def join(self) -> int | None:
        self._push_owed()
        self.client.step_aside()  # nobody waits for this rank's pushes from here on
        clocks = self._settle("join")
        self.member.join()
        self._all_have_read()
        if sorted(clocks) != list(range(self.comm.world_size)) or len(set(clocks.values())) == 1:
            return None
        # Schedules of ranks that had fewer batches have missed steps: all take over those of the rank that had most.
        leader = max(clocks, key=lambda worker: (clocks[worker], -worker))
        self.member.served.takes_over = self.comm.rank != leader
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
        server = self.member.served.fetch_rest() if self.comm.rank == 0 else {}  # the others' would be the same
        own = {"codec": self.client.state_dict(), **self._owed.state_dict(), "num_steps": self._num_steps}
        return {"clock": self.client.clock, "own": own, "server": server}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != STATE_KEYS:
            raise ValueError(f"expected a parameter_server's state: {sorted(STATE_KEYS)}; got {sorted(state)}.")
        own = state["own"]
        self.client.load_state_dict(own["codec"])
        self._owed.load_state_dict(own)
        self._num_steps = own["num_steps"]
        self.comm.barrier()  # a rank that is still on its way in has made no push, and would not be known as such
        if self.comm.rank == 0:
            self.member.served.hand_over(state["server"])
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
        answered = self.member.hosted_bytes() * self.comm.world_size
        return pushed // self.push_every + answered // self.pull_every

    def stats(self) -> dict[str, Any]:
        return {"servers": self.member.addresses, **self.client.stats()}

    def close(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.close()


def _added(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The sum of what several ranks have kept, by parameter name."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            total[name] = total[name] + tensor if name in total else tensor.clone()
    return total
