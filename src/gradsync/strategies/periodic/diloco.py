"""DiLoCo: many steps of the user's own optimizer on each rank, then one outer step with their mean difference."""

from __future__ import annotations

import math
from typing import Any

from gradsync import spec
from gradsync.reducers.codec_rules import CodecRule
from gradsync.reducers.compressed.reducer import Compressed
from gradsync.strategies.periodic.base import Periodic
from gradsync.strategies.periodic.inner_rate import Rate

WARMUP_ROUNDS = 2  # exchanges over which the inner learning rate warms up, by default
LR_WARMUP_FACTOR = 4  # the outer learning rate warms up over this many times the exchanges of the momentum's warm-up


@spec.register("strategy", "diloco")
class DiLoCo(Periodic):
    """Every rank trains on its own for ``every`` steps; the mean of what the ranks' steps did is an outer gradient.

    The inner optimizer is the user's. The outer one is SGD with Nesterov's momentum on the mean of
    ``anchor - weights``, weighted by each rank's samples since the last exchange. The anchor is the same on all ranks,
    bit for bit, and after an exchange that does not overlap so are the weights.

    Args:
        every: steps from one exchange to the next. Higher => fewer bytes, and replicas that are farther apart.
        outer_lr: of the outer step. Higher => faster, and less stable; 1 with no momentum is plain averaging.
        outer_momentum: of the outer step. Higher => more weight on earlier exchanges; it needs tens of them to pay off.
        outer_warmup: exchanges of a fragment over which momentum goes from 0 (plain averaging) to ``outer_momentum``;
            the learning rate goes from 1 to ``outer_lr`` over four times as many. Higher => a safer start. A momentum
            of 0.9 looks back about 10 exchanges; 0 starts without a warm-up.
        fragments: parts of the model that are exchanged in turn, each every ``every`` steps. Higher => smaller peaks of
            traffic, and weights that are never all of the same age.
        codec: compresses the differences, with error feedback. They tolerate coarse codecs: try ``int4``.
        overlap: steps that continue while an exchange is under way. Higher => hides a slower network; its result is
            older. Default: 0 for one fragment, a quarter of the steps between two exchanges for more.
        rate: "alone" divides the inner learning rate by √n with n ranks: it is assumed to be chosen for the batch of
            all ranks, and a rank's own batch is noisier. The outer momentum makes up for the shorter steps. "same"
            leaves it as it is. Default: "alone" for Adam and its like, "same" for other optimizers.
        inner_warmup: steps over which the inner learning rate warms up. Higher => a safer start. Default: two rounds;
            none if ``rate`` has its default too and the optimizer is not of Adam's kind. Set 0 if the script has a
            warm-up of its own.
        quorum: in an elastic run: with so many workers an exchange begins without the others, ``grace_s`` after they
            have come. Who is late takes part in the next one, with all its samples. Lower => no waiting for
            stragglers. Default: all wait for all.
        grace_s: how long a quorum waits for the others. Higher => fewer are late.

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
        quorum: int | None = None,
        grace_s: float = 0.0,
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
            inner_warmup=WARMUP_ROUNDS * every if inner_warmup is None else inner_warmup,
            quorum=quorum,
            grace_s=grace_s,
        )
        self.inner_warmup = inner_warmup
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.outer_warmup = outer_warmup
        self.overlap = overlap

    def spec_arguments(self) -> dict[str, Any]:
        """The arguments for its spec."""
        return {
            "every": self.every,
            "outer_lr": self.outer_lr,
            "outer_momentum": self.outer_momentum,
            "outer_warmup": self.outer_warmup,
            "fragments": self.fragments,
            "codec": self._reducer.rules.as_argument() if isinstance(self._reducer, Compressed) else None,
            "overlap": self.overlap,
            "rate": self._inner_rate.rate,
            "inner_warmup": self.inner_warmup,
            "quorum": self.quorum,
            "grace_s": self.grace_s,
        }

    def rates(self, step: int) -> tuple[float, float]:
        """The learning rate and the momentum of a fragment's outer step, counted from 0.

        [Note: outer warm-up] With momentum µ a difference that repeats moves the anchor lr / (1 - µ) times as far, 7
        times by default. At the start of training differences do repeat, but along a curve: the anchor overshoots. The
        learning rate warms up more slowly than the momentum, because it damps a momentum that is at its full value.
        """
        lr = 1.0 + _progress(step, LR_WARMUP_FACTOR * self.outer_warmup) * (self.outer_lr - 1.0)
        return lr, _progress(step, self.outer_warmup) * self.outer_momentum


def _progress(step: int, of: int) -> float:
    return 1.0 if step >= of else step / of
