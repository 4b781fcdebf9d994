"""How commands end on a signal: their child processes end first; the exit code is 128 + the signal's number."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import click

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndedBySignal(Exception):
    """Raised when a signal has asked this command to end."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"ended by {self.signal.name}")

    @property
    def exit_code(self) -> int:
        return 128 + self.signal


@contextlib.contextmanager
def deferred_signals() -> Iterator[Callable[[], None]]:
    """Defer SIGINT, SIGTERM and SIGHUP; yields a function that raises :class:`EndedBySignal` if one has arrived.

    So a command ends only where it checks, and never between starting a process and storing its handle. A signal that
    nohup ignores stays ignored. Only in the main thread.
    """
    received: list[int] = []

    def store(number: int, frame: FrameType | None) -> None:
        received.append(number)

    def check() -> None:
        if received:
            raise EndedBySignal(received[0])

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, store)
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class CommandGroup(click.Group):
    """A group of commands that Ctrl-C ends with exit code 130, as a shell expects; click would say 1."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.secho("ended by SIGINT", err=True)
            ctx.exit(128 + signal.SIGINT)
