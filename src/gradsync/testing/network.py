"""A network lab on one machine: hosts made of network namespaces, joined by links of a chosen rate.

Train on two hosts over a link of 1 Gbit/s, and count the bytes that crossed it::

    from gradsync.testing import Lab

    with Lab(hosts=2, rate="1gbit") as lab:
        lab.run([["python", "train.py"]] * lab.hosts, timeout_s=600)
        print(lab.bytes_sent(0), lab.bytes_received(0))

Each command finds torchrun's environment variables for one worker a host, so ``gradsync.connect()`` needs no arguments.

A cable can be cut while they train, in one direction or both: :meth:`Lab.cut`, :meth:`Lab.heal`. That needs `nft`
(Debian: nftables).

Two hosts are joined by one veth pair. More are joined by a bridge in a namespace of its own, so that the machine's own
network is never touched. Each end of each link is limited by `tc tbf`, like a full-duplex cable. A lab needs root on
Linux, and the commands `ip` and `tc` (Debian: iproute2); :func:`lab_unavailable_reason` says what is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from gradsync.testing.processes import LabError, run_commands, signals_held, wait_until

INTERFACE = "eth0"  # the name of every host's link, inside its namespace
MASTER_PORT = 29500  # free by construction: every host is a fresh network
_PREFIX = "gradsync-lab"
_MARK = "GRADSYNC_NETLAB"  # an environment variable of all that a lab starts, by which its stray children are found
_COMMAND_TIMEOUT_S = 30.0
_STRAYS_S = 3.0  # from SIGTERM to SIGKILL, and from there to giving up, for processes that commands left running
_lab_numbers = itertools.count()


def lab_unavailable_reason() -> str | None:
    """What this machine lacks for a lab; None if it lacks nothing.

    It makes and removes a namespace, because a container may run as root and still forbid that.
    """
    if sys.platform != "linux":
        return f"a lab needs Linux network namespaces; got {sys.platform}. Run it on Linux."
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"a lab needs the command {tool!r}, and it is not on PATH. Install iproute2 (its name on Debian)."
    if os.geteuid() != 0:
        return f"a lab needs root, to make network namespaces; got user id {os.geteuid()}. Run it with sudo."
    probe = f"{_PREFIX}-{os.getpid()}-{next(_lab_numbers)}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "delete", probe)
    except LabError as error:
        return f"a lab needs CAP_SYS_ADMIN and CAP_NET_ADMIN; got: {error}. Grant them to the container."
    return None


class Lab:
    """Hosts `10.77.0.1`, `10.77.0.2`, ... on links of `rate`, from `__enter__` until `__exit__`.

    hosts: how many, 2 to 200.
    rate: of each link in each direction, as tc writes it ("100mbit", "1gbit"); None leaves the links unlimited.

    However the block is left (exception, Ctrl-C, SIGTERM), its namespaces are removed and its processes are ended.
    """

    def __init__(self, *, hosts: int = 2, rate: str | None = None) -> None:
        if not 2 <= hosts <= 200:
            raise ValueError(f"hosts must be from 2 to 200; got {hosts=}. A world of one needs no lab.")
        self.hosts = hosts
        self.rate = rate
        self.name = f"{_PREFIX}-{os.getpid()}-{next(_lab_numbers)}"
        self._made: list[str] = []
        self._old_sigterm: Any = None

    def namespace(self, host: int) -> str:
        """The name of a host's namespace, for `ip netns exec`."""
        return f"{self.name}-host{host}"

    def address(self, host: int) -> str:
        """The address at which the other hosts reach this one."""
        return f"10.77.0.{host + 1}"

    def environment(self, host: int) -> dict[str, str]:
        """The variables of torchrun for one worker on each host, and those that keep Gloo on the lab's link."""
        return {
            "RANK": str(host),
            "WORLD_SIZE": str(self.hosts),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def __enter__(self) -> Self:
        lack = lab_unavailable_reason()
        if lack is not None:
            raise LabError(lack)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # a caller's own handler stays
            self._old_sigterm = signal.signal(signal.SIGTERM, _exit_on_sigterm)
        try:
            with signals_held():  # a signal must not leave half a lab behind
                self._build()
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._tear_down()

    def run(
        self,
        commands: Sequence[Sequence[str]],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        capture: bool = False,
        logs: Sequence[Path] | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> list[str]:
        """Run `commands[h]` on host h, all at once, and block until all have ended.

        Each gets this process's environment, `env` on top, and `environment(h)` on top of that. Returns what each wrote
        to stdout (empty unless `capture`; with `logs`, all goes to these files). The first that fails, or the time
        running out, ends all and raises LabError. `on_wait`: as in `run_commands`.
        """
        if len(commands) != self.hosts:
            raise ValueError(f"expected one command for each of {self.hosts} hosts; got {len(commands)}.")
        inside = [["ip", "netns", "exec", self.namespace(h), *command] for h, command in enumerate(commands)]
        mark = {_MARK: self.name}
        envs = [{**(env or {}), **self.environment(h), **mark} for h in range(self.hosts)]
        return run_commands(inside, envs=envs, timeout_s=timeout_s, capture=capture, logs=logs, on_wait=on_wait)

    def cut(self, host: int, *, sends: bool = True, receives: bool = True) -> None:
        """Lose what a host sends to the other hosts (`sends`), what it receives from them (`receives`), or both.

        The packets are dropped where they arrive, so that no sender notices. `heal` ends it.
        """
        if shutil.which("nft") is None:
            raise LabError(
                "a cut needs the command 'nft', and it is not on PATH. Install nftables (its name on Debian)."
            )
        for other in range(self.hosts):
            if other != host and sends:
                self._drop(other, host, sender=self.address(host))
        if receives:
            self._drop(host, host, sender=None)

    def heal(self, host: int) -> None:
        """End the cut of a host. Connections go on where they were; the kernel sends again what was lost."""
        for other in range(self.hosts):
            inside = ["ip", "netns", "exec", self.namespace(other), "nft"]
            _call(*inside, f"add table inet cut{host}; delete table inet cut{host}")

    def _drop(self, at: int, host: int, *, sender: str | None) -> None:
        """Drop what comes in at a host, from one sender or from all, as part of the cut of ``host``."""
        match = "" if sender is None else f"ip saddr {sender} "
        chain = f"inet cut{host} arriving"
        for rule in (
            f"add table inet cut{host}",
            f"add chain {chain} {{ type filter hook input priority 0; }}",
            f"add rule {chain} iifname {INTERFACE} {match}drop",
        ):
            _call("ip", "netns", "exec", self.namespace(at), "nft", rule)

    def bytes_sent(self, host: int) -> int:
        """How many bytes this host's interface has sent since the lab was built, headers and resends included.

        The kernel hands TCP over in pieces of up to 64 KB, as to a card that cuts them into packets itself, and counts
        their headers once: a cable would carry up to 5 % more.
        """
        return self._counter(host, "tx")

    def bytes_received(self, host: int) -> int:
        """How many bytes this host's interface has received since the lab was built."""
        return self._counter(host, "rx")

    def _counter(self, host: int, direction: str) -> int:
        shown = json.loads(_ip("-n", self.namespace(host), "-s", "-j", "link", "show", "dev", INTERFACE))
        return int(shown[0]["stats64"][direction]["bytes"])

    def _build(self) -> None:
        for host in range(self.hosts):
            self._add_namespace(self.namespace(host))
        if self.hosts == 2:
            first, second = self.namespace(0), self.namespace(1)
            _ip("link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        else:
            switch = f"{self.name}-switch"
            self._add_namespace(switch)
            _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge0", "addrgenmode", "none", "up")
            for host in range(self.hosts):
                port, namespace = f"port{host}", self.namespace(host)
                _ip("link", "add", INTERFACE, "netns", namespace, "type", "veth", "peer", "name", port, "netns", switch)
                _ip("-n", switch, "link", "set", port, "master", "bridge0")
                self._bring_up(switch, port)
        for host in range(self.hosts):
            namespace = self.namespace(host)
            _ip("-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            self._bring_up(namespace, INTERFACE)

    def _add_namespace(self, namespace: str) -> None:
        _ip("netns", "add", namespace)
        self._made.append(namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")

    def _bring_up(self, namespace: str, interface: str) -> None:
        # No IPv6 address: Gloo takes the first one it finds on an interface, and a link-local one can't be routed to.
        _ip("-n", namespace, "link", "set", interface, "addrgenmode", "none", "up")
        if self.rate is not None:
            limit = ["tbf", "rate", self.rate, "burst", "256kb", "latency", "100ms"]
            _call("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *limit)

    def _tear_down(self) -> None:
        with signals_held():
            self._end_strays()
            while self._made:
                # Deleting a namespace deletes the ends of the links in it, and with one end the other goes too.
                _ip("netns", "delete", self._made.pop())
            if self._old_sigterm is not None:
                signal.signal(signal.SIGTERM, self._old_sigterm)
                self._old_sigterm = None

    def _end_strays(self) -> None:
        """End the processes that commands of this lab left running, even in sessions of their own."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._strays():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            wait_until(lambda: not self._strays(), timeout_s=_STRAYS_S)

    def _strays(self) -> list[int]:
        """The processes in the lab's namespaces that bear its mark; others, such as a user's shell, are left alone."""
        found = []
        for pid in itertools.chain.from_iterable(_ip("netns", "pids", made).split() for made in self._made):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
                if f"{_MARK}={self.name}".encode() in environ.read().split(b"\0"):
                    found.append(int(pid))
        return found


def _ip(*arguments: str) -> str:
    return _call("ip", *arguments)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)!r} ended with code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
