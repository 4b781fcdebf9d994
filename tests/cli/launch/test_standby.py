"""A launcher's standby store: it listens only after a worker has asked for it, and only where the run's store does."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

import pytest

from gradsync.cli.launch.elastic_store import LOOPBACK, HostedStore, Node, StoreReports
from gradsync.elastic.authority import WANTED, standby_key
from gradsync.elastic.store import BoundedStore


def wait_for(found: Callable[[], str | None]) -> str:
    end_s = time.monotonic() + 30
    while (value := found()) is None:
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return value


def reports(number: int, store: BoundedStore) -> StoreReports:
    node = Node(number=number, launcher=number, is_host=number == 0, run_id="run")
    return StoreReports(store, node, alone=False, notify=lambda: None)


def test_standby_store_opens_when_it_is_wanted_and_hears_of_deaths() -> None:
    hosted = HostedStore(LOOPBACK, 0)
    store = BoundedStore(LOOPBACK, hosted.port)
    host, other = reports(0, store), reports(1, BoundedStore(LOOPBACK, hosted.port))
    try:
        wait_for(lambda: "yes" if store.add("launchers/1/beats", 0) > 1 else None)  # it has asked for news
        assert store.get(standby_key(1)) is None
        assert other._standby is None
        store.set(WANTED, "yes")
        address, port = json.loads(wait_for(lambda: store.get(standby_key(1))))
        assert address == LOOPBACK
        for outside in ("127.0.0.2",):  # it listens at one address of the loopback, not at all
            with pytest.raises(ConnectionRefusedError), socket.create_connection((outside, port), timeout=2.0):
                pass
        other.report_death("1.0", "killed")
        assert BoundedStore(LOOPBACK, port).get("dead/1.0") == "killed"
        assert store.get(standby_key(0)) is None, "node 0 holds the run's store"
    finally:
        host.close(5.0)
        other.close(5.0)
