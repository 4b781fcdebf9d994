"""``gradsync keys``: make the CURVE keys of a parameter server, or of ranks that gossip."""

from __future__ import annotations

import click


@click.command()
@click.argument("folder", type=click.Path(file_okay=False))
def keys(folder: str) -> None:
    """Make CURVE keys for a parameter server and its workers, or for gossip, in FOLDER.

    Only holders of the keys can connect, and messages between hosts are encrypted. It makes four files: server.key,
    server.pub, worker.key, worker.pub. Give the folder to both sides: `gradsync serve --keys FOLDER` and
    `parameter_server(keys="FOLDER")`; or to all ranks: `gossip(keys="FOLDER")`. Secret files are for their owner only
    (0600); nothing is ever overwritten. A machine that only serves needs server.key and worker.pub; one that only works
    needs worker.key and server.pub; one that gossips needs server.key.
    """
    from gradsync.messaging.key_folder import make_key_folder  # pyzmq and torch are slow to import

    try:
        made = make_key_folder(folder)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    for file in made:
        click.echo(str(file))
