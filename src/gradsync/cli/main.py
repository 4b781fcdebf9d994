"""The entry point of the ``gradsync`` command: the group of all its commands."""

from __future__ import annotations

import importlib.metadata

import click

from gradsync.cli.compare import compare
from gradsync.cli.doctor import doctor
from gradsync.cli.info import info
from gradsync.cli.interrupt import CommandGroup
from gradsync.cli.keys import keys
from gradsync.cli.profile import profile
from gradsync.cli.run import run
from gradsync.cli.serve import serve
from gradsync.cli.tune import tune


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version("gradsync"), prog_name="gradsync")
def main() -> None:
    """Keep the replicas of a PyTorch model in step while many workers train it.

    In the script: `sync = gradsync.synchronize(model, optimizer)`.  Then: `gradsync run -n 4 train.py`.
    """


main.add_command(run)
main.add_command(profile)
main.add_command(info)
main.add_command(doctor)
main.add_command(compare)
main.add_command(tune)
main.add_command(serve)
main.add_command(keys)

if __name__ == "__main__":
    main()
