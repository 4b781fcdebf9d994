"""``BoundedStore``: the launcher's TCPStore, with a time limit for every call.

A call of torch's client has no time limit of its own while the connection is only silent, as it is when a cable is cut.
So a thread makes the calls. If one takes too long, its connection is given up, and the next call makes another.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from gradsync.errors import StoreUnreachable

PREFIX = "gradsync/elastic"
CALL_TIMEOUT_S = 3.0  # a call takes some 20 microseconds: a store that needs longer than this can't be reached


class BoundedStore:
    """A client of the store that the launcher holds. Thread-safe. Raises ``StoreUnreachable`` within ``timeout_s``."""

    def __init__(self, host: str, port: int, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.host = host
        self.port = port
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._client: _Client | None = None

    def set(self, key: str, value: str) -> None:
        self._call(lambda store: store.set(key, value))

    def get(self, key: str) -> str | None:
        """The value of a key; None if it is not there. Never waits for it to come."""
        value: str | None = self._call(lambda store: store.get(key).decode() if store.check([key]) else None)
        return value

    def has(self, key: str) -> bool:
        return bool(self._call(lambda store: store.check([key])))

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those of the keys that are not there."""
        return list(self._call(lambda store: [key for key in keys if not store.check([key])]))

    def add(self, key: str, amount: int) -> int:
        return int(self._call(lambda store: store.add(key, amount)))

    def set_once(self, key: str, value: str) -> str:
        """Set a key that is not there yet; returns the value that it has then: this one, or an earlier one."""
        return str(self._call(lambda store: store.compare_set(key, "", value)).decode())

    def new_client(self, timeout_s: float) -> Store:
        """Another connection to the same store, for a transport to find its peers by. Blocks until it is made."""
        try:
            return TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise StoreUnreachable(self._describe(str(error))) from error

    def _call(self, call: Callable[[Store], Any]) -> Any:
        with self._lock:
            if self._client is None:
                self._client = _Client(self.host, self.port, self.timeout_s)
            try:
                return self._client.run(call, self.timeout_s)
            except (RuntimeError, OSError) as error:
                self._client.abandon()
                self._client = None
                raise StoreUnreachable(self._describe(str(error).partition("\n")[0])) from error

    def _describe(self, why: str) -> str:
        return f"the launcher's store at {self.host}:{self.port} can't be reached: {why}"

    def close(self) -> None:
        """Close the connection. A later call makes another."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


class _Client:
    """One connection, and the thread that uses it."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._store: Store | None = None
        self._where = (host, port, timeout_s)
        self._thread = threading.Thread(target=self._serve, name="gradsync-store", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[Store], Any], timeout_s: float) -> Any:
        results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def task() -> None:
            try:
                results.put((call(self._connected()), None))
            except Exception as error:
                results.put((None, error))

        self._calls.put(task)
        try:
            result, error = results.get(timeout=2 * timeout_s if self._store is None else timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no answer in {timeout_s:.0f} s") from None
        if error is not None:
            raise error
        return result

    def abandon(self) -> None:
        """Have the thread end, at once or when its call returns."""
        self._calls.put(None)

    def close(self) -> None:
        """End the thread, and wait for it."""
        self.abandon()
        self._thread.join(self._where[2])

    def _connected(self) -> Store:
        if self._store is None:
            host, port, timeout_s = self._where
            # With the connection comes a little race: a store that is being set up refuses at first.
            end = time.monotonic() + timeout_s
            while True:
                try:
                    # Where nobody answers torch's client would print a stack in C++, at every attempt.
                    socket.create_connection((host, port), timeout=timeout_s).close()
                    client = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
                    break
                except (RuntimeError, OSError):
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.05)
            self._store = PrefixStore(PREFIX, client)
        return self._store

    def _serve(self) -> None:
        while (task := self._calls.get()) is not None:
            task()
        self._store = None
