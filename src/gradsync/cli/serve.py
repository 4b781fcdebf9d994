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
    help="The address to listen on; [::1]:5555 with IPv6. 0.0.0.0 is every interface. Default port: a free one.",
)
@click.option(
    "--snapshots",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Start from the snapshot in this folder, if there is one, and write new ones there (see snapshot_every).",
)
@click.option("--keys", metavar="FOLDER", help="Only holders of these keys may connect (see `gradsync keys`).")
@click.option("--open", "open_to_all", is_flag=True, help="Use no keys: anyone who reaches the port may connect.")
def serve(shard: int, bind: str, snapshots: Path | None, keys: str | None, open_to_all: bool) -> None:
    """Serve one shard of a parameter server until SIGTERM or Ctrl-C.

    It prints its address. The workers name the addresses of all shards, in their order:
    `parameter_server(servers=["tcp://host0:5555", "tcp://host1:5555"], keys="FOLDER")`, or `open=True` for servers that
    run with --open. The workers send the model that they train.
    """
    if (keys is None) == (not open_to_all):
        raise click.UsageError(
            "anyone who connects can read and change the model. Give --keys FOLDER (made by `gradsync keys FOLDER`), "
            f"or --open to let everybody connect; got {'both' if open_to_all else 'neither'}."
        )
    host, port = _parse_bind(bind)
    serve_shard(shard, host=host, port=port, snapshots=snapshots, keys=keys)


def serve_shard(index: int, *, host: str, port: int, snapshots: Path | None, keys: str | None) -> None:
    """Print the address and serve until SIGTERM or SIGINT."""
    from gradsync.errors import GradSyncError
    from gradsync.messaging import key_folder as keyfiles
    from gradsync.strategies.parameter_server.server.server import Server

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
    bare = ":" not in bind or bind.endswith("]")  # an IPv6 address is in brackets
    host, _, port = (bind, "", "0") if bare else bind.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or (":" in host and not bracketed) or not port.isdigit() or int(port) > 65535:
        expected = "expected HOST or HOST:PORT, with IPv6 [::1]:5555"
        raise click.BadParameter(f"{expected}; got {bind!r}.", param_hint="--bind")
    return host.strip("[]"), int(port)
