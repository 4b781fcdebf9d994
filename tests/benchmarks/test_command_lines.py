"""The benchmarks' command lines: bad options are refused before anything runs, with an error that names the fix."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest

from benchmarks import (
    bench_codecs,
    bench_collectives,
    bench_convergence,
    bench_header,
    bench_kills,
    bench_step,
    bench_stragglers,
    bench_survive,
    bench_versions,
    compare_losses,
)


@pytest.mark.parametrize(
    ("bench", "arguments", "complaint"),
    [
        (bench_codecs, ["--rounds", "2"], "--rounds must be 3 or more"),
        (bench_codecs, ["--size", "1000"], "--size must be a multiple of 4KB"),
        (bench_codecs, ["--codecs", "int9"], "int9"),
        (bench_codecs, ["--modes", "ours,fast"], "--modes must be of"),
        (bench_collectives, ["--ranks", "2,1"], "2 or more; got '1'"),
        (bench_collectives, ["--sizes", "4KB,many"], "got 'many'"),
        (bench_collectives, ["--sizes", "6"], "whole 4-byte values"),
        (bench_collectives, ["--rounds", "2"], "3 or more"),
        (bench_collectives, ["--variants", "gloo,carrier_pigeon"], "got gloo, carrier_pigeon"),
        (bench_collectives, ["--variants", "nccl", "--ranks", "4096"], "a GPU for each of 4096 ranks"),
        (bench_collectives, ["--sizes", "1000000GB"], "Ask less"),
        (bench_convergence, ["--specs", "allreduce; allreduce(codec=int9)"], "int9"),
        (bench_convergence, ["--specs", "allreduce; allreduce"], "--specs must differ"),
        (bench_convergence, ["--workers", "1"], "--workers must be 2 or more"),
        (bench_convergence, ["--steps", "0"], "--steps must be 1 or more"),
        (bench_convergence, ["--seeds", "0,x"], "--seeds: expected whole numbers, such as 0,1,2; got '0,x'"),
        (bench_convergence, ["--data", "/no/where"], "--data: expected a file to read; there is none at '/no/where'"),
        (bench_header, ["--ranks", "2,many"], "--ranks must be whole numbers, such as 2,64,1024; got '2,many'"),
        (bench_header, ["--ranks", "1"], "--ranks must be 2 or more; got 1"),
        (bench_header, ["--approaches", "pigeon"], "--approaches must be of reduced, gathered; got pigeon"),
        (bench_header, ["--rounds", "0"], "--rounds and --total must be 1 or more; got 0"),
        (bench_kills, ["--kills", "0"], "--kills must be 1 or more; got 0"),
        (bench_kills, ["--world", "1"], "--world must be 2 or more; got 1"),
        (bench_kills, ["--strategy", "shared"], "shared"),
        (bench_kills, ["--transport", "pigeon"], "--transport must be of"),
        (bench_step, ["--rounds", "2"], "--rounds must be 3 or more"),
        (bench_step, ["--variants", "ddp,pigeon"], "--variants must be of"),
        (bench_step, ["--links", "same,fast"], "a rate such as '1gbit' or '100mbit'; got 'fast'"),
        (bench_step, ["--links", "same", "--world", "1"], "2 ranks or more; got 1"),
        (bench_step, ["--links", "same", "--world", "2,many"], "--world must be whole numbers, such as 2,4,8; got"),
        (bench_step, ["--links", "1gbit", "--hosts", "1", "--ranks-per-host", "2"], "Try --hosts 2 --ranks-per-host 2"),
        (bench_step, ["--links", "1gbit", "--world", "6", "--ranks-per-host", "4"], "got 6 ranks, 4 a host"),
        (bench_step, ["--hosts", "2", "--world", "2"], "Give one of them"),
        (bench_stragglers, ["--cases", "sometimes"], "--cases must be of permanent, random; got 'sometimes'"),
        (bench_stragglers, ["--only", "nobody"], "got 'nobody'"),
        (bench_stragglers, ["--seeds", "one"], "--seeds: expected whole numbers, such as 0,1,2; got 'one'"),
        (bench_stragglers, ["--workers", "1"], "--workers must be 2 or more"),
        (bench_survive, ["--kills", "0"], "--kills must be 1 or more; got 0"),
        (bench_survive, ["--workers", "3", "--hosts", "2"], "--workers must be a multiple of --hosts; got 3 and 2"),
        (bench_survive, ["--min", "5"], "--min must be from 1 to --workers; got 5"),
        (bench_survive, ["--torchft", "/no/where"], "--torchft: expected a Python; there is none at '/no/where'"),
        (bench_survive, ["--torchft", "/bin/sh", "--hosts", "2"], "--torchft runs on one host"),
        (bench_survive, ["--strategy", "shared"], "shared"),
        (bench_versions, ["--old", "/no/where"], "--old must be a checkout"),
        (bench_versions, ["--old", ".", "--cases", "pigeon"], "--cases must be of"),
        (compare_losses, ["--old", "/no/where"], "--old must be a checkout"),
        (compare_losses, ["--old", ".", "--transports", "pigeon"], "--transports must be of"),
        (compare_losses, ["--old", ".", "--only", "int9"], "--only must be a part of a case's name"),
    ],
)
def test_benchmarks_refuse_bad_options(
    bench: ModuleType, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.parse(arguments)
    assert complaint in capsys.readouterr().err


def test_bench_step_names_the_package_that_a_peer_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variant = dataclasses.replace(bench_step.VARIANTS["deepspeed_zero1"], needs="no_such_package")
    monkeypatch.setitem(bench_step.VARIANTS, "deepspeed_zero1", variant)
    with pytest.raises(SystemExit):
        bench_step.parse(["--variants", "compute,deepspeed_zero1"])
    assert "deepspeed_zero1 needs no_such_package, which is not installed" in capsys.readouterr().err
