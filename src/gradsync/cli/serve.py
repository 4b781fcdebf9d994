"""``gradsync serve``: one shard of a parameter server, as a process of its own."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType

import click


@click.command()
@click.option(
    "--shard", type=click.IntRange(min=0), default=0, show_default=True, help="Which shard it serves: 0, 1..."
)
@click.option(
    "--bind",
    metavar="HOST[:PORT]",
    default="127.0.0.1",
    show_default=True,
    help="Where to listen. 0.0.0.0 lets other hosts in: have --keys then. Without a port, a free one is taken.",
)
@click.option(
    "--snapshots",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Begin from the snapshot in this folder, if there is one, and write new ones there (see snapshot_every).",
)
@click.option("--keys", metavar="FOLDER", type=click.Path(file_okay=False), help="Let only holders of these keys in.")
def serve(shard: int, bind: str, snapshots: Path | None, keys: str | None) -> None:
    """Serve one shard of a parameter server until SIGTERM or Ctrl-C.

    It prints its address. The workers name the addresses of all shards, in their order:
    `parameter_server(servers=["tcp://host0:5555", "tcp://host1:5555"])`. What they train, they tell it themselves.
    """
    host, port = _parse_bind(bind)
    serve_shard(shard, host=host, port=port, snapshots=snapshots, keys=keys)


def serve_shard(index: int, *, host: str, port: int, snapshots: Path | None, keys: str | None) -> None:
    """Print an address and serve until a signal says to end."""
    from gradsync.errors import GradSyncError
    from gradsync.server import keyfiles
    from gradsync.server.server import Server

    stop = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        if snapshots is not None:
            snapshots.mkdir(parents=True, exist_ok=True)
        server = Server(
            index,
            host=host,
            port=port,
            snapshots=snapshots,
            keys=None if keys is None else keyfiles.server_keys(keys),
            peer_keys=None if keys is None else keyfiles.peer_keys(keys),
        )
    except (GradSyncError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(server.address)
    try:
        server.serve(stop)
    finally:
        server.close()


def _parse_bind(bind: str) -> tuple[str, int]:
    host, _, port = bind.rpartition(":") if ":" in bind else (bind, "", "0")
    if not host or not port.isdigit() or int(port) > 65535:
        raise click.BadParameter(f"expected HOST or HOST:PORT; got {bind!r}.", param_hint="--bind")
    return host, int(port)
