"""A worker's side of the parameter server: push gradients, pull parameters, ask how things are."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.curve import ClientKeys
from gradsync.comm.endpoints import Sent
from gradsync.comm.messages import Json, Message
from gradsync.errors import CollectiveFailed, PeerLost
from gradsync.server import saved
from gradsync.server.encoding import Encoder
from gradsync.server.job import Job, assign
from gradsync.server.lines import Lines
from gradsync.server.meeting import read_met
from gradsync.server.shard import square_of

log = logging.getLogger(__name__)

ASKING_S = 2.0  # for a word about who is late, when a read was not answered in time


class Client:
    """One worker's line to all shards; used by one thread.

    Args:
        worker: this worker's number; those of the start are 0 .. num_workers - 1. None: the servers give one.
        addresses: of the servers, in the order of their shards.
        job: what they are to do; the same on every worker.
        keys: to get in.
        timeout_s: larger => a slow worker, or server, is waited for longer before an error.
        feedback: "ef" adds what a codec leaves out to the next push, "none" forgets it.
        reconnect_s: how long a lost server may take to be there again, at the same address; 0: not at all.
    """

    def __init__(
        self,
        worker: int | None,
        addresses: Sequence[str],
        job: Job,
        *,
        keys: ClientKeys | None = None,
        timeout_s: float = 30.0,
        feedback: str = "ef",
        reconnect_s: float = 0.0,
    ) -> None:
        if job.mirrors and len(addresses) < 2:
            raise ValueError(f"mirrors=1 needs a second server for the copy; got {len(addresses)} address.")
        self.worker = worker
        self.job = job
        self.clock = 0  # pushes made
        self.timeout_s = timeout_s
        self.waited_s = 0.0  # for reads
        self.sent_bytes = 0
        self._feedback = feedback
        self._aside = False
        self.encoder = Encoder(job, worker or 0, feedback=feedback)
        self.names = assign(job.params, len(addresses))
        self._groups: Sequence[Mapping[str, Json]] = []
        self._seen: dict[int, int] = {}  # by shard: the version that was read last
        self._unread: dict[int, Message] = {}  # by shard: the last push, until it is known to have arrived
        self._squares: dict[int, dict[int, float]] = {}  # by step, then shard: what its norm is the root of
        self._unclipped: set[int] = set()  # the shards that wait for the norm of the whole
        self._on_the_way: list[Sent] = []
        self._lost: list[str] = []
        self._lines = Lines(
            addresses,
            self.names,
            keys=keys,
            mirrors=bool(job.mirrors),
            reconnect_s=reconnect_s,
            timeout_s=timeout_s,
        )
        self._lines.on_moved = self._introduce
        self._lines.on_message = self._hear

    @property
    def num_shards(self) -> int:
        return len(self.names)

    # -- coming and going -----------------------------------------------------------------------------------------

    def join(self, params: Mapping[str, Tensor], groups: Sequence[Mapping[str, Json]] | None = None) -> int:
        """Tell every server of this worker; the first worker's parameters become theirs. Returns the clock to begin at.

        ``groups``: hyperparameters to make the optimizer with; each push brings its own. Left out: torch's defaults.
        """
        groups_needed = 1 + max(param.group for param in self.job.params)
        self._groups = [{}] * groups_needed if groups is None else groups
        self._aside = False
        welcomes = self._ask({0: self._hello(0, None, None)}, "welcome")
        if self.worker is None:
            self.worker = int(welcomes[0].fields["worker"])
            self.encoder = Encoder(self.job, self.worker, feedback=self._feedback)
        welcomes |= self._ask({shard: self._hello(shard, None, None) for shard in self._shards() if shard}, "welcome")
        to_fill = {
            shard: Message("fill", {"shard": shard}, {name: params[name].detach() for name in self.names[shard]})
            for shard, welcome in welcomes.items()
            if welcome.fields["fill"]
        }
        if to_fill:
            self._ask(to_fill, "filled")
        self.clock = max(int(welcome.fields["clock"]) for welcome in welcomes.values())
        # Each shard lets a newcomer begin where its slowest worker is, and these may have moved on in between.
        behind = [shard for shard, welcome in welcomes.items() if welcome.fields["clock"] != self.clock]
        self._ask({shard: self._hello(shard, self.clock, None) for shard in behind}, "welcome")
        return self.clock

    def refresh(self) -> int:
        """Take over the clock that the servers have of this worker: after another has loaded a state into them."""
        welcomes = self._ask({shard: self._hello(shard, None, None) for shard in self._shards()}, "welcome")
        self.clock = max(int(welcome.fields["clock"]) for welcome in welcomes.values())
        self._seen.clear()
        self._unread.clear()
        return self.clock

    def step_aside(self) -> None:
        """Leave the clock, and stay connected: nobody waits for this worker, which may read until it joins again."""
        self._aside = True
        for shard in self._shards():
            self._lines.send(shard, Message("aside", {"shard": shard}))

    def meet(self, tag: str, brought: Json = None, tensors: Mapping[str, Tensor] | None = None) -> dict[int, Message]:
        """Wait for all workers that are connected; who dies is not waited for. What each has brought, by its number.

        ``fields["brought"]`` and ``tensors`` of each. Blocks; all workers call it with the same tag.
        """
        question = Message("meet", {"shard": 0, "tag": tag, "brought": brought}, dict(tensors or {}))
        answers = self._lines.ask({0: question}, "met", self.timeout_s)
        if not answers:
            raise CollectiveFailed(f"not all workers came to {tag!r} in {self.timeout_s:.0f} s. All must call it.")
        return read_met(answers[0])

    def leave(self) -> None:
        """Say goodbye: nobody waits for this worker any more. It may ``join`` again."""
        for shard in self._shards():
            self._lines.tell(shard, Message("leave", {"shard": shard}))

    def close(self) -> None:
        """Leave, and close the lines. What was pushed last still has a moment to go out."""
        self.leave()
        self._lines.close()

    # -- pushing --------------------------------------------------------------------------------------------------

    def push(self, grads: Mapping[str, Tensor | None], *, weight: float, groups: Sequence[Mapping[str, Json]]) -> None:
        """Send this step's gradients, None for parameters that were not used. Returns when the sockets have them.

        They go out of their own memory: they must not be changed before ``pull`` or ``flush`` has returned.
        """
        self._groups = groups
        self._await_arrival()
        used = {name: grad.detach() for name, grad in grads.items() if grad is not None}
        square = square_of(used.values()) if self.job.clip_norm is not None and self.job.staleness != 0 else None
        fields = {"clock": self.clock, "weight": weight, "groups": [dict(group) for group in groups], "square": square}
        kept = self.job.mirrors and self.job.staleness != 0  # it may have to be sent again, after `grads` have changed
        for shard, names in enumerate(self.names):
            tensors = {name: self._wire(name, used[name], copy=bool(kept)) for name in names if name in used}
            message = Message("push", {"shard": shard, **fields}, tensors)
            if kept or self.job.staleness == 0:
                self._unread[shard] = message
            self.sent_bytes += message.num_bytes
            self._on_the_way.append(self._lines.send(shard, message))
        self._on_the_way = [sent for sent in self._on_the_way if not sent.done()]
        self.clock += 1

    def flush(self) -> None:
        """Wait until the gradients of all pushes may be changed."""
        end_s = time.monotonic() + self.timeout_s
        for sent in self._on_the_way:
            if not sent.wait(max(0.0, end_s - time.monotonic())):
                raise CollectiveFailed(
                    f"a push did not leave in {self.timeout_s:.0f} s. Is the network, or a server, stuck?"
                )
        self._on_the_way.clear()

    def _wire(self, name: str, grad: Tensor, *, copy: bool) -> Tensor:
        if self.encoder.encodes(name):
            return self.encoder.encode(name, grad, clock=self.clock)
        if grad.is_sparse:
            grad = grad.to_dense()
        return grad.clone(memory_format=torch.contiguous_format) if copy else grad

    def _await_arrival(self) -> None:
        """With copies, and no reads in between: the push before this one must be known to have arrived."""
        if not self._unread or self.job.staleness == 0:
            return
        end_s = time.monotonic() + self.timeout_s
        while self._unread:
            self._lines.hear(list(self._unread), end_s - time.monotonic())
            if self._unread and time.monotonic() > end_s:
                raise CollectiveFailed(
                    f"shards {sorted(self._unread)} did not confirm a push in {self.timeout_s:.0f} s."
                )

    # -- pulling --------------------------------------------------------------------------------------------------

    def pull(self, out: Mapping[str, Tensor], *, newest: bool = False) -> None:
        """Write the parameters to ``out``, by name, once they hold all that the bound asks for. Blocks.

        ``newest``: take what there is, whatever the bound says.
        ``PeerLost`` if that takes longer than ``timeout_s``: it names those who are behind.
        """
        begun_s = time.monotonic()
        asked = {"clock": self.clock, "newest": newest}
        questions = {shard: Message("pull", {"shard": shard, **asked}) for shard in self._shards()}
        into = {name: tensor.detach() for name, tensor in out.items()}
        answers = self._lines.ask(questions, "parameters", self.timeout_s, into=into)
        if len(answers) < len(questions):
            raise self._late(set(questions) - set(answers), time.monotonic() - begun_s)
        for shard, answer in answers.items():
            for name, tensor in answer.tensors.items():
                if tensor is not into[name]:
                    into[name].copy_(tensor)
            self._seen[shard] = int(answer.fields["version"])
        self._squares.clear()
        self._unclipped.clear()
        self._unread.clear()
        self._on_the_way.clear()  # whoever was answered has been heard
        self.waited_s += time.monotonic() - begun_s

    def _hear(self, message: Message) -> None:
        """What any shard says, whatever is waited for."""
        shard, fields = int(message.fields["shard"]), message.fields
        if message.kind == "welcome":
            news = [text for text in fields["lost"] if text not in self._lost]
            self._lost += news
            for text in news:
                log.warning("%s with its server, which began again from a snapshot", text)
        elif message.kind == "pushed":
            self._unread.pop(shard, None)
        elif message.kind in ("norm", "parameters") and self.job.clip_norm is not None and self.job.staleness == 0:
            self._note_square(shard, int(fields["step"]), float(fields["square"]), stepped=message.kind == "parameters")

    def _note_square(self, shard: int, step: int, square: float, *, stepped: bool) -> None:
        """Clipping, bulk-synchronous: who knows the norms of all shards tells those that wait for it."""
        squares = self._squares.setdefault(step, {})
        squares[shard] = square
        if not stepped:
            self._unclipped.add(shard)
        if len(squares) == self.num_shards:
            total = sum(squares[shard] for shard in self._shards())
            for shard in sorted(self._unclipped):
                self._lines.send(shard, Message("clip", {"shard": shard, "step": step, "square": total}))
            self._unclipped.clear()

    def _late(self, shards: set[int], after_s: float) -> Exception:
        """The error that says who is waited for."""
        behind: set[int] = set()
        for told in self._lines.ask(
            {shard: Message("stats?", {"shard": shard}) for shard in shards}, "stats", ASKING_S
        ).values():
            clocks = dict(told.fields["clocks"])
            behind |= {worker for worker, clock in clocks.items() if clock < self.clock - (self.job.staleness or 0)}
        if not behind:
            return CollectiveFailed(
                f"shards {sorted(shards)} did not answer a read in {after_s:.1f} s, though nobody is behind."
            )
        reason = f"worker {self.worker} is at clock {self.clock}, and may not read before they have pushed"
        return PeerLost(rank=tuple(sorted(behind)), reason=reason, after_s=after_s, step=self.clock, during="pull")

    # -- what is asked about them ---------------------------------------------------------------------------------

    def fetch_state(self) -> dict[str, Any]:
        """Parameters, optimizer state and clocks of all shards, by parameter name. Blocks.

        Bulk-synchronous, and between a pull and the next push, it is the state at this worker's clock exactly.
        """
        answers = self._ask({shard: Message("state?", {"shard": shard}) for shard in self._shards()}, "state")
        return saved.gathered([answers[shard] for shard in self._shards()])

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Give the servers what ``fetch_state`` gave, whatever their number was. One worker does; then all refresh."""
        parts = saved.scattered(state, self.names)
        self._ask(
            {shard: Message("load", {"shard": shard, **told}, tensors) for shard, (told, tensors) in enumerate(parts)},
            "loaded",
        )
        self.refresh()

    def state_dict(self) -> dict[str, Any]:
        """What is this worker's own: what its codec has left out."""
        return self.encoder.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        self.encoder.load_state_dict(state)

    def stats(self) -> dict[str, Any]:
        """How stale pushes were, how far every worker is, and who is waited for. Blocks."""
        told = self._ask({shard: Message("stats?", {"shard": shard}) for shard in self._shards()}, "stats")
        taus: Counter[int] = Counter()
        awaited: Counter[int] = Counter()
        for answer in told.values():
            taus.update({int(tau): int(count) for tau, count in answer.fields["taus"]})
            awaited.update({int(worker): seconds for worker, seconds in answer.fields["awaited_s"]})
        clocks = {int(worker): int(clock) for worker, clock in told[0].fields["clocks"]}
        slowest = min(clocks, key=lambda worker: (clocks[worker], -awaited[worker]))
        return {
            "staleness": dict(sorted(taus.items())),
            "clocks": clocks,
            "waited_s": self.waited_s,
            "straggler": {
                "worker": slowest,
                "behind": max(clocks.values()) - clocks[slowest],
                "awaited_s": awaited[slowest] / self.num_shards,
            },
            "awaited_s": {worker: seconds / self.num_shards for worker, seconds in sorted(awaited.items())},
            "dropped": sum(answer.fields["dropped"] + answer.fields["late"] for answer in told.values()),
            "versions": [told[shard].fields["version"] for shard in self._shards()],
            "lost": list(self._lost),
            "malformed": sum(answer.fields["malformed"] for answer in told.values()),
        }

    # -- words ----------------------------------------------------------------------------------------------------

    def _shards(self) -> range:
        return range(self.num_shards)

    def _hello(self, shard: int, clock: int | None, seen: int | None) -> Message:
        told = {
            "worker": self.worker,
            "job": self.job.to_json(),
            "servers": self._lines.addresses,
            "groups": [dict(group) for group in self._groups],
            "clock": clock,
            "seen": seen,
            "aside": self._aside,
        }
        return Message("hello", {"shard": shard, **told})

    def _introduce(self, shard: int) -> list[Message]:
        """What to say to a shard that is elsewhere now: who comes, and the push that it may not have got."""
        unread = self._unread.get(shard)
        clock = self.clock if unread is None else int(unread.fields["clock"])
        hello = self._hello(shard, clock, self._seen.get(shard, 0))
        return [hello] if unread is None else [hello, unread]

    def _ask(self, questions: Mapping[int, Message], answer: str) -> dict[int, Message]:
        answers = self._lines.ask(questions, answer, self.timeout_s)
        missing = sorted(set(questions) - set(answers))
        if missing:
            raise CollectiveFailed(f"the servers of shards {missing} did not say {answer} in {self.timeout_s:.0f} s.")
        return answers
