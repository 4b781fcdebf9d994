"""A server: the loop between sockets and the keepers of the shards that it hosts."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from typing import Any, Self

from gradsync.comm.curve import ClientKeys, ServerKeys
from gradsync.comm.endpoints import SILENT_S, Line, Listener, Unreachable, wait_any
from gradsync.comm.messages import Json, Message
from gradsync.server import staleness
from gradsync.server.job import Hyperparameters, Job, assign, checked
from gradsync.server.keeper import Answers, Keeper, Refused
from gradsync.server.mirror import Mirror
from gradsync.server.presence import Presence
from gradsync.server.records import Record
from gradsync.server.shard import Policy
from gradsync.server.snapshot import Snapshots

log = logging.getLogger(__name__)

KINDS = frozenset(
    {"hello", "fill", "push", "pull", "clip", "state?", "load", "stats?", "leave", "aside", "meet", "record"}
)
LOOK_S = 0.2  # how often it looks who is still there
READ_ON = 100  # messages at most, for each worker that is gone, in search of its goodbye
MIRROR_TIMEOUT_S = 10.0
CLOSING_S = 10.0


class Server:
    """Hosts one shard, and the copies of others'; in a thread of this process, or alone in one.

    It takes the job of the first worker that comes, and workers may come and go as they like. What it does not
    understand is counted and dropped.

    >>> import torch
    >>> from gradsync.server.client import Client
    >>> from gradsync.server.job import Job, hyperparameters
    >>> from gradsync.server.server import Server
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
        index: the number of its shard; None: the first worker says.
        host: the interface that it listens at; "0.0.0.0" for all (have keys then).
        port: 0 takes a free one.
        ipc: be reachable by a Unix socket too.
        public_host: the name by which workers find this host, where ``host`` does not say.
        keys: let only the holders of these keys in.
        peer_keys: what it shows to the server that has its shard's copy.
        policy: what becomes of late gradients, instead of what the job says: for one that is a function of the user's.
        snapshots: the folder for snapshots; the server begins with what is there.
        silent_s: larger => a host that fell silent is forgotten later, and one that hangs for a while is spared.
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
        self._keepers: dict[int, Keeper] = {}
        self._num_servers: dict[int, int] = {}
        self._mirrors: dict[int, Mirror] = {}  # by shard: where its copy is
        self._copies: dict[int, tuple[Keeper, bytes]] = {}  # by shard: the copy, and who keeps the shard itself
        self._broken = 0  # messages that were well made and made no sense
        self._looked_s = 0.0
        self._stop = threading.Event()
        self._retires_s: float | None = None
        self._thread: threading.Thread | None = None
        self._snapshots = None if snapshots is None else Snapshots(snapshots)
        self._listener = Listener(
            KINDS, host=host, port=port, ipc=ipc, public_host=public_host, keys=keys, silent_s=silent_s
        )
        self.address = self._listener.address
        self._presence = Presence(self._listener)
        try:
            if self._snapshots is not None:
                self._restore(self._snapshots)
        except BaseException:
            self._listener.close()
            raise

    @property
    def malformed(self) -> int:
        """The messages that were dropped."""
        return self._listener.malformed + self._broken

    def start(self) -> Self:
        """Serve in a thread of this process."""
        self._thread = threading.Thread(target=self._run, name=f"gradsync-server-{self.index}", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """End the thread and let go of the address. What workers had not read is gone with it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSING_S)
        if self._retires_s is None:  # else the thread does
            self._let_go()

    def _let_go(self) -> None:
        for mirror in self._mirrors.values():
            mirror.close()
        if self._snapshots is not None:
            self._snapshots.close()
        self._listener.close()

    def retire(self, timeout_s: float) -> None:
        """Go on for those who are still here, at most so long, and end then. Returns at once.

        A process that is about to end waits for it: its shard may be what another rank reads last.
        """
        if self._thread is None:
            self.close()
            return
        self._retires_s = time.monotonic() + timeout_s
        atexit.register(self.wait, timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Wait for the thread of one that retires to end."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def serve(self, stop: threading.Event) -> None:
        """Serve in this thread until ``stop`` is set."""
        while not stop.is_set():
            mirrors = {mirror.line: shard for shard, mirror in self._mirrors.items() if mirror.line is not None}
            ends: list[Listener | Line] = [self._listener, *mirrors]
            ready = wait_any(ends, LOOK_S)
            for line, shard in mirrors.items():
                if line in ready:
                    self._send(self._mirrors[shard].hear())
            if self._listener in ready and (got := self._listener.receive(0.0)) is not None:
                self._handle(*got)
            self._look()

    def _run(self) -> None:
        try:
            self.serve(self._stop)
            if self._retires_s is not None:
                self._let_go()
        except BaseException as error:
            self.error = error
            log.exception("the server of shard %s has failed", self.index)
            raise

    # -- messages -------------------------------------------------------------------------------------------------

    def _handle(self, peer: bytes, message: Message) -> None:
        shard = message.fields.get("shard")
        if type(shard) is not int:
            self._broken += 1
            return
        try:
            answers = self._answers(peer, message, shard)
        except Refused as error:
            self.refused += 1
            answers = [(peer, Message("refused", {"shard": shard, "why": str(error)}))]
        except Exception as error:
            # Well made, and yet no sense in it. Nothing that one peer sends may end what the others need.
            self._broken += 1
            log.debug("a %r makes no sense: %r", message.kind, error)
            answers = [(peer, Message("refused", {"shard": shard, "why": f"{message.kind} makes no sense: {error!r}"}))]
        mirror = self._mirrors.get(shard)
        self._send(answers if mirror is None else mirror.hold(answers))
        if self._snapshots is not None and shard in self._keepers:
            self._snapshots.look(self._keepers[shard], self._num_servers[shard])

    def _answers(self, peer: bytes, message: Message, shard: int) -> Answers:
        fields, tensors = message.fields, message.tensors
        if message.kind == "hello":
            return self._hello(peer, fields, shard)
        if message.kind == "record":
            return self._keep_copy(peer, message, shard)
        keeper = self._keepers.get(shard)
        worker = None if keeper is None else keeper.worker_of(peer)
        if keeper is None or worker is None:
            raise Refused(f"{message.kind} came from somebody who is no worker of shard {shard}.")
        self._presence.heard(peer)
        match message.kind:
            case "fill":
                return keeper.fill(peer, tensors)
            case "push":
                return keeper.push(worker, fields, tensors)
            case "pull":
                return keeper.pull(worker, int(fields["clock"]), newest=bool(fields.get("newest")))
            case "aside":
                return keeper.step_aside(worker)
            case "meet":
                return keeper.meet(worker, str(fields["tag"]), fields["brought"], tensors)
            case "clip":
                return keeper.clip(int(fields["step"]), float(fields["square"]))
            case "state?":
                return [(peer, keeper.state())]
            case "load":
                keeper.load(fields, tensors)
                return [(peer, Message("loaded", {"shard": shard}))]
            case "stats?":
                told = keeper.stats()
                told.fields |= {"malformed": self.malformed}
                return [(peer, told)]
            case _:
                return keeper.forget(worker)

    def _hello(self, peer: bytes, fields: dict[str, Json], shard: int) -> Answers:
        worker, clock, seen = fields["worker"], fields["clock"], fields["seen"]
        if worker is not None and (type(worker) is not int or worker < 0):
            raise Refused("a worker's number is 0 or more.")
        job = Job.from_json(fields["job"])
        servers: list[str] = [str(address) for address in fields["servers"]]
        if not 0 <= shard < len(servers):
            raise Refused(f"there are {len(servers)} servers and no shard {shard}.")
        answers: Answers = []
        if shard not in self._keepers:
            if self.index in (None, shard):
                self._open(shard, job, len(servers), checked(fields["groups"]))
            else:
                answers = self._take_over(shard)
        keeper = self._keepers[shard]
        if len(servers) != self._num_servers[shard]:
            raise Refused(f"this job has {self._num_servers[shard]} servers; worker {worker} knows {len(servers)}.")
        answers += keeper.hello(
            peer,
            job,
            keeper.free_number() if worker is None else worker,
            None if clock is None else int(clock),
            None if seen is None else int(seen),
            aside=bool(fields.get("aside")),
        )
        if job.mirrors and len(servers) > 1 and shard == self.index and shard not in self._mirrors:
            self._open_mirror(keeper, servers)
        return answers

    def _open(self, shard: int, job: Job, num_servers: int, groups: list[Hyperparameters]) -> None:
        self._keepers[shard] = self._make(shard, job, num_servers, groups)
        self._num_servers[shard] = num_servers
        self.index = shard

    def _make(self, shard: int, job: Job, num_servers: int, groups: list[Hyperparameters]) -> Keeper:
        policy = self._policy
        if policy is None and job.staleness != 0:
            policy = staleness.make(job.policy)
        names = assign(job.params, num_servers)[shard]
        return Keeper(shard, job, names, groups, policy=policy, is_there=self._listener.is_there)

    def _send(self, answers: Answers) -> None:
        for peer, message in answers:
            self._listener.send(peer, message)  # one who is gone is found by `_look`

    # -- who is there ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Forget the workers whose connection is gone."""
        now_s = time.monotonic()
        if now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
        if self._retires_s is not None and (
            now_s > self._retires_s or not any(k.peers for k in self._keepers.values())
        ):
            self._stop.set()
        gone = {peer for peer in self._connected() if self._presence.is_gone(peer)}
        if gone:
            self._read_on(len(gone))
        for keeper in list(self._keepers.values()):
            answers: Answers = []
            for worker, peer in list(keeper.peers.items()):
                if peer in gone:
                    log.warning("worker %d is gone; shard %d goes on without it", worker, keeper.index)
                    answers += keeper.forget(worker)
            answers += keeper.forget_absent()
            mirror = self._mirrors.get(keeper.index)
            self._send(answers if mirror is None else mirror.hold(answers))

    def _connected(self) -> set[bytes]:
        return {peer for keeper in self._keepers.values() for peer in keeper.peers.values()}

    def _read_on(self, num_gone: int) -> None:
        """Somebody's connection is gone: the goodbye that came before it may wait to be read."""
        for _ in range(READ_ON * num_gone):
            got = self._listener.receive(0.0)
            if got is None:
                return
            self._handle(*got)

    # -- copies ---------------------------------------------------------------------------------------------------

    def _open_mirror(self, keeper: Keeper, servers: list[str]) -> None:
        address = servers[(keeper.index + 1) % len(servers)]
        try:
            self._mirrors[keeper.index] = Mirror(
                keeper, address, len(servers), keys=self._peer_keys, timeout_s=MIRROR_TIMEOUT_S
            )
        except Unreachable as error:
            raise Refused(f"shard {keeper.index} can't have a second copy: {error}") from None

    def _keep_copy(self, peer: bytes, message: Message, shard: int) -> Answers:
        """Another server's shard has changed."""
        fields = message.fields
        record = Record(str(fields["what"]), dict(fields["fields"]), message.tensors)
        if record.kind == "whole":
            job, num_servers = Job.from_json(fields["job"]), int(fields["num_servers"])
            if not 0 <= shard < num_servers or shard in self._keepers:
                raise Refused(f"shard {shard} has no copy here.")
            known = self._copies.get(shard)
            if known is not None and known[1] != peer and self._listener.is_there(known[1]):
                raise Refused(f"the copy of shard {shard} is another's.")
            self._copies[shard] = (self._make(shard, job, num_servers, checked(fields["groups"])), peer)
            self._num_servers[shard] = num_servers
        copy, owner = self._copies.get(shard, (None, b""))
        if copy is None or owner != peer:
            raise Refused(f"there is no copy of shard {shard} here.")
        copy.replay(record)
        return [(peer, Message("mirrored", {"shard": shard, "number": int(fields["number"])}))]

    def _take_over(self, shard: int) -> Answers:
        """A worker finds a shard's own server gone, and comes to its copy."""
        if shard not in self._copies:
            raise Refused(f"this server has shard {self.index}, and no copy of shard {shard}.")
        copy, owner = self._copies[shard]
        if self._listener.is_there(owner):
            raise Refused(f"again: the server of shard {shard} is connected still.")
        del self._copies[shard]
        self._keepers[shard] = copy
        peers = {worker: peer for keeper in self._keepers.values() for worker, peer in keeper.peers.items()}
        log.warning("server %s takes over shard %d at version %d", self.index, shard, copy.shard.version)
        return copy.take_over(peers)

    # -- snapshots ------------------------------------------------------------------------------------------------

    def _restore(self, snapshots: Snapshots) -> None:
        for shard, job, num_servers, saved in snapshots.read():
            if self.index not in (None, shard):
                continue
            self.index = shard
            self._open_restored(shard, job, num_servers, saved)

    def _open_restored(self, shard: int, job: Job, num_servers: int, saved: dict[str, Any]) -> None:
        keeper = self._keepers[shard] = self._make(shard, job, num_servers, saved["groups"])
        self._num_servers[shard] = num_servers
        keeper.replay(Record("whole", saved["fields"], saved["tensors"]))
        log.warning(
            "shard %d begins again from its snapshot of version %d; updates after that are lost",
            shard,
            keeper.shard.version,
        )
