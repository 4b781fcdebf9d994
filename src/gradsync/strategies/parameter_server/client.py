"""A worker's side of the parameter server: push gradients, pull parameters, load and save the servers' state."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync.errors import CollectiveFailed, PeerLost
from gradsync.messaging.endpoints import PendingSend
from gradsync.messaging.format import Json, Message
from gradsync.messaging.keys import ClientKeys
from gradsync.strategies.parameter_server.connections import ConnectionPool
from gradsync.strategies.parameter_server.encoding import Encoder
from gradsync.strategies.parameter_server.job import Job, assign_shards
from gradsync.strategies.parameter_server.server.barrier import read_arrivals
from gradsync.strategies.parameter_server.server.shard import compute_squared_norm
from gradsync.strategies.parameter_server.state_shards import merge_shard_states, split_state

log = logging.getLogger(__name__)

STATS_TIMEOUT_S = 2.0  # to learn who is late, when a read was not answered in time


class Client:
    """One worker's connection to all shards; used by one thread.

    Args:
        worker: this worker's number. The first workers have 0 .. num_workers - 1. None: the servers choose one.
        addresses: of the servers, in the order of their shards.
        job: what the servers train; the same on every worker.
        keys: to authenticate with.
        timeout_s: larger => a slow worker, or server, is waited for longer before an error.
        feedback: "ef" adds the codec's residual to the next push, "none" drops it.
        reconnect_s: how long a lost server may take to restart at the same address; 0: it is not waited for.
        run: an identifier that all workers of one run share.
        resume: accept the servers' weights also if they are an earlier run's.
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
        run: str = "",
        resume: bool = False,
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
        self._run, self._resume = run, resume
        self._observer = False
        self.encoder = Encoder(job, worker or 0, feedback=feedback)
        self.names = assign_shards(job.params, len(addresses))
        self._groups: Sequence[Mapping[str, Json]] = []
        self._read_version: dict[int, int] = {}  # by shard: the version that was read last
        self._unacknowledged: dict[int, Message] = {}  # by shard: the last push, until the server is known to have it
        self._squared_norms: dict[int, dict[int, float]] = {}  # by step, then shard
        self._awaiting_clip: set[int] = set()  # the shards that wait for the norm over all shards
        self._pending_sends: list[PendingSend] = []
        self._lost_updates: list[str] = []
        self._pool = ConnectionPool(
            addresses,
            self.names,
            keys=keys,
            mirrors=bool(job.mirrors),
            reconnect_s=reconnect_s,
            timeout_s=timeout_s,
        )
        self._pool.on_failover = self._rejoin_messages
        self._pool.on_message = self._on_message

    @property
    def num_shards(self) -> int:
        return len(self.names)

    # -- joining and leaving --------------------------------------------------------------------------------------

    def join(self, params: Mapping[str, Tensor], groups: Sequence[Mapping[str, Json]] | None = None) -> int:
        """Join every server; the first worker's parameters become theirs. Returns the clock to begin at.

        ``groups``: the optimizer's initial hyperparameters; each push brings its own. Default: those of torch.
        """
        groups_needed = 1 + max(param.group for param in self.job.params)
        self._groups = [{}] * groups_needed if groups is None else groups
        self._observer = False
        replies = self._request({0: self._join_request(0, None, None)}, "joined")
        if self.worker is None:
            self.worker = int(replies[0].fields["worker"])
            self._resume = True  # the first shard has accepted it as a late joiner
            self.encoder = Encoder(self.job, self.worker, feedback=self._feedback)
        others = {shard: self._join_request(shard, None, None) for shard in self._shards() if shard}
        replies |= self._request(others, "joined")
        to_fill = {
            shard: Message("fill", {"shard": shard}, {name: params[name].detach() for name in self.names[shard]})
            for shard, reply in replies.items()
            if reply.fields["fill"]
        }
        if to_fill:
            self._request(to_fill, "filled")
        self.clock = max(int(reply.fields["clock"]) for reply in replies.values())
        # Each shard lets a new worker begin where its slowest worker is, and that may have moved on in between.
        behind = [shard for shard, reply in replies.items() if reply.fields["clock"] != self.clock]
        self._request({shard: self._join_request(shard, self.clock, None) for shard in behind}, "joined")
        return self.clock

    def refresh(self) -> int:
        """Set this worker's clock to the servers', after another worker has loaded a state into them."""
        requests = {shard: self._join_request(shard, None, None) for shard in self._shards()}
        self.clock = max(int(reply.fields["clock"]) for reply in self._request(requests, "joined").values())
        self._read_version.clear()
        self._unacknowledged.clear()
        return self.clock

    def become_observer(self) -> None:
        """Stay connected without a clock: this worker may read, and nobody waits for it until it joins again."""
        self._observer = True
        for shard in self._shards():
            self._pool.send(shard, Message("observe", {"shard": shard}))

    def barrier(self, tag: str, value: Json = None, tensors: Mapping[str, Tensor] | None = None) -> dict[int, Message]:
        """Wait for all connected workers; returns the value and tensors of each, by its number. Blocks.

        They are ``fields["value"]`` and ``tensors``. All workers call it with the same tag; dead workers do not count.
        """
        request = Message("barrier", {"shard": 0, "tag": tag, "value": value}, dict(tensors or {}))
        replies = self._pool.request({0: request}, "barrier_done", self.timeout_s)
        if not replies:
            raise CollectiveFailed(
                f"not all workers reached the barrier {tag!r} in {self.timeout_s:.0f} s. All must call it."
            )
        return read_arrivals(replies[0])

    def leave(self) -> None:
        """Leave the servers: nobody waits for this worker any more. It may ``join`` again."""
        for shard in self._shards():
            self._pool.send_if_connected(shard, Message("leave", {"shard": shard}))

    def close(self) -> None:
        """Leave, and close the connections. The last push still has a moment to be sent."""
        self.leave()
        self._pool.close()

    # -- pushing --------------------------------------------------------------------------------------------------

    def push(self, grads: Mapping[str, Tensor | None], *, weight: float, groups: Sequence[Mapping[str, Json]]) -> None:
        """Send this step's gradients, None for parameters that were not used. Returns when the sockets have them.

        They are sent without a copy: they must not change before ``pull`` or ``flush`` has returned.
        """
        self._groups = groups
        self._await_acknowledgement()
        used = {name: grad.detach() for name, grad in grads.items() if grad is not None}
        squared_norm = (
            compute_squared_norm(used.values()) if self.job.clip_norm is not None and self.job.staleness != 0 else None
        )
        fields = {
            "clock": self.clock,
            "weight": weight,
            "groups": [dict(group) for group in groups],
            "squared_norm": squared_norm,
        }
        kept = self.job.mirrors and self.job.staleness != 0  # it may have to be sent again after `grads` have changed
        for shard, names in enumerate(self.names):
            tensors = {name: self._to_wire(name, used[name], copy=bool(kept)) for name in names if name in used}
            message = Message("push", {"shard": shard, **fields}, tensors)
            if kept or self.job.staleness == 0:
                self._unacknowledged[shard] = message
            self.sent_bytes += message.num_bytes
            self._pending_sends.append(self._pool.send(shard, message))
        self._pending_sends = [sent for sent in self._pending_sends if not sent.done()]
        self.clock += 1

    def flush(self) -> None:
        """Wait until all pushes are sent and their gradients may change."""
        end_s = time.monotonic() + self.timeout_s
        for sent in self._pending_sends:
            if not sent.wait(max(0.0, end_s - time.monotonic())):
                raise CollectiveFailed(
                    f"a push did not leave in {self.timeout_s:.0f} s. Is the network, or a server, stuck?"
                )
        self._pending_sends.clear()

    def _to_wire(self, name: str, grad: Tensor, *, copy: bool) -> Tensor:
        if self.encoder.encodes(name):
            return self.encoder.encode(name, grad, clock=self.clock)
        if grad.is_sparse:
            grad = grad.to_dense()
        return grad.clone(memory_format=torch.contiguous_format) if copy else grad

    def _await_acknowledgement(self) -> None:
        """With mirrors, and no read in between: wait until the servers have acknowledged the last push."""
        if not self._unacknowledged or self.job.staleness == 0:
            return
        end_s = time.monotonic() + self.timeout_s
        while self._unacknowledged:
            self._pool.receive(list(self._unacknowledged), end_s - time.monotonic())
            if self._unacknowledged and time.monotonic() > end_s:
                raise CollectiveFailed(
                    f"shards {sorted(self._unacknowledged)} did not confirm a push in {self.timeout_s:.0f} s."
                )

    # -- pulling --------------------------------------------------------------------------------------------------

    def pull(self, out: Mapping[str, Tensor], *, newest: bool = False) -> None:
        """Write the parameters to ``out``, by name, once they include all updates that the staleness asks for. Blocks.

        ``newest``: read the current ones at once, whatever the staleness.
        Raises ``PeerLost`` after ``timeout_s``, with the workers that are behind.
        """
        begun_s = time.monotonic()
        fields = {"clock": self.clock, "newest": newest}
        requests = {shard: Message("pull", {"shard": shard, **fields}) for shard in self._shards()}
        into = {name: tensor.detach() for name, tensor in out.items()}
        replies = self._pool.request(requests, "parameters", self.timeout_s, into=into)
        if len(replies) < len(requests):
            raise self._late(set(requests) - set(replies), time.monotonic() - begun_s)
        for shard, reply in replies.items():
            for name, tensor in reply.tensors.items():
                if tensor is not into[name]:
                    into[name].copy_(tensor)
            self._read_version[shard] = int(reply.fields["version"])
        self._squared_norms.clear()
        self._awaiting_clip.clear()
        self._unacknowledged.clear()
        self._pending_sends.clear()  # the servers have answered, so they have received the pushes
        self.waited_s += time.monotonic() - begun_s

    def _on_message(self, message: Message) -> None:
        """Handle a message of any shard, whatever reply is waited for."""
        shard, fields = int(message.fields["shard"]), message.fields
        if message.kind == "joined":
            news = [text for text in fields["lost"] if text not in self._lost_updates]
            self._lost_updates += news
            for text in news:
                log.warning("%s with its server, which restarted from a snapshot", text)
        elif message.kind == "pushed":
            self._unacknowledged.pop(shard, None)
        elif message.kind in ("norm", "parameters") and self.job.clip_norm is not None and self.job.staleness == 0:
            self._record_squared_norm(
                shard, int(fields["step"]), float(fields["squared_norm"]), stepped=message.kind == "parameters"
            )

    def _record_squared_norm(self, shard: int, step: int, squared_norm: float, *, stepped: bool) -> None:
        """Bulk-synchronous clipping: once the norms of all shards are known, send their sum to the waiting shards."""
        squared_norms = self._squared_norms.setdefault(step, {})
        squared_norms[shard] = squared_norm
        if not stepped:
            self._awaiting_clip.add(shard)
        if len(squared_norms) == self.num_shards:
            total = sum(squared_norms[shard] for shard in self._shards())
            for shard in sorted(self._awaiting_clip):
                self._pool.send(shard, Message("clip", {"shard": shard, "step": step, "squared_norm": total}))
            self._awaiting_clip.clear()

    def _late(self, shards: set[int], after_s: float) -> Exception:
        """The error of a read that was not answered, with the workers that it waits for."""
        behind: set[int] = set()
        requests = {shard: Message("get_stats", {"shard": shard}) for shard in shards}
        for reply in self._pool.request(requests, "stats", STATS_TIMEOUT_S).values():
            clocks = dict(reply.fields["clocks"])
            behind |= {worker for worker, clock in clocks.items() if clock < self.clock - (self.job.staleness or 0)}
        if not behind:
            return CollectiveFailed(
                f"shards {sorted(shards)} did not answer a read in {after_s:.1f} s, though no worker is behind."
            )
        reason = f"worker {self.worker} is at clock {self.clock}, and may not read before they have pushed"
        return PeerLost(rank=tuple(sorted(behind)), reason=reason, after_s=after_s, step=self.clock, during="pull")

    # -- state and statistics -------------------------------------------------------------------------------------

    def fetch_state(self) -> dict[str, Any]:
        """Parameters, optimizer state and clocks of all shards, by parameter name. Blocks.

        Bulk-synchronous, and between a pull and the next push, it is the state at this worker's clock exactly.
        """
        replies = self._request({shard: Message("get_state", {"shard": shard}) for shard in self._shards()}, "state")
        return merge_shard_states([replies[shard] for shard in self._shards()])

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load what ``fetch_state`` returned into the servers, whatever their number was then.

        One worker calls it; then all call ``refresh``.
        """
        parts = split_state(state, self.names)
        requests = {
            shard: Message("load", {"shard": shard, **fields}, tensors) for shard, (fields, tensors) in enumerate(parts)
        }
        self._request(requests, "loaded")
        self.refresh()

    def state_dict(self) -> dict[str, Any]:
        """This worker's own state: the residuals of its codecs."""
        return self.encoder.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self.encoder.load_state_dict(state)

    def stats(self) -> dict[str, Any]:
        """The staleness of pushes, the clock of every worker, and how long each was waited for. Blocks."""
        replies = self._request({shard: Message("get_stats", {"shard": shard}) for shard in self._shards()}, "stats")
        taus: Counter[int] = Counter()
        awaited: Counter[int] = Counter()
        for reply in replies.values():
            taus.update({int(tau): int(count) for tau, count in reply.fields["taus"]})
            awaited.update({int(worker): seconds for worker, seconds in reply.fields["awaited_s"]})
        clocks = {int(worker): int(clock) for worker, clock in replies[0].fields["clocks"]}
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
            "dropped": sum(reply.fields["dropped"] + reply.fields["late"] for reply in replies.values()),
            "versions": [replies[shard].fields["version"] for shard in self._shards()],
            "lost": list(self._lost_updates),
            "malformed": sum(reply.fields["malformed"] for reply in replies.values()),
        }

    # -- requests -------------------------------------------------------------------------------------------------

    def _shards(self) -> range:
        return range(self.num_shards)

    def _join_request(self, shard: int, clock: int | None, read_version: int | None) -> Message:
        fields = {
            "worker": self.worker,
            "job": self.job.to_json(),
            "servers": self._pool.addresses,
            "groups": [dict(group) for group in self._groups],
            "clock": clock,
            "read_version": read_version,
            "observer": self._observer,
            "run": self._run,
            "resume": self._resume,
        }
        return Message("join", {"shard": shard, **fields})

    def _rejoin_messages(self, shard: int) -> list[Message]:
        """What to send to a shard after a failover: a join request, and the push that it may not have received."""
        push = self._unacknowledged.get(shard)
        clock = self.clock if push is None else int(push.fields["clock"])
        join = self._join_request(shard, clock, self._read_version.get(shard, 0))
        return [join] if push is None else [join, push]

    def _request(self, requests: Mapping[int, Message], reply_kind: str) -> dict[int, Message]:
        replies = self._pool.request(requests, reply_kind, self.timeout_s)
        missing = sorted(set(requests) - set(replies))
        if missing:
            raise CollectiveFailed(
                f"the servers of shards {missing} did not reply with {reply_kind!r} in {self.timeout_s:.0f} s."
            )
        return replies
