"""Decentralised training: after each step a rank averages its model with a neighbour or two, and there is no centre."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.bucket import BucketPlan
from gradsync.comm.base import Communicator
from gradsync.comm.curve import KeyPair
from gradsync.comm.objects import all_gather_object
from gradsync.comm.rendezvous import own_addresses
from gradsync.comm.segment import host_identity
from gradsync.gossip.choco import Choco
from gradsync.gossip.circle import Circle
from gradsync.gossip.door import Door, Newcomer, new_name, take_over
from gradsync.gossip.meeting import BY_WEIGHT, PLAINLY, Meeting
from gradsync.gossip.mixing import Mixer, PushSum
from gradsync.gossip.pairs import Pairs
from gradsync.gossip.replica import Replica
from gradsync.gossip.rounds import Rounds
from gradsync.gossip.topology import Topology
from gradsync.reducers.rules import MIN_NUMEL, CodecRule, Rules
from gradsync.replicas import plain_name
from gradsync.strategies.local import Local
from gradsync.training import Training

LOOPBACK = "127.0.0.1"


@spec.register("strategy", "gossip")
class Gossip(Local):
    """Every rank steps on its own gradients and averages its model with its neighbours'. Nobody is needed by all.

    Ranks may die at any time, the first one too: the rest go on. ``sync.settle()`` gives all the exact mean.

    Args:
        topology: "exponential" (one peer a step, mixes fastest), "ring" (two neighbours, the only one that takes a
            codec), "random" (pairs, drawn for each step), or a :class:`gradsync.gossip.Topology`.
        asynchronous: True => nobody waits for a slower rank; gradients are then a little stale, and no two runs alike.
        codec: compresses what is sent; with ``topology="ring"`` and not asynchronous. Neighbours keep estimates.
        rate: how far a step goes towards the neighbours' estimates, with a codec. Lower => slower agreement; higher =>
            a coarse codec may diverge. From the codec's own faithfulness unless said.
        min_numel: with a codec, parameters with fewer values, and all vectors, are sent whole.
        seed: of codecs that round or choose at random.
        join: the address of any rank of a run under way (its ``sync.stats()["address"]``): come to it as a newcomer.
        host: the address to listen at: the loopback if all ranks are on one host, else this host's own, unless said.
        port: rank r listens at port + r; 0 takes free ones.
        keys: a file of ``gradsync keys`` that all ranks have: without it nobody gets in, and what travels is encrypted.
        silent_s: larger => a host that fell silent is found later, and one that hangs for a while is spared.

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
        silent_s: float = 1.25,
    ) -> None:
        super().__init__()
        self.topology: Topology = spec.resolve(topology, "topology")
        self.asynchronous = asynchronous
        self._rules = None if codec is None else Rules.read(codec, min_numel=min_numel)
        self._min_numel = min_numel
        self._rate, self._seed = rate, seed
        self._join, self._host, self._port, self._keys = join, host, port, keys
        self._silent_s = silent_s
        self._check_options()
        self._circle: Circle | None = None
        self._closed = False
        self._apart_at_settle = math.nan

    def _check_options(self) -> None:
        if self._rules is not None:
            if self.asynchronous or not self.topology.neighbours_stay:
                raise ValueError(
                    "with a codec every neighbour keeps an estimate of this rank and must hear each word about it, so "
                    "neighbours have to stay the same and in step; got "
                    + ("asynchronous=True." if self.asynchronous else f"topology={spec.render(self.topology)}.")
                    + " Use gossip(topology=ring, codec=...), or leave out the codec."
                )
            for _, one in self._rules.patterns:
                if getattr(one, "momentum", 0.0):
                    raise ValueError("dgc corrects the momentum of gradients; gossip sends models. Use topk.")
        if self._rate is not None and not 0 < self._rate <= 1:
            raise ValueError(f"rate is a part of the way to the neighbours, above 0 and at most 1; got {self._rate}.")
        if self._silent_s <= 0:
            raise ValueError(f"silent_s is a time above 0; got {self._silent_s}.")
        if not 0 <= self._port <= 65535:
            raise ValueError(f"port must be from 0 to 65535; got {self._port}.")

    def spec_arguments(self) -> dict[str, Any]:
        """What it was made with, for specs; where it listens and whom it came to is no part of that."""
        return {
            "topology": self.topology if self.topology != spec.parse("exponential", "topology") else "exponential",
            "asynchronous": self.asynchronous,
            "codec": None if self._rules is None else self._rules.written(),
            "rate": self._rate,
            "min_numel": self._min_numel,
            "seed": self._seed,
        }

    # -- the beginning --------------------------------------------------------------------------------------------

    def meet(self, training: Training) -> None:
        self._training = training

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        planned = {slot.name for slot in plan.slots()}
        params = {name: param for name, param in self._training.params.items() if name in planned}
        if self._circle is None or self._closed:
            self._open(params, comm)
        elif list(params) != self._replica.names:  # frozen or unfrozen, on all ranks alike
            self._adopt(params)

    def _open(self, params: dict[str, torch.nn.Parameter], comm: Communicator) -> None:
        if self._join and comm.world_size > 1:
            raise ValueError(f"a newcomer comes alone, as a world of one; this is one of {comm.world_size} ranks.")
        hosts = all_gather_object(comm, "/".join(host_identity()))
        host = self._host or (LOOPBACK if len(set(hosts)) == 1 else [*own_addresses(), LOOPBACK][0])
        self._closed = False
        circle = self._circle = Circle(
            new_name() if self._join else comm.rank,
            host=host,
            port=self._port + comm.rank if self._port else 0,
            keys=KeyPair.read(self._keys) if self._keys else None,
            silent_s=self._silent_s,
        )
        self._meeting = Meeting(circle, timeout_s=comm.timeout_s)
        self._door = Door(circle, self._meeting, lambda: {k: v.clone() for k, v in self._model_now().items()})
        self._newcomer = Newcomer(circle, timeout_s=comm.timeout_s) if self._join else None
        try:
            self._begin(params, comm)
        except BaseException:
            circle.die()
            self._circle = None
            raise

    def _begin(self, params: dict[str, torch.nn.Parameter], comm: Communicator) -> None:
        circle = self.circle
        if self._newcomer is not None:
            take_over(self._model_now(), self._newcomer.fetch(self._join), self._join)
        self._replica = Replica(params)
        if self.asynchronous:
            self._talk: Pairs | Rounds = Pairs(circle, self.topology, self._replica)
        else:
            self._talk = Rounds(circle, self._meeting, self.topology, self._make_mixer(), timeout_s=comm.timeout_s)
        if self._newcomer is None:
            said = all_gather_object(comm, [circle.address, secrets.token_hex(8)])
            circle.start(str(said[0][1]), {rank: str(one[0]) for rank, one in enumerate(said)}, comm.timeout_s)
            comm.barrier()  # else one that dies in its first steps is gone before a slow one has a line to it
            if isinstance(self._talk, Rounds):
                self._talk.begin(0)
                self._talk.mixer.agree(self._talk.targets())

    def _adopt(self, params: dict[str, torch.nn.Parameter]) -> None:
        self._replica = Replica(params)
        if isinstance(self._talk, Pairs):
            self._talk.adopt(self._replica)
        else:
            self._talk.mixer = self._make_mixer()
            self._talk.mixer.enter(self._talk.targets())

    def _make_mixer(self) -> Mixer:
        if self._rules is None:
            return PushSum(self._replica)
        return Choco(self._replica, self._rules, rate=self._rate, seed=self._seed, me=self.circle.me)

    @property
    def circle(self) -> Circle:
        """Who takes part, once attached."""
        assert self._circle is not None, "attach() comes first"
        return self._circle

    # -- newcomers ------------------------------------------------------------------------------------------------

    def _model_now(self) -> dict[str, Tensor]:
        """Everything a newcomer needs, by name: the parameters, frozen ones too, and the buffers."""
        values = {f"p/{name}": param.detach() for name, param in self._training.params.items()}
        return values | {f"b/{name}": buffer for name, buffer in self._buffers().items()}

    def _buffers(self) -> dict[str, Tensor]:
        return {plain_name(name): buffer.detach() for name, buffer in self._training.model.named_buffers()}

    def _between_steps(self) -> None:
        """Where newcomers are let in; and where this rank gets in, if it is one."""
        if self._newcomer is not None:
            clock, self._meeting.number = self._newcomer.enter()
            self._newcomer = None
            if isinstance(self._talk, Rounds):
                self._talk.begin(clock)
                self._talk.mixer.enter(self._talk.targets())
            else:
                self._talk.clock = clock
        self._door.open(self._talk.clock)

    # -- a step ---------------------------------------------------------------------------------------------------

    def after_step(self, step: int) -> None:
        self._between_steps()
        self._talk.mix()

    def join(self) -> int | None:
        self._gather("join")
        return None

    def settle(self) -> None:
        number = self._gather("settle")
        if isinstance(self._talk, Pairs):
            with self._talk.paused():  # a quicker one may train again while this one has not taken the mean
                self._take_mean(number)
                self._talk.rebase()
        else:
            self._take_mean(number)
            self._talk.mixer.agree(self._talk.targets())

    def _take_mean(self, number: int) -> None:
        replica = self._replica
        tensors = {f"{BY_WEIGHT}{at}": part.x.to("cpu", copy=True) for at, part in enumerate(replica.parts)}
        means = self._meeting.mean(number, replica.weight, tensors | self._buffers_to_settle())
        apart = 0.0
        with torch.no_grad():
            for at, part in enumerate(replica.parts):
                mean = means[f"{BY_WEIGHT}{at}"].to(part.device)
                apart += float((part.x / replica.weight - mean).double().square().sum())
                part.x.copy_(mean)
            for name, buffer in self._buffers().items():
                found = means.get(f"{PLAINLY}/{name}", means.get(f"f/{name}"))
                if found is not None:
                    buffer.copy_(found)
        self._apart_at_settle = math.sqrt(apart / max(1, replica.numel))
        replica.weight = 1.0
        replica.put_back()

    def _gather(self, what: str) -> int:
        """Wait for all, in company."""
        self._between_steps()
        talk = self._talk
        if isinstance(talk, Rounds):
            number = self._meeting.gather(what, clock=lambda: talk.clock, step=talk.mix)
            talk.mixer.replica.take_in()
            return number
        number = self._gather_still(what)
        talk.refresh()
        return number

    def _buffers_to_settle(self) -> dict[str, Tensor]:
        mode = self._training.buffers.mode
        if mode == "none":
            return {}
        return {
            f"{PLAINLY if mode == 'mean' and buffer.is_floating_point() else 'f'}/{name}": buffer.to("cpu", copy=True)
            for name, buffer in self._buffers().items()
        }

    # -- what it costs and where it stands ------------------------------------------------------------------------

    def bytes_per_step(self) -> int:
        if self._circle is None:
            return 0
        whole = sum(part.x.numel() * part.dtype.itemsize for part in self._replica.parts)
        if isinstance(self._talk, Pairs):
            return 2 * whole if len(self.circle.book.present()) > 1 else 0  # a question, and about one answer
        mixer = self._talk.mixer
        return len(self._talk.targets()) * (mixer.num_bytes(self._talk.clock) if isinstance(mixer, Choco) else whole)

    def codecs(self) -> dict[str, str]:
        mixer = self._talk.mixer if self._circle is not None and isinstance(self._talk, Rounds) else None
        return mixer.codecs() if isinstance(mixer, Choco) else {}

    def stats(self) -> dict[str, Any]:
        """Who lives, whom this rank talks to, how far the models are apart (``consensus``), and what was sent."""
        circle, talk = self.circle, self._talk
        with circle.changed:
            living, dead, clocks = circle.book.present(), dict(circle.book.dead), dict(circle.clocks)
        distance = talk.distance if isinstance(talk, Pairs) else talk.mixer.distance
        told: dict[str, Any] = {
            "member": circle.me,
            "address": circle.address,
            "living": living,
            "lost": dead,
            "clocks": {**{member: clocks.get(member, 0) for member in living}, circle.me: talk.clock},
            "consensus": {"rms": distance.rms, "relative": distance.relative, "at_settle": self._apart_at_settle},
            "push_sum_weight": self._replica.weight,
            "bytes_sent": circle.num_bytes,
            "malformed": circle.malformed,
        }
        if isinstance(talk, Pairs):
            peer = talk.peer()
            return told | {
                "neighbours": [] if peer is None else [peer],
                "staleness": talk.stats(),
                "unanswered": talk.unanswered,
            }
        return told | {"neighbours": talk.targets(), "late": talk.late}

    # -- what must survive a restart ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        talk = self._talk
        mixed = talk.state_dict() if isinstance(talk, Pairs) else talk.mixer.state_dict()
        buffers = {name: buffer.clone() for name, buffer in self._buffers().items()}
        return {"clock": talk.clock, "mixed": mixed, "buffers": buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"clock", "mixed", "buffers"}:
            raise ValueError(f"expected the state of gossip; got {sorted(state)}. Was it saved by another strategy?")
        talk = self._talk
        # Two meetings: after the first nothing of the old past is on its way any more, before the second nothing new.
        self._gather_still("load_state_dict")
        if isinstance(talk, Pairs):
            talk.load_state_dict(state["mixed"])
            talk.clock = int(state["clock"])
        else:
            talk.forget()
            talk.begin(int(state["clock"]))
            talk.mixer.load_state_dict(state["mixed"])
        with torch.no_grad():
            for name, buffer in self._buffers().items():
                if name in state["buffers"]:
                    buffer.copy_(state["buffers"][name])
        self._gather_still("load_state_dict")

    def _gather_still(self, what: str) -> int:
        """Wait for all, with nothing of this rank's on its way."""
        talk = self._talk
        if isinstance(talk, Pairs):
            talk.be_answered(what, self._meeting.timeout_s)
        return self._meeting.gather(what, clock=lambda: talk.clock, step=None)

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        chosen = states[rank % len(states)]
        mixed = {name: value for name, value in chosen["mixed"].items() if name != "estimates"}
        if "estimates" in chosen["mixed"]:
            mixed["estimates"] = {}  # of neighbours that are others now: they are told anew
        return {**chosen, "mixed": mixed, "clock": max(state["clock"] for state in states)}

    def is_own(self, state: dict[str, Any]) -> bool:
        return True

    def close(self) -> None:
        if self._circle is not None:
            self._circle.close()
            self._closed = True  # attached again it begins anew
