"""The doctor's findings: problems and remedies, and none where nothing is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradsync.advisor import Network
from gradsync.doctor import LinkReport, MachineReport, diagnose
from gradsync.doctor.machine import Interface, _quota_cores

GOOD = MachineReport(host="a", cores=8, total_cores=8, threads=4, gflops=100.0, versions={"torch": "2.13"})


def two(**changes: Any) -> list[MachineReport]:
    """Two ranks on two hosts, each on all its cores; the changes are rank 1's."""
    first = replace(GOOD, threads=8)
    return [first, replace(first, rank=1, host="b", **changes)]


def links(*, hosts: int = 2, gbit: float = 9.0, latency_s: float = 1e-4, transport: str = "c10d") -> LinkReport:
    per_s = gbit * 1e9 / 8
    network = Network(name="here", bytes_per_s=per_s, busy_bytes_per_s=per_s, latency_s=latency_s)
    ranks = ((0,), (1,)) if hosts == 2 else ((0, 1),)
    return LinkReport(
        transport=transport, why="asked for", world_size=2, hosts=ranks, network=network, all_reduce=((4096, 1e-4),)
    )


def test_diagnose_finds_nothing_wrong() -> None:
    assert diagnose([GOOD, replace(GOOD, rank=1)], links(hosts=1, transport="shm")) == []
    assert diagnose(two(), links()) == []


@pytest.mark.parametrize(
    ("machines", "what", "do"),
    [
        ([replace(GOOD, threads=8)] * 2, "2 ranks of 8 threads share 8 cores of a: 2 times more", "OMP_NUM_THREADS=4"),
        ([replace(GOOD, threads=1, omp="1")] * 2, "leave 6 of 8 cores of a idle", "OMP_NUM_THREADS=4 (it is 1 now)"),
        ([replace(GOOD, threads=1, cores=2)] * 3, "3 ranks share 2 cores of a", "-n 2"),
        ([replace(GOOD, threads=8, quota_cores=2.5)], "may use 2.5 cores a second, and 8 threads", "CPU limit"),
        ([replace(GOOD, threads=8, load=6.0)], "a was busy before: a load of 6.0 on 8 cores", "top"),
        (two(versions={"torch": "2.12"}), "different versions of torch: 2.12, 2.13", "rank 0 is the odd one"),
        (two(gflops=30.0), "rank 1 on b computes at 46% of the usual speed", "balance=True"),
    ],
)
def test_diagnose_machines(machines: list[MachineReport], what: str, do: str) -> None:
    (finding,) = diagnose(machines)
    assert what in finding.what
    assert do in finding.do


SLOW, FAST, LOOP = (
    Interface("eth0", "10.0.0.1", 1000),
    Interface("ib0", "10.1.0.1", 100_000),
    Interface("lo", "127.0.0.1"),
)


@pytest.mark.parametrize(
    ("changes", "between", "severity", "what", "do"),
    [
        ({"gpus": ("H100",)}, {"gbit": 10.0}, "wrong", "10 Gbit/s between GPU nodes", "compress"),
        ({}, {"gbit": 0.9}, "advice", "0.9 Gbit/s between hosts", "gradsync profile"),
        ({}, {"latency_s": 4e-3}, "advice", "a message takes 4.0 ms", "Larger buckets"),
        ({"clock_offset_s": -1.5}, {}, "advice", "the clock of b is -1.50 s off", "NTP"),
        ({"interfaces": (LOOP, SLOW), "used_interface": "lo"}, {}, "wrong", "through lo, a loopback interface", "eth0"),
        (
            {"interfaces": (LOOP, SLOW, FAST), "used_interface": "eth0"},
            {},
            "wrong",
            "b uses eth0 of 1000 Mbit/s, and has ib0 of 100000",
            "GLOO_SOCKET_IFNAME=ib0",
        ),
        (
            {"interfaces": (LOOP, FAST), "used_interface": "ib0"},
            {"gbit": 20.0},
            "advice",
            "all-reduces move 20 Gbit/s, and the link says 100",
            "jumbo frames",
        ),
    ],
)
def test_diagnose_links(changes: dict[str, Any], between: dict[str, Any], severity: str, what: str, do: str) -> None:
    (finding,) = diagnose(two(**changes), links(**between))
    assert finding.severity == severity
    assert what in finding.what
    assert do in finding.do


def test_diagnose_recommends_shared_memory_on_one_host() -> None:
    (finding,) = diagnose([GOOD, replace(GOOD, rank=1)], links(hosts=1))
    assert "use c10d: asked for" in finding.what


def test_diagnose_sorts_wrong_before_advice() -> None:
    found = diagnose(two(gpus=("H100",), clock_offset_s=9.0, gflops=1.0), links(gbit=1.0))
    assert [finding.severity for finding in found] == ["wrong", "wrong", "advice"]


def test_quota_cores_of_both_cgroup_versions(tmp_path: Any) -> None:
    assert _quota_cores(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert _quota_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert _quota_cores(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert _quota_cores(tmp_path) is None


def test_reports_survive_json() -> None:
    machine = replace(GOOD, interfaces=(SLOW,), gpus=("H100",))
    assert MachineReport.from_dict(machine.as_dict()) == machine
    assert LinkReport.from_dict(links().as_dict()) == links()
