"""The gossip strategy: after each step a rank averages its model with one or two neighbours. There is no server.

``Gossip`` connects the ranks (peer_mesh.py), mixes their models (synchronous.py with mixing.py or choco.py, or
asynchronous.py), admits newcomers (join.py), and brings all together for ``join`` and ``settle`` (barrier.py).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.buckets.bucket import BucketPlan
from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object
from gradsync.comm.rendezvous import own_addresses
from gradsync.comm.shm.segment import host_identity
from gradsync.messaging.key_folder import member_pair
from gradsync.messaging.keys import KeyPair, check_same_key_choice, make_run_keys
from gradsync.reducers.codec_rules import MIN_NUMEL, CodecRule, CodecRules
from gradsync.replicas.agreement import plain_name
from gradsync.replicas.training import Training
from gradsync.strategies.base import Placement, Verdict
from gradsync.strategies.gossip.asynchronous import AsyncGossip
from gradsync.strategies.gossip.barrier import BY_COUNT, BY_WEIGHT, Barrier
from gradsync.strategies.gossip.choco import Choco
from gradsync.strategies.gossip.join import JoinClient, JoinServer, copy_model, new_member_id
from gradsync.strategies.gossip.mixing import Mixer, PushSum
from gradsync.strategies.gossip.peer_mesh import PeerMesh
from gradsync.strategies.gossip.replica import Replica
from gradsync.strategies.gossip.synchronous import SyncGossip
from gradsync.strategies.gossip.topology import Topology
from gradsync.strategies.local import Local
from gradsync.strategies.weight_loads import LoadWatcher

LOOPBACK = "127.0.0.1"


@spec.register("strategy", "gossip")
class Gossip(Local):
    """Every rank steps on its own gradients and averages its model with its neighbours'. No rank is indispensable.

    Any rank may die at any time, rank 0 too: the rest go on. ``sync.settle()`` gives all ranks the exact mean.

    Args:
        topology: "exponential" (one peer a step, mixes fastest), "ring" (two neighbours, the only one that takes a
            codec), "random" (pairs, drawn for each step), or a :class:`gradsync.strategies.gossip.Topology`.
        asynchronous: True => no rank waits for a slower one; gradients are a little stale, and runs not repeatable.
        codec: compresses what is sent; needs ``topology="ring"`` and not asynchronous. Neighbours keep estimates.
        rate: with a codec, how far a step goes towards the neighbours' estimates. Lower => slower agreement; higher =>
            a coarse codec may diverge. Default: from the measured quality of the codec.
        min_numel: with a codec, parameters with fewer values, and all vectors, are sent uncompressed.
        seed: for codecs that round or choose at random.
        join: the address of any rank of a running job (its ``sync.stats()["address"]``), to join it as a newcomer.
        host: the address to listen on. Default: loopback if all ranks are on one host, else this host's own address.
        port: rank r listens on port + r; 0 takes free ports.
        keys: a folder made by `gradsync keys`, with its ``server.key``, the same on all ranks: without it nobody can
            connect. "": rank 0 makes keys for this run and sends them to the other ranks. A newcomer needs the run's
            keys.
        open: True => no keys: whoever reaches a rank can read and change the model. Only for trusted networks.
        silent_s: seconds after which the connections of a silent host count as broken. Larger => it is found later, and
            a host that hangs for a while is not given up.

    >>> import gradsync, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with gradsync.synchronize(model, optimizer, "gossip(topology=ring)") as sync:
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    ...     sync.settle()
    ...     sync.stats()["living"]
    [0]
    """

    def __init__(
        self,
        *,
        topology: Topology | str = "exponential",
        asynchronous: bool = False,
        codec: CodecRule | None = None,
        rate: float | None = None,
        min_numel: int = MIN_NUMEL,
        seed: int = 0,
        join: str = "",
        host: str = "",
        port: int = 0,
        keys: str = "",
        open: bool = False,
        silent_s: float = 1.25,
    ) -> None:
        super().__init__()
        self.topology: Topology = spec.resolve(topology, "topology")
        self.asynchronous = asynchronous
        self._rules = None if codec is None else CodecRules.parse(codec, min_numel=min_numel)
        self._min_numel = min_numel
        self._rate, self._seed = rate, seed
        self._join, self._host, self._port, self._keys = join, host, port, keys
        self._open_to_all = open
        self._silent_s = silent_s
        self._check_options()
        self._mesh: PeerMesh | None = None
        self._closed = False
        self._distance_at_settle = math.nan

    def _check_options(self) -> None:
        if self._rules is not None:
            if self.asynchronous or not self.topology.neighbours_stay:
                raise ValueError(
                    "with a codec every neighbour keeps an estimate of this rank and must receive all of its messages, "
                    "so neighbours have to stay the same and in step; got "
                    + ("asynchronous=True." if self.asynchronous else f"topology={spec.render(self.topology)}.")
                    + " Use gossip(topology=ring, codec=...), or leave out the codec."
                )
            for _, one in self._rules.patterns:
                if getattr(one, "momentum", 0.0):
                    raise ValueError("dgc corrects the momentum of gradients; gossip sends models. Use topk.")
        if self._rate is not None and not 0 < self._rate <= 1:
            raise ValueError(f"rate must be above 0 and at most 1; got {self._rate}.")
        if self._silent_s <= 0:
            raise ValueError(f"silent_s must be above 0 seconds; got {self._silent_s}.")
        if self._open_to_all and self._keys:
            got = f"keys={self._keys!r} and open=True"
            raise ValueError(f"keys= restricts who may connect, and open=True does not; got {got}.")
        if self._join and not self._keys and not self._open_to_all:
            raise ValueError(
                "a newcomer needs the keys of the run that it joins: start all with keys='FOLDER', made by "
                "`gradsync keys FOLDER`. If the run was started with open=True, pass that here too."
            )
        if not 0 <= self._port <= 65535:
            raise ValueError(f"port must be from 0 to 65535; got {self._port}.")

    def spec_arguments(self) -> dict[str, Any]:
        """The arguments for its spec; addresses and keys are not part of it."""
        return {
            "topology": self.topology if self.topology != spec.parse("exponential", "topology") else "exponential",
            "asynchronous": self.asynchronous,
            "codec": None if self._rules is None else self._rules.as_argument(),
            "rate": self._rate,
            "min_numel": self._min_numel,
            "seed": self._seed,
        }

    # -- starting -------------------------------------------------------------------------------------------------

    def setup(self, training: Training) -> None:
        super().setup(training)
        self._training = training
        self._load_watcher = LoadWatcher(training.model, training.params)

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        planned = {slot.name for slot in plan.slots()}
        params = {name: param for name, param in self._training.params.items() if name in planned}
        if self._mesh is None or self._closed:
            self._connect(params, comm)
        elif list(params) != self._replica.names:  # parameters were frozen or unfrozen, on all ranks alike
            self._set_params(params)

    def _connect(self, params: dict[str, torch.nn.Parameter], comm: Communicator) -> None:
        if self._join and comm.world_size > 1:
            raise ValueError(f"a newcomer joins as a world of one; this is one of {comm.world_size} ranks.")
        check_same_key_choice(comm, keys=self._keys, open=self._open_to_all)
        hosts = all_gather_object(comm, "/".join(host_identity()))
        host = self._host or (LOOPBACK if len(set(hosts)) == 1 else [*own_addresses(), LOOPBACK][0])
        self._closed = False
        mesh = self._mesh = PeerMesh(
            new_member_id() if self._join else comm.rank,
            host=host,
            port=self._port + comm.rank if self._port else 0,
            keys=self._find_keys(comm),
            silent_s=self._silent_s,
            timeout_s=comm.timeout_s,
        )
        self._barrier = Barrier(mesh, timeout_s=comm.timeout_s)
        self._join_server = JoinServer(
            mesh, self._barrier, lambda: {k: v.clone() for k, v in self._current_model().items()}
        )
        self._join_client = JoinClient(mesh, timeout_s=comm.timeout_s) if self._join else None
        try:
            self._begin(params, comm)
        except BaseException:
            mesh.kill()
            self._mesh = None
            raise

    def _find_keys(self, comm: Communicator) -> KeyPair | None:
        if self._open_to_all:
            return None
        return member_pair(self._keys) if self._keys else make_run_keys(comm)

    def _begin(self, params: dict[str, torch.nn.Parameter], comm: Communicator) -> None:
        mesh = self.mesh
        if self._join_client is not None:
            copy_model(self._current_model(), self._join_client.fetch(self._join), self._join)
        self._replica = Replica(params)
        if self.asynchronous:
            self._gossip: AsyncGossip | SyncGossip = AsyncGossip(mesh, self.topology, self._replica)
        else:
            self._gossip = SyncGossip(mesh, self._barrier, self.topology, self._make_mixer(), timeout_s=comm.timeout_s)
        if self._join_client is None:
            gathered = all_gather_object(comm, [mesh.address, secrets.token_hex(8)])
            addresses = {rank: str(address) for rank, (address, _) in enumerate(gathered)}
            mesh.start(str(gathered[0][1]), addresses, comm.timeout_s)
            comm.barrier()  # else a rank that dies in its first steps is gone before a slow one has connected to it
            if isinstance(self._gossip, SyncGossip):
                self._gossip.begin(0)
                self._gossip.mixer.on_consensus(self._gossip.targets())

    def _set_params(self, params: dict[str, torch.nn.Parameter]) -> None:
        self._replica = Replica(params)
        if isinstance(self._gossip, AsyncGossip):
            self._gossip.set_replica(self._replica)
        else:
            self._gossip.mixer = self._make_mixer()
            self._gossip.mixer.begin_epoch(self._gossip.targets())

    def _make_mixer(self) -> Mixer:
        if self._rules is None:
            return PushSum(self._replica)
        return Choco(self._replica, self._rules, rate=self._rate, seed=self._seed, member_id=self.mesh.member_id)

    @property
    def mesh(self) -> PeerMesh:
        """The connections to the other members, once attached."""
        assert self._mesh is not None, "attach() comes first"
        return self._mesh

    # -- newcomers ------------------------------------------------------------------------------------------------

    def _current_model(self) -> dict[str, Tensor]:
        """Everything a newcomer needs, by name: the parameters, frozen ones too, and the buffers."""
        values = {f"p/{name}": param.detach() for name, param in self._training.params.items()}
        return values | {f"b/{name}": buffer for name, buffer in self._buffers().items()}

    def _buffers(self) -> dict[str, Tensor]:
        return {plain_name(name): buffer.detach() for name, buffer in self._training.model.named_buffers()}

    def _serve_joins(self) -> None:
        """Join the run if this rank is a newcomer, and serve pending join requests. Called between two steps."""
        if self._join_client is not None:
            clock, self._barrier.next_number = self._join_client.join()
            self._join_client = None
            if isinstance(self._gossip, SyncGossip):
                self._gossip.begin(clock)
                self._gossip.mixer.begin_epoch(self._gossip.targets())
            else:
                self._gossip.clock = clock
        self._join_server.serve_pending(self._gossip.clock)

    # -- a step ---------------------------------------------------------------------------------------------------

    def before_step(self, step: int) -> Verdict:
        self._follow_loaded()
        return Verdict.APPLY

    def after_step(self, step: int) -> None:
        self._serve_joins()
        self._gossip.mix()

    def skipped_step(self, step: int) -> None:
        self._follow_loaded()
        self.after_step(step)

    def _follow_loaded(self) -> None:
        """Mix loaded weights from now on: see [Note: loaded weights] in weight_loads.py.

        Asynchronous gossip blocks here until all ranks have loaded.
        """
        if self._load_watcher.take_changes() is None:
            return
        gossip = self._gossip
        if isinstance(gossip, SyncGossip):
            gossip.mixer.follow_loaded()
            return
        # Two barriers, as in load_state_dict: no rank may average loaded weights with a rank that has not loaded yet.
        if self._join_client is None:
            self._wait_for_all_idle("loading weights")
        gossip.restart()
        if self._join_client is None:
            self._wait_for_all_idle("loading weights")

    def join(self) -> int | None:
        self._wait_for_all("join")
        return None

    def settle(self) -> None:
        number = self._wait_for_all("settle")
        if isinstance(self._gossip, AsyncGossip):
            with self._gossip.paused():  # a quicker rank may train again before this one has the mean
                self._take_mean(number)
                self._gossip.rebase()
        else:
            self._take_mean(number)
            self._gossip.mixer.on_consensus(self._gossip.targets())

    def _take_mean(self, number: int) -> None:
        replica = self._replica
        tensors = {f"{BY_WEIGHT}{at}": part.x.to("cpu", copy=True) for at, part in enumerate(replica.parts)}
        means = self._barrier.mean(number, replica.weight, tensors | self._buffers_to_settle())
        square_distance = 0.0
        with torch.no_grad():
            for at, part in enumerate(replica.parts):
                mean = means[f"{BY_WEIGHT}{at}"].to(part.device)
                square_distance += float((part.x / replica.weight - mean).double().square().sum())
                part.x.copy_(mean)
            for name, buffer in self._buffers().items():
                found = means.get(f"{BY_COUNT}/{name}", means.get(f"f/{name}"))
                if found is not None:
                    buffer.copy_(found)
        self._distance_at_settle = math.sqrt(square_distance / max(1, replica.numel))
        replica.weight = 1.0
        replica.write_model()

    def _wait_for_all(self, what: str) -> int:
        """Block until all ranks are here. Synchronous gossip goes on mixing meanwhile; returns the barrier's number."""
        self._follow_loaded()
        self._serve_joins()
        gossip = self._gossip
        if isinstance(gossip, SyncGossip):
            number = self._barrier.wait_for_all(what, clock=lambda: gossip.clock, step=gossip.mix)
            gossip.mixer.replica.add_local_updates()
            return number
        number = self._wait_for_all_idle(what)
        gossip.refresh()
        return number

    def _buffers_to_settle(self) -> dict[str, Tensor]:
        mode = self._training.buffers.mode
        if mode == "none":
            return {}
        return {
            f"{BY_COUNT if mode == 'mean' and buffer.is_floating_point() else 'f'}/{name}": buffer.to("cpu", copy=True)
            for name, buffer in self._buffers().items()
        }

    # -- what it costs and where it stands ------------------------------------------------------------------------

    def bytes_per_step(self) -> int:
        if self._mesh is None:
            return 0
        whole = sum(part.x.numel() * part.dtype.itemsize for part in self._replica.parts)
        if isinstance(self._gossip, AsyncGossip):
            return 2 * whole if len(self.mesh.membership.active()) > 1 else 0  # one request, and about one reply
        mixer = self._gossip.mixer
        return len(self._gossip.targets()) * (
            mixer.num_bytes(self._gossip.clock) if isinstance(mixer, Choco) else whole
        )

    def codecs(self) -> dict[str, str]:
        mixer = self._gossip.mixer if self._mesh is not None and isinstance(self._gossip, SyncGossip) else None
        return mixer.codecs() if isinstance(mixer, Choco) else {}

    def elastic_obstacle(self) -> str:
        return "it has a membership of its own, and goes on by itself when a worker is lost: use --keep-going"

    def stats(self) -> dict[str, Any]:
        """Active and lost members, this rank's neighbours, bytes sent, and how far models differ (``consensus``)."""
        mesh, gossip = self.mesh, self._gossip
        with mesh.changed:
            active, dead, clocks = mesh.membership.active(), dict(mesh.membership.dead), dict(mesh.clocks)
        distance = gossip.distance if isinstance(gossip, AsyncGossip) else gossip.mixer.distance
        stats: dict[str, Any] = {
            "member": mesh.member_id,
            "address": mesh.address,
            "living": active,
            "lost": dead,
            "clocks": {**{member: clocks.get(member, 0) for member in active}, mesh.member_id: gossip.clock},
            "consensus": {"rms": distance.rms, "relative": distance.relative, "at_settle": self._distance_at_settle},
            "push_sum_weight": self._replica.weight,
            "bytes_sent": mesh.num_bytes,
            "malformed": mesh.malformed,
        }
        if isinstance(gossip, AsyncGossip):
            peer = gossip.peer()
            return stats | {
                "neighbours": [] if peer is None else [peer],
                "staleness": gossip.stats(),
                "unanswered": gossip.unanswered,
            }
        return stats | {"neighbours": gossip.targets(), "late": gossip.late}

    # -- what must survive a restart ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        gossip = self._gossip
        if isinstance(gossip, SyncGossip):
            self._follow_loaded()
        mixed = gossip.state_dict() if isinstance(gossip, AsyncGossip) else gossip.mixer.state_dict()
        buffers = {name: buffer.clone() for name, buffer in self._buffers().items()}
        return {"clock": gossip.clock, "mixed": mixed, "buffers": buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"clock", "mixed", "buffers"}:
            raise ValueError(f"expected the state of gossip; got {sorted(state)}. Was it saved by another strategy?")
        gossip = self._gossip
        # Two barriers: after the first no message of before the load is on its way, and none of after it is sent before
        # the second.
        self._load_watcher.reset()  # the state replaces whatever was loaded
        self._wait_for_all_idle("load_state_dict")
        if isinstance(gossip, AsyncGossip):
            gossip.load_state_dict(state["mixed"])
            gossip.clock = int(state["clock"])
        else:
            gossip.reset()
            gossip.begin(int(state["clock"]))
            gossip.mixer.load_state_dict(state["mixed"])
        with torch.no_grad():
            for name, buffer in self._buffers().items():
                if name in state["buffers"]:
                    buffer.copy_(state["buffers"][name])
        self._wait_for_all_idle("load_state_dict")

    def _wait_for_all_idle(self, what: str) -> int:
        """Block until all ranks are here, without mixing, and with no request of this rank outstanding."""
        gossip = self._gossip
        if isinstance(gossip, AsyncGossip):
            gossip.wait_for_reply(what, self._barrier.timeout_s)
        return self._barrier.wait_for_all(what, clock=lambda: gossip.clock, step=None)

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        chosen = states[rank % len(states)]
        mixed = {name: value for name, value in chosen["mixed"].items() if name != "estimates"}
        if "estimates" in chosen["mixed"]:
            mixed["estimates"] = {}  # the neighbours are others now: the next messages are sent whole
        return {**chosen, "mixed": mixed, "clock": max(state["clock"] for state in states)}

    def placement(self, path: tuple[str, ...]) -> Placement:
        return Placement.VARYING if path == ("mixed", "estimates") else Placement.OWN

    def close(self) -> None:
        self._load_watcher.remove()
        if self._mesh is not None:
            self._mesh.close()
            self._closed = True  # the next attach() connects again
