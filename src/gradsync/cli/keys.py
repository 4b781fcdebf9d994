"""``gradsync keys``: make the keys that a parameter server asks for."""

from __future__ import annotations

import click


@click.command()
@click.argument("folder", type=click.Path(file_okay=False))
def keys(folder: str) -> None:
    """Make CURVE keys for a parameter server and its workers in FOLDER.

    Without them nobody connects, and what travels is encrypted. Give the folder to both sides:
    `gradsync serve --keys FOLDER` and `parameter_server(keys="FOLDER")`. Secret files are for their owner only (0600);
    nothing is ever overwritten. A machine that only serves needs server.key and worker.pub; one that only works needs
    worker.key and server.pub.
    """
    from gradsync.server.keyfiles import make_key_folder  # pyzmq and torch are slow to import

    try:
        made = make_key_folder(folder)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    for file in made:
        click.echo(str(file))
