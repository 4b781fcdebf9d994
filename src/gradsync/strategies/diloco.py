"""DiLoCo: many steps of the user's own optimizer on each rank, then one outer step on what they have done."""

from __future__ import annotations

import math
from typing import Any

from gradsync import spec
from gradsync.reducers.compressed import Compressed
from gradsync.reducers.rules import CodecRule
from gradsync.strategies.inner_rate import Rate
from gradsync.strategies.periodic import Periodic

WARM_ROUNDS = 2  # over which the inner learning rate comes to its length
DAMPED_LATER = 4  # times the exchanges that momentum has to come to its full length


@spec.register("strategy", "diloco")
class DiLoCo(Periodic):
    """Every rank trains by itself for ``every`` steps; then the mean of what they have done is an outer gradient.

    The inner optimizer is the user's. The outer one is SGD with Nesterov's momentum on the mean of
    ``anchor - weights``, weighted by each rank's samples since the last exchange. The anchor is the same on all ranks,
    bit for bit, and after an exchange that does not overlap so are the weights.

    Args:
        every: steps from one exchange to the next. Higher => fewer bytes, and replicas that are farther apart.
        outer_lr: of the outer step. Higher => faster, and less stable; 1 with no momentum is plain averaging.
        outer_momentum: of the outer step. Higher => more of the earlier rounds in it; it needs tens of rounds to pay.
        outer_warmup: exchanges of a fragment over which momentum goes from nothing (plain averaging) to
            ``outer_momentum``; the learning rate goes from 1 to ``outer_lr`` over four times as many. Higher => a safer
            start. 10 are as far as a momentum of 0.9 looks back; 0 begins at full length.
        fragments: parts of the model that are exchanged in turn, each every ``every`` steps. Higher => smaller peaks on
            the wire, and weights that are never all the same age.
        codec: what differences are compressed by, with feedback of what it leaves out. They bear a lot: try ``int4``.
        overlap: steps that go on while an exchange is under way. Higher => a slower wire is hidden, and its result is
            older. Unless said 0 for one fragment, and a quarter of the steps between two exchanges for more.
        rate: "alone" divides the inner learning rate by √n where n ranks train: it is taken to be chosen for the batch
            of all ranks, and a rank's own is noisier. The outer momentum makes up for the shorter steps. "same" leaves
            it as it is. Unless said "alone" for Adam and its like, "same" for others.
        inner_warmup: steps over which the inner learning rate comes to its length. Higher => a safer start. Unless said
            two rounds, but none if ``rate`` is not said either and the optimizer is not of Adam's kind. 0 where the
            script warms up by itself.

    >>> import gradsync, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> with gradsync.synchronize(model, optimizer, "diloco(every=2)") as sync:
    ...     for _ in range(5):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(1, 2)).square().sum().backward()
    ...         optimizer.step()
    ...     sync.stats()["exchanges"], sync.stats()["next_exchange"]
    (2, 6)
    """

    acts_alone = True

    def __init__(
        self,
        *,
        every: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        outer_warmup: int = 10,
        fragments: int = 1,
        codec: CodecRule | None = None,
        overlap: int | None = None,
        rate: Rate | None = None,
        inner_warmup: int | None = None,
    ) -> None:
        if not (math.isfinite(outer_lr) and outer_lr > 0):
            raise ValueError(f"outer_lr must be above 0; got {outer_lr=}.")
        if not 0 <= outer_momentum < 1:
            raise ValueError(f"outer_momentum must be from 0 to below 1; got {outer_momentum=}.")
        if outer_warmup < 0:
            raise ValueError(f"outer_warmup is a number of exchanges, 0 or more; got {outer_warmup=}.")
        if inner_warmup is not None and inner_warmup < 0:
            raise ValueError(f"inner_warmup is a number of steps, 0 or more; got {inner_warmup=}.")
        chosen = overlap
        if chosen is None:
            chosen = 0 if fragments == 1 else max(1, every // max(1, fragments) // 4)
        super().__init__(
            every=every,
            codec=codec,
            fragments=fragments,
            overlap=chosen,
            rates=self.rates,
            rate=rate,
            inner_warmup=WARM_ROUNDS * every if inner_warmup is None else inner_warmup,
        )
        self.inner_warmup = inner_warmup
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.outer_warmup = outer_warmup
        self.overlap = overlap

    def spec_arguments(self) -> dict[str, Any]:
        """What it was made with, for specs."""
        return {
            "every": self.every,
            "outer_lr": self.outer_lr,
            "outer_momentum": self.outer_momentum,
            "outer_warmup": self.outer_warmup,
            "fragments": self.fragments,
            "codec": self._reducer.rules.written() if isinstance(self._reducer, Compressed) else None,
            "overlap": self.overlap,
            "rate": self._inner.rate,
            "inner_warmup": self.inner_warmup,
        }

    def rates(self, step: int) -> tuple[float, float]:
        """The learning rate and the momentum of a fragment's outer step, counted from 0.

        [Note: outer warm-up] With momentum µ a difference that repeats moves the anchor lr / (1 - µ) times as far, 7
        times by default. At the start of a training differences do repeat, and curve: it overshoots. The learning rate
        takes its time: what it damps is a momentum that has come to its full length.
        """
        lr = 1.0 + _part(step, DAMPED_LATER * self.outer_warmup) * (self.outer_lr - 1.0)
        return lr, _part(step, self.outer_warmup) * self.outer_momentum


def _part(step: int, of: int) -> float:
    return 1.0 if step >= of else step / of
