"""A parameter server: the loop that reads requests from sockets and gives them to the services of its shards."""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import threading
import time
from typing import Any, Self

import zmq

from gradsync.messaging.endpoints import SILENT_S, ClientConnection, Listener, Unreachable, wait_any
from gradsync.messaging.format import Json, Message
from gradsync.messaging.keys import ClientKeys, ServerKeys
from gradsync.messaging.sockets import RateLimitedLog
from gradsync.strategies.parameter_server.job import Hyperparameters, Job, assign_shards, parse_hyperparameters
from gradsync.strategies.parameter_server.messages import MAX_REASON, REQUESTS, RETRY_PREFIX
from gradsync.strategies.parameter_server.server import staleness
from gradsync.strategies.parameter_server.server.liveness import Liveness
from gradsync.strategies.parameter_server.server.mirror import Mirror
from gradsync.strategies.parameter_server.server.replication_log import LogRecord
from gradsync.strategies.parameter_server.server.shard_service import Replies, RequestRefused, ShardService
from gradsync.strategies.parameter_server.server.snapshot import SnapshotStore
from gradsync.strategies.parameter_server.server.staleness import Policy

log = logging.getLogger(__name__)

LIVENESS_INTERVAL_S = 0.2  # between two checks of the workers' connections
DRAIN_LIMIT = 100  # messages to read for each lost worker, in search of its "leave"
MIRROR_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 10.0


class Server:
    """Hosts one shard, and copies of other servers' shards; in a thread, or in a process of its own.

    The first worker that joins brings the job. Workers may join and leave at any time. Malformed messages are counted
    and dropped.

    >>> import torch
    >>> from gradsync.strategies.parameter_server.client import Client
    >>> from gradsync.strategies.parameter_server.job import Job, hyperparameters
    >>> from gradsync.strategies.parameter_server.server.server import Server
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> sgd = torch.optim.SGD([weight], lr=0.5)
    >>> server = Server().start()
    >>> client = Client(0, [server.address], Job.describe({"w": weight}, sgd, num_workers=1))
    >>> client.join({"w": weight})
    0
    >>> client.push({"w": torch.ones(2)}, weight=1.0, groups=hyperparameters(sgd))
    >>> client.pull({"w": weight})
    >>> weight.data
    tensor([-0.5000, -0.5000])
    >>> client.close()
    >>> server.close()

    Args:
        index: the number of its shard; None: the first worker decides.
        host: the address to listen at; "0.0.0.0" for all interfaces (use keys then).
        port: 0 takes a free one.
        ipc: be reachable by a Unix socket too.
        public_host: the name of this host for workers, where ``host`` does not give it.
        keys: accept only the holders of these keys.
        peer_keys: to authenticate to the server that holds the copy of its shard.
        policy: what to do with stale gradients, instead of the job's policy; for a user's function.
        snapshots: the folder for snapshots; the server starts from the one that is there.
        silent_s: larger => a dead host is detected later, and one that hangs for a while is not dropped.
    """

    def __init__(
        self,
        index: int | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        ipc: bool = True,
        public_host: str = "",
        keys: ServerKeys | None = None,
        peer_keys: ClientKeys | None = None,
        policy: Policy | None = None,
        snapshots: str | os.PathLike[str] | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        self.index = index
        self.error: BaseException | None = None
        self.refused = 0
        self._policy = policy
        self._peer_keys = peer_keys
        self._services: dict[int, ShardService] = {}
        self._num_servers: dict[int, int] = {}
        self._mirrors: dict[int, Mirror] = {}  # by shard: the connection to its copy
        self._copies: dict[int, tuple[ShardService, bytes]] = {}  # by shard: the copy, and the peer that owns the shard
        self._num_invalid = 0  # messages that were well-formed and could not be served
        self._liveness_checked_s = 0.0
        self._stop = threading.Event()
        self._retires_s: float | None = None
        self._thread: threading.Thread | None = None
        self._snapshots = None if snapshots is None else SnapshotStore(snapshots)
        self._drop_log = RateLimitedLog(f"the server of shard {index}")
        self._listener = Listener(
            REQUESTS, host=host, port=port, ipc=ipc, public_host=public_host, keys=keys, silent_s=silent_s
        )
        self.address = self._listener.address
        self._liveness = Liveness(self._listener)
        try:
            if self._snapshots is not None:
                self._restore(self._snapshots)
        except BaseException:
            self._listener.close()
            raise

    @property
    def malformed(self) -> int:
        """The number of messages that were dropped."""
        return self._listener.malformed + self._num_invalid

    def start(self) -> Self:
        """Serve in a thread of this process."""
        self._thread = threading.Thread(target=self._run, name=f"gradsync-server-{self.index}", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """End the thread and free the address. Replies that workers have not read are lost."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._retires_s is None:  # else the thread does it
            self._release()

    def _release(self) -> None:
        for mirror in self._mirrors.values():
            mirror.close()
        if self._snapshots is not None:
            self._snapshots.close()
        self._listener.close()

    def retire(self, timeout_s: float) -> None:
        """Keep serving until all workers have left, at most ``timeout_s``, then end. Returns at once.

        A process that exits waits for that: its shard may be the last thing that another rank reads.
        """
        if self._thread is None:
            self.close()
            return
        self._retires_s = time.monotonic() + timeout_s
        atexit.register(self.wait, timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Wait for the thread to end, after ``retire``."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def serve(self, stop: threading.Event) -> None:
        """Serve in this thread until ``stop`` is set."""
        while not stop.is_set():
            mirrors = {
                mirror.connection: shard for shard, mirror in self._mirrors.items() if mirror.connection is not None
            }
            endpoints: list[Listener | ClientConnection] = [self._listener, *mirrors]
            ready = wait_any(endpoints, LIVENESS_INTERVAL_S)
            for connection, shard in mirrors.items():
                if connection in ready:
                    self._send(self._mirrors[shard].receive())
            if self._listener in ready and (got := self._listener.receive(0.0)) is not None:
                self._handle(*got)
            self._check_liveness()

    def _run(self) -> None:
        try:
            self.serve(self._stop)
            if self._retires_s is not None:
                self._release()
        except BaseException as error:
            self.error = error
            log.exception("the server of shard %s has failed", self.index)
            raise

    # -- messages -------------------------------------------------------------------------------------------------

    def _handle(self, peer: bytes, message: Message) -> None:
        """Serve one message. No message of one peer may end the service for the others."""
        try:
            self._reply(peer, message)
        except zmq.ZMQError:
            raise  # this server's own sockets
        except Exception as error:
            self._num_invalid += 1
            self._drop_log.record(f"a {message.kind!r} can't be answered: {error!r}")

    def _reply(self, peer: bytes, message: Message) -> None:
        shard = int(message.fields["shard"])
        try:
            replies = self._dispatch(peer, message, shard)
        except RequestRefused as error:
            self.refused += 1
            replies = [(peer, _refusal(shard, str(error)))]
        except Exception as error:
            # It is well-formed, but can't be served.
            self._num_invalid += 1
            self._drop_log.record(f"a {message.kind!r} can't be served: {error!r}")
            replies = [(peer, _refusal(shard, f"{message.kind} can't be served: {error!r}"))]
        mirror = self._mirrors.get(shard)
        self._send(replies if mirror is None else mirror.hold(replies))
        if self._snapshots is not None and shard in self._services:
            self._snapshots.write_if_due(self._services[shard], self._num_servers[shard])

    def _dispatch(self, peer: bytes, message: Message, shard: int) -> Replies:
        fields, tensors = message.fields, message.tensors
        if message.kind == "join":
            return self._join(peer, fields, shard)
        if message.kind == "replicate":
            return self._replicate(peer, message, shard)
        service = self._services.get(shard)
        worker = None if service is None else service.worker_of(peer)
        if service is None or worker is None:
            raise RequestRefused(f"{message.kind} came from a peer that is no worker of shard {shard}.")
        self._liveness.record_message(peer)
        match message.kind:
            case "fill":
                return service.fill(peer, tensors)
            case "push":
                return service.push(worker, fields, tensors)
            case "pull":
                return service.pull(worker, fields["clock"], newest=fields["newest"])
            case "observe":
                return service.make_observer(worker)
            case "barrier":
                return service.barrier(worker, fields["tag"], fields["value"], tensors)
            case "clip":
                return service.clip(fields["step"], float(fields["squared_norm"]))
            case "get_state":
                return [(peer, service.state())]
            case "load":
                service.load(fields, tensors)
                return [(peer, Message("loaded", {"shard": shard}))]
            case "get_stats":
                stats = service.stats()
                stats.fields |= {"malformed": self.malformed}
                return [(peer, stats)]
            case _:
                return service.remove_worker(worker)

    def _join(self, peer: bytes, fields: dict[str, Json], shard: int) -> Replies:
        worker, clock, read_version = fields["worker"], fields["clock"], fields["read_version"]
        job = Job.from_json(fields["job"])
        servers: list[str] = fields["servers"]
        if not 0 <= shard < len(servers):
            raise RequestRefused(f"there are {len(servers)} servers and no shard {shard}.")
        replies: Replies = []
        if shard not in self._services:
            if self.index in (None, shard):
                self._open_shard(shard, job, len(servers), parse_hyperparameters(fields["groups"]))
            else:
                replies = self._take_over(shard)
        service = self._services[shard]
        if len(servers) != self._num_servers[shard]:
            raise RequestRefused(
                f"this job has {self._num_servers[shard]} servers; worker {worker} knows {len(servers)}."
            )
        comes_back = read_version is not None
        service.check_run(str(fields["run"]), alone=worker is None, resume=bool(fields["resume"]) or comes_back)
        replies += service.join(
            peer,
            job,
            service.next_worker_id() if worker is None else worker,
            clock,
            read_version,
            observer=fields["observer"],
        )
        if job.mirrors and len(servers) > 1 and shard == self.index and shard not in self._mirrors:
            self._open_mirror(service, servers)
        return replies

    def _open_shard(self, shard: int, job: Job, num_servers: int, groups: list[Hyperparameters]) -> None:
        self._services[shard] = self._make_service(shard, job, num_servers, groups)
        self._num_servers[shard] = num_servers
        self.index = shard

    def _make_service(self, shard: int, job: Job, num_servers: int, groups: list[Hyperparameters]) -> ShardService:
        policy = self._policy
        if policy is None and job.staleness != 0:
            policy = staleness.policy_from_text(job.policy)
        names = assign_shards(job.params, num_servers)[shard]
        _check_memory(job, set(names))
        return ShardService(shard, job, names, groups, policy=policy, is_connected=self._listener.is_connected)

    def _send(self, replies: Replies) -> None:
        for peer, message in replies:
            self._listener.send(peer, message)  # a peer that is gone is found by `_check_liveness`

    # -- liveness -------------------------------------------------------------------------------------------------

    def _check_liveness(self) -> None:
        """Remove the workers whose connection is lost."""
        now_s = time.monotonic()
        if now_s < self._liveness_checked_s + LIVENESS_INTERVAL_S:
            return
        self._liveness_checked_s = now_s
        if self._retires_s is not None and (
            now_s > self._retires_s or not any(service.peers for service in self._services.values())
        ):
            self._stop.set()
        gone = {peer for peer in self._connected() if self._liveness.is_gone(peer)}
        if gone:
            self._drain(len(gone))
        for service in list(self._services.values()):
            replies: Replies = []
            for worker, peer in list(service.peers.items()):
                if peer in gone:
                    log.warning("worker %d is gone; shard %d continues without it", worker, service.index)
                    replies += service.remove_worker(worker)
            replies += service.remove_absent_workers()
            mirror = self._mirrors.get(service.index)
            self._send(replies if mirror is None else mirror.hold(replies))

    def _connected(self) -> set[bytes]:
        return {peer for service in self._services.values() for peer in service.peers.values()}

    def _drain(self, num_gone: int) -> None:
        """Read on after a lost connection: the worker's "leave" may still be in the queue."""
        for _ in range(DRAIN_LIMIT * num_gone):
            got = self._listener.receive(0.0)
            if got is None:
                return
            self._handle(*got)

    # -- mirrors --------------------------------------------------------------------------------------------------

    def _open_mirror(self, service: ShardService, servers: list[str]) -> None:
        address = servers[(service.index + 1) % len(servers)]
        try:
            self._mirrors[service.index] = Mirror(
                service, address, len(servers), keys=self._peer_keys, timeout_s=MIRROR_TIMEOUT_S
            )
        except Unreachable as error:
            raise RequestRefused(f"shard {service.index} can't have a second copy: {error}") from None

    def _replicate(self, peer: bytes, message: Message, shard: int) -> Replies:
        """Apply a log record of another server's shard to its copy here."""
        fields = message.fields
        record = LogRecord(fields["kind"], dict(fields["fields"]), message.tensors)
        if record.kind == "snapshot":
            job, num_servers = Job.from_json(fields["job"]), fields["num_servers"]
            if not 0 <= shard < num_servers or shard in self._services:
                raise RequestRefused(f"shard {shard} has no copy here.")
            known = self._copies.get(shard)
            if known is not None and known[1] != peer and self._listener.is_connected(known[1]):
                raise RequestRefused(f"the copy of shard {shard} belongs to another server.")
            self._copies[shard] = (
                self._make_service(shard, job, num_servers, parse_hyperparameters(fields["groups"])),
                peer,
            )
            self._num_servers[shard] = num_servers
        copy, owner = self._copies.get(shard, (None, b""))
        if copy is None or owner != peer:
            raise RequestRefused(f"there is no copy of shard {shard} here.")
        copy.replay(record)
        return [(peer, Message("replicated", {"shard": shard, "sequence": fields["sequence"]}))]

    def _take_over(self, shard: int) -> Replies:
        """Make a copy the shard: a worker has found the shard's own server gone."""
        if shard not in self._copies:
            raise RequestRefused(f"this server has shard {self.index}, and no copy of shard {shard}.")
        copy, owner = self._copies[shard]
        if self._listener.is_connected(owner):
            raise RequestRefused(f"{RETRY_PREFIX} the server of shard {shard} is still connected.")
        del self._copies[shard]
        self._services[shard] = copy
        peers = {worker: peer for service in self._services.values() for worker, peer in service.peers.items()}
        log.warning("server %s takes over shard %d at version %d", self.index, shard, copy.shard.version)
        return copy.take_over(peers)

    # -- snapshots ------------------------------------------------------------------------------------------------

    def _restore(self, snapshots: SnapshotStore) -> None:
        for shard, job, num_servers, saved in snapshots.read():
            if self.index not in (None, shard):
                continue
            self.index = shard
            self._open_from_snapshot(shard, job, num_servers, saved)

    def _open_from_snapshot(self, shard: int, job: Job, num_servers: int, saved: dict[str, Any]) -> None:
        service = self._services[shard] = self._make_service(shard, job, num_servers, saved["groups"])
        self._num_servers[shard] = num_servers
        service.replay(LogRecord("snapshot", saved["fields"], saved["tensors"]))
        log.warning(
            "shard %d was restored from its snapshot of version %d; later updates are lost",
            shard,
            service.shard.version,
        )


def _check_memory(job: Job, names: set[str]) -> None:
    """Refuse a shard that does not fit into this host's memory, before anything is allocated for it."""
    num_bytes = sum(param.num_bytes for param in job.params if param.name in names)
    memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    if num_bytes > memory:
        raise RequestRefused(
            f"expected a shard that fits into this host's memory of {memory} bytes; got {num_bytes} bytes of "
            "parameters. Use more servers, or a host with more memory."
        )


def _refusal(shard: int, reason: str) -> Message:
    return Message("refused", {"shard": shard, "reason": reason[:MAX_REASON].encode(errors="replace").decode()})
