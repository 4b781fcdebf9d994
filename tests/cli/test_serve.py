"""``gradsync keys``, ``gradsync serve`` and ``gradsync run --servers``."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import gradsync
from gradsync.cli.main import main
from gradsync.comm.base import Solo
from gradsync.messaging.key_folder import peer_keys, server_keys, worker_keys
from gradsync.messaging.keys import KeyPair
from tests.support.launching import GRADSYNC, Launched, run_launched

START_S = 180.0  # importing torch on a busy machine


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="gradsync")


def test_keys_are_made_for_their_owner_only_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert run("keys", str(folder)).exit_code == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {file.name for file in folder.iterdir()} == {"server.key", "server.pub", "worker.key", "worker.pub"}
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in folder.glob("*.key"))
    before = {file.name: file.read_text() for file in folder.iterdir()}
    again = run("keys", str(folder))
    assert again.exit_code != 0
    assert "is there already" in again.output
    assert {file.name: file.read_text() for file in folder.iterdir()} == before


def test_key_folder_keys_match_each_other(tmp_path: Path) -> None:
    run("keys", str(tmp_path / "keys"))
    server, worker, peer = (read(tmp_path / "keys") for read in (server_keys, worker_keys, peer_keys))
    assert worker.server == peer.server == server.own.public
    assert server.allowed == {worker.own.public, peer.own.public}
    assert len({server.own.secret, worker.own.secret}) == 2


def test_key_folder_refuses_missing_and_world_readable_keys(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no key .*worker.key. Make the keys once: gradsync keys"):
        worker_keys(tmp_path)
    run("keys", str(tmp_path / "keys"))
    (tmp_path / "keys" / "worker.key").chmod(0o644)
    with pytest.raises(ValueError, match=r"others may read it. Take their rights away: chmod 600"):
        worker_keys(tmp_path / "keys")


@pytest.mark.parametrize("bind", ["127.0.0.1:port", ":5555", "127.0.0.1:99999", "::1", "[::1]x:5"])
def test_serve_refuses_a_bad_address(bind: str) -> None:
    refused = run("serve", "--open", "--bind", bind)
    assert refused.exit_code != 0
    assert "expected HOST or HOST:PORT" in refused.output


def test_serve_without_keys_needs_open(tmp_path: Path) -> None:
    for options in ([], ["--open", "--keys", str(tmp_path)]):
        refused = run("serve", *options)
        assert refused.exit_code != 0
        assert "Give --keys FOLDER" in refused.output
        assert "--open" in refused.output


def test_key_folder_refuses_a_file(tmp_path: Path) -> None:
    run("keys", str(tmp_path / "keys"))
    file = tmp_path / "keys" / "worker.key"
    for read in (server_keys, worker_keys, peer_keys):
        with pytest.raises(
            ValueError, match=r"keys is a folder .* got the file .*worker.key. Give the folder: keys=.*keys'"
        ):
            read(file)
    with pytest.raises(ValueError, match="expected a file with a pair of keys; got the folder"):
        KeyPair.read(tmp_path / "keys")
    refused = run("serve", "--keys", str(file))
    assert refused.exit_code != 0
    assert "keys is a folder" in refused.output


def test_run_refuses_servers_that_it_can_not_start(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('no worker should have started')")
    assert "got no --servers" in run("run", "--keys", str(tmp_path), str(script)).output
    assert "gradsync serve" in run("run", "--servers", "2", "--nnodes", "2", str(script)).output
    assert "--no-python" in run("run", "--servers", "2", "--no-python", str(script)).output


def step(sync: gradsync.Synchronizer, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    next(iter(model.parameters())).sum().backward()
    optimizer.step()


def test_serve_refuses_other_keys_and_ends_on_sigterm(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    run("keys", str(folder))
    command = [*GRADSYNC, "serve", "--keys", str(folder), "--snapshots", str(tmp_path / "snapshots")]
    with Launched(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address.startswith("tcp://127.0.0.1:")
            model = nn.Linear(2, 1, bias=False)
            with torch.no_grad():
                model.weight.fill_(1.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            served = f"parameter_server(servers=[{address!r}], keys={str(folder)!r})"
            with gradsync.synchronize(model, optimizer, served, comm=Solo(timeout_s=20)) as sync:
                step(sync, model, optimizer)
            assert model.weight.tolist() == [[0.5, 0.5]]
            stranger = tmp_path / "stranger"
            run("keys", str(stranger))
            keyed = f"parameter_server(servers=[{address!r}], keys={str(stranger)!r})"
            with pytest.raises(gradsync.GradSyncError, match="key"):
                gradsync.synchronize(model, optimizer, keyed, comm=Solo(timeout_s=3))
        finally:
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=20)
    assert process.returncode == 0, said


SCRIPT = """
    import json, os, signal, subprocess
    from pathlib import Path
    import torch
    import gradsync

    def kill_server():
        launcher = os.environ["GRADSYNC_LAUNCHER_PID"]
        servers = ["pgrep", "-P", launcher, "-f", "gradsync.cli.launch.servers"]
        supervisor, = subprocess.check_output(servers, text=True).split()
        first, _ = subprocess.check_output(["pgrep", "-P", supervisor], text=True).split()
        os.kill(int(first), signal.SIGKILL)

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with gradsync.synchronize(model, optimizer, "parameter_server(snapshot_every=1)", timeout_s=30) as sync:
        for step in range(40):
            if sync.rank == 1 and step == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            if sync.rank == 0 and step == 20:
                kill_server()
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        sync.settle()
        Path(f"{sync.rank}.done").write_text(json.dumps(sync.stats()["clocks"]))
"""


def test_run_servers_refuse_connections_without_keys(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import torch
            import gradsync
            from gradsync.comm.base import Solo

            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with gradsync.synchronize(model, optimizer, "parameter_server", timeout_s=30) as sync:
                address, = sync.stats()["servers"]
                for way in address.split():
                    other = torch.nn.Linear(4, 2)
                    own = torch.optim.SGD(other.parameters(), lr=0.01)
                    strategy = f"parameter_server(servers=[{way!r}], open=True)"
                    try:
                        gradsync.synchronize(other, own, strategy, comm=Solo(timeout_s=1))
                    except gradsync.GradSyncError as error:
                        print("refused:", error)
        """)
    )
    done = run_launched([*GRADSYNC, "run", "-n", "1", "--servers", "1", str(script)], cwd=tmp_path, timeout_s=START_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused:") == 2, done.stdout


def test_run_servers_survive_a_killed_worker_and_a_killed_server(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [*GRADSYNC, "run", "-n", "2", "--servers", "2", str(script)]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = run_launched(command, cwd=tmp_path, env=environment, timeout_s=START_S + 60)
    assert [path.name for path in tmp_path.glob("*.done")] == ["0.done"], done.stdout + done.stderr
    assert json.loads((tmp_path / "0.done").read_text()) == {"0": 40}
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert "shard 0 of the parameter server was killed by SIGKILL; it is started again" in done.stderr
    assert done.returncode == 128 + signal.SIGKILL
