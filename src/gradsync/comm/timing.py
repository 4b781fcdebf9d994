"""How long each all-reduce algorithm takes here, and the rules that follow from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from gradsync.comm.choice import CHOICES, NATIVE, Rule
from gradsync.comm.chosen import Chosen

SMALLEST_BYTES = 4096
GROWTH = 4  # from one size to the next
REPEAT_BYTES = 1 << 18  # small tensors are reduced several times at a stretch: a clock's tick is not theirs
MOST_REPEATS = 8
MARGIN = 1.1  # an algorithm of ours is taken where it is faster by this: what is as good as native is not worth it


def sizes_up_to(max_bytes: int) -> list[int]:
    """The sizes that are measured.

    >>> from gradsync.comm.timing import sizes_up_to
    >>> sizes_up_to(70_000)
    [4096, 16384, 65536]
    """
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * GROWTH <= max_bytes:
        sizes.append(sizes[-1] * GROWTH)
    return sizes


def measure(comm: Chosen, num_bytes: int, *, rounds: int, on_round: Callable[[], None]) -> dict[str, float]:
    """The median seconds that an all-reduce of ``num_bytes`` takes by each algorithm. Blocks: every rank must call it.

    Algorithms take turns, in another order each round, so that what else goes on here meets all of them alike. Of each
    round the slowest rank's time counts.
    """
    comm.open_mail()
    tensor = torch.zeros(num_bytes // 4)
    repeats = max(1, min(MOST_REPEATS, REPEAT_BYTES // num_bytes))
    seconds = torch.zeros(rounds, len(CHOICES), dtype=torch.float64)
    for number in range(-1, rounds):  # the first time, connections are made and pages are touched
        for turn in range(len(CHOICES)):
            at = (turn + number) % len(CHOICES)
            comm.barrier()
            start_s = time.perf_counter()
            for _ in range(repeats):
                comm.all_reduce_by(CHOICES[at], tensor).wait()
            seconds[max(number, 0), at] = (time.perf_counter() - start_s) / repeats
        on_round()
    comm.inner.all_reduce(seconds, op="max").wait()
    return dict(zip(CHOICES, seconds.median(0).values.tolist(), strict=True))


def winner(seconds: Mapping[str, float]) -> str:
    """The algorithm to take.

    >>> from gradsync.comm.timing import winner
    >>> winner({"native": 1.0, "ring": 0.95, "tree": 1.2}), winner({"native": 1.0, "ring": 0.8, "tree": 0.7})
    ('native', 'tree')
    """
    fastest = min(seconds, key=lambda name: seconds[name])
    return fastest if seconds[fastest] * MARGIN <= seconds[NATIVE] else NATIVE


def rules_from(measured: Mapping[int, Mapping[str, float]]) -> tuple[Rule, ...]:
    """The rules of a table, from the seconds of each algorithm at each size. Between two sizes the nearer one counts.

    >>> from gradsync.comm.timing import rules_from
    >>> rules_from({4096: {"native": 2.0, "tree": 1.0}, 16384: {"native": 3.0, "tree": 4.0}})
    ((8192, 'tree'), (None, 'native'))
    """
    rules: list[Rule] = []
    for size in sorted(measured):
        name = winner(measured[size])
        if rules and rules[-1][1] == name:
            rules.pop()
        rules.append((round(size * GROWTH**0.5), name))
    return (*rules[:-1], (None, rules[-1][1]))
