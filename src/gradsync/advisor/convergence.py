"""How many steps a choice needs to reach the same loss, relative to exact training: measured, or a rule of thumb.

The figures are of ``examples/char_lm.py`` (AdamW, two workers, 600 steps, three seeds), read off the curves that
``benchmarks/bench_convergence.py`` wrote. They are of one task, and of Adam, which tolerates compressed gradients less
well than SGD with momentum does. ``gradsync compare`` measures the figure for another task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradsync.advisor.comm_pattern import CommPattern

Risk = Literal["none", "low", "medium", "high", "unknown"]


@dataclass(frozen=True)
class Convergence:
    """What a choice does to the loss, apart from its speed."""

    risk: Risk
    note: str
    steps_factor: float | None = None  # steps to the same loss, over those of exact training; None: not known


EXACT = Convergence("none", "the same maths as in one process, to float rounding", 1.0)

# A measured figure is the number of steps to the loss that exact training had after REFERENCE_STEP steps, divided by
# REFERENCE_STEP. Above 1 => slower to learn. (A run that did not reach that loss in its 600 steps has no figure.)
REFERENCE_STEP = 350
MEASURED: dict[str, Convergence] = {
    "allreduce+int8": Convergence("low", "measured with AdamW: no difference beyond noise", 1.0),
    "allreduce+int4": Convergence("low", "measured with AdamW: no difference beyond noise", 1.0),
    "allreduce+powersgd": Convergence("medium", "measured with AdamW: 10 % above exact after the same steps", 1.4),
    "diloco": Convergence("medium", "measured with AdamW, every=50: 2 % above exact after the same steps", 1.2),
    "onebit_adam+sign": Convergence("low", "measured after 150 exact steps: no difference beyond noise", 1.0),
    "onebit_adam+topk": Convergence("medium", "measured after 150 exact steps: 5 % above exact", 1.23),
}

# Of one seed, and from the final loss alone: the steps of the run over those of exact training to the same loss.
SEEN_ONCE = {
    "allreduce+sign": Convergence("high", "seen once with AdamW: 26 % above exact; with Adam take onebit_adam", 3.4),
    "allreduce+topk": Convergence("high", "seen once with AdamW: 30 % above exact", 4.0),
}

RULES: dict[str, Convergence] = {
    "allreduce+fp16": Convergence("low", "16-bit sums: rounding far below the noise of a batch", 1.0),
    "allreduce+bf16": Convergence("low", "16-bit sums with 8 bits of precision; error feedback makes up for it", 1.0),
    "allreduce+adasum": Convergence("medium", "another rule for adding gradients: learning rates may need tuning"),
    "allreduce+ternary": Convergence("high", "three values a block: not measured"),
    "allreduce+randomk": Convergence("high", "a random part of the gradient a step: not measured"),
    "allreduce+dgc": Convergence("high", "0.1 % of the gradient a step: needs its warm-up, and SGD with momentum"),
    "local_sgd": Convergence("medium", "replicas drift apart between averagings: a higher every, more drift"),
    "parameter_server": Convergence("medium", "stale gradients: the more workers and staleness, the more it matters"),
    "gossip": Convergence("medium", "replicas agree only roughly; the consensus distance says how roughly"),
    "hogwild": Convergence("high", "updates overwrite each other: for sparse gradients"),
}


def convergence_of(pattern: CommPattern) -> Convergence:
    """What is known of the convergence of a choice.

    >>> from gradsync.advisor.convergence import convergence_of
    >>> from gradsync.advisor.comm_pattern import comm_pattern_of
    >>> convergence_of(comm_pattern_of("allreduce")).risk
    'none'
    """
    if pattern.exact:
        return EXACT
    for table in (MEASURED, SEEN_ONCE, RULES):
        for family in (pattern.family, pattern.strategy.partition("(")[0]):
            if family in table and family != "allreduce":
                return table[family]
    return Convergence("unknown", "nothing was measured of how it converges")
