"""The advisor's answer: what each choice would cost, and which to take. "Change nothing" is one of its answers.

Speed and convergence are judged separately. Choices that change the maths are evaluated and shown, but never
recommended unless the user allows them. Allowed choices are compared by predicted time to a given loss and not by their
step time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gradsync import spec
from gradsync.advisor.comm_pattern import comm_pattern_of
from gradsync.advisor.convergence import Risk, convergence_of
from gradsync.advisor.cost_model import CannotPredict, Compute, Prediction, calibrate, predict
from gradsync.advisor.costs import Costs
from gradsync.advisor.measurement import Choice, Measurement
from gradsync.advisor.network import Network
from gradsync.buckets.bucket import MIB

Allow = Literal["exact", "all"] | Sequence[str]

MARGIN = 0.05  # a smaller speed-up is not worth a change, and beyond the model's accuracy
RESIZED = 0.2  # of the margin: enough for another bucket size that exposes less communication, see `_best`
WORTH_NAMING = 0.03  # of the step: a smaller share of synchronization is not worth a change
WORLD_SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

_DEFAULTS = (
    ("allreduce", None),
    ("allreduce", 4 * MIB),
    ("allreduce", 1 * MIB),
    ("allreduce", 100 * MIB),
    ("allreduce(codec=fp16)", None),
    ("allreduce(codec=bf16)", None),
    ("allreduce(codec=int8)", None),
    ("allreduce(codec=int4)", None),
    ("allreduce(codec=sign)", None),
    ("allreduce(codec=topk(density=0.01))", None),
    ("allreduce(reducer=powersgd(rank=4))", None),
    ("local_sgd(every=8)", None),
    ("diloco(every=50)", None),
    ("diloco(every=50, fragments=4, codec=int4)", None),
)


def default_choices() -> tuple[Choice, ...]:
    """The choices that ``advise`` considers by default: exact ones of several bucket sizes, codecs, periodic ones."""
    known = spec.names("strategy")
    return tuple(Choice(text, size) for text, size in _DEFAULTS if text.partition("(")[0] in known)


@dataclass(frozen=True)
class Row:
    """What one choice would cost, and its risk to convergence."""

    choice: Choice
    step_s: float
    sync_s: float  # by how much the step is longer than computing alone
    exposed_s: float  # of it, the part after the last gradient
    share: float  # sync_s of step_s
    bytes_per_step: float
    speedup: float  # of the step, over what ran
    exact: bool
    allowed: bool
    risk: Risk
    note: str  # on convergence
    steps_factor: float | None  # steps to the same loss, over those of exact training
    time_to_loss: float | None  # over that of what ran; lower => sooner

    @property
    def rank_by(self) -> float:
        """The value by which rows are compared: time to a loss. An unknown number of steps is taken to be unchanged."""
        return self.time_to_loss if self.time_to_loss is not None else 1.0 / self.speedup


@dataclass(frozen=True)
class Advice:
    """The advisor's answer. ``rows`` are in the order of the choices; the first is what ran."""

    rows: tuple[Row, ...]
    best: Row
    world_size: int
    network: Network
    waiting_s: float
    sentence: str

    @property
    def now(self) -> Row:
        """What ran."""
        return self.rows[0]

    @property
    def change(self) -> bool:
        """Whether something else than what ran is recommended."""
        return self.best.choice != self.now.choice

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and reports."""
        rows = [{**asdict(row), "choice": str(row.choice), "strategy": row.choice.strategy} for row in self.rows]
        return {
            "rows": rows,
            "now": str(self.now.choice),
            "best": str(self.best.choice),
            "change": self.change,
            "world_size": self.world_size,
            "network": self.network.as_dict(),
            "waiting_s": self.waiting_s,
            "sentence": self.sentence,
        }


def advise(
    measurement: Measurement,
    network: Network,
    *,
    costs: Costs | None = None,
    world_size: int | None = None,
    allow: Allow = "exact",
    choices: Iterable[Choice] | None = None,
    recorded_on: Network | None = None,
    margin: float = MARGIN,
) -> Advice:
    """Predict every choice and recommend one. Pure: it runs and measures nothing.

    Args:
        measurement: a typical step.
        network: on which the choices are to be judged.
        costs: the time of the choices' own arithmetic here (:func:`measure_costs`); default: typical figures.
        world_size: of the run to be judged; default: that of the recorded run.
        allow: "exact" (the maths stays the same), "all" choices whose convergence is known, or the specs that may
            be recommended in addition to exact ones.
        choices: to consider; what ran is always one of them.
        recorded_on: the network on which the step was recorded, if that is another.
        margin: by how much a choice must be faster to be worth a change; a fifth of it is enough for a bucket size
            that exposes less communication. Higher => "change nothing" more often.

    >>> from gradsync.advisor import Gradient, Measurement, Network, advise
    >>> gradients = (Gradient("big", (1000, 1000), ready_s=0.2), Gradient("small", (10,), ready_s=0.3))
    >>> step = Measurement(gradients=gradients, forward_s=0.1, backward_s=0.2, exposed_s=0.001, after_s=0.01)
    >>> advise(step, Network.named("100gbit")).sentence
    'your step is 100 % compute: change nothing'
    """
    costs = Costs.typical() if costs is None else costs
    size = measurement.world_size if world_size is None else world_size
    if size < 1:
        raise ValueError(f"world_size must be at least 1; got {size}.")
    allowed = _allowed(allow)
    looked_at = list(default_choices() if choices is None else choices)
    if not isinstance(allow, str):
        looked_at += [Choice(text) for text in allow if Choice(text) not in looked_at]
    compute = calibrate(measurement, recorded_on or network, costs)
    now = predict(compute, measurement.choice, network, costs, world_size=size)
    rows = [_row(now, now, allowed)]
    for choice in looked_at:
        if _is_what_ran(choice, measurement):
            continue
        try:
            found = predict(compute, choice, network, costs, world_size=size)
        except CannotPredict:
            continue
        rows.append(_row(found, now, allowed))
    best = _best(rows, margin)
    sentence = _sentence(rows[0], best, rows, measurement.waiting_s, margin)
    return Advice(tuple(rows), best, size, network, measurement.waiting_s, sentence)


def scaling(
    measurement: Measurement,
    network: Network,
    *,
    costs: Costs | None = None,
    choices: Iterable[Choice] | None = None,
    world_sizes: Iterable[int] = WORLD_SIZES,
    recorded_on: Network | None = None,
) -> list[dict[str, Any]]:
    """Predict choices at several numbers of ranks, with the same work for each rank. One row for each, as plain data.

    >>> from gradsync.advisor import Choice, Gradient, Measurement, Network, scaling
    >>> gradients = (Gradient("w", (1000, 1000), ready_s=0.2),)
    >>> step = Measurement(gradients=gradients, forward_s=0.1, backward_s=0.2, exposed_s=0.0, after_s=0.0)
    >>> rows = scaling(step, Network.named("1gbit"), choices=[Choice("allreduce")], world_sizes=(2, 1024))
    >>> [(row["world_size"], round(row["efficiency"], 2)) for row in rows]
    [(2, 0.89), (1024, 0.61)]
    """
    costs = Costs.typical() if costs is None else costs
    compute = calibrate(measurement, recorded_on or network, costs)
    rows = []
    for choice in default_choices() if choices is None else choices:
        for size in world_sizes:
            try:
                found = predict(compute, choice, network, costs, world_size=size)
            except CannotPredict:
                break
            rows.append(
                {
                    "choice": str(choice),
                    "world_size": size,
                    "step_s": found.step_s,
                    "efficiency": compute.step_s / found.step_s,
                    "bytes_per_step": found.bytes_per_step,
                }
            )
    return rows


def _allowed(allow: Allow) -> Allow:
    if isinstance(allow, str):
        if allow not in ("exact", "all"):
            raise ValueError(f"allow must be 'exact', 'all' or a list of specs; got {allow!r}.")
        return allow
    return [spec.render(spec.parse(text, "strategy")) for text in allow]


def _is_what_ran(choice: Choice, measurement: Measurement) -> bool:
    """Whether a choice is what ran, written differently."""
    ran = measurement.choice
    return _rendered(choice) == _rendered(ran) and choice.bucket_bytes == ran.bucket_bytes


def _row(found: Prediction, now: Prediction, allow: Allow) -> Row:
    pattern = comm_pattern_of(found.choice.strategy)
    known, before = convergence_of(pattern), convergence_of(comm_pattern_of(now.choice.strategy))
    named = not isinstance(allow, str) and _rendered(found.choice) in allow
    may = pattern.exact or named or (allow == "all" and known.steps_factor is not None)
    to_loss = None
    if known.steps_factor is not None and before.steps_factor is not None:
        to_loss = found.step_s * known.steps_factor / (now.step_s * before.steps_factor)
    return Row(
        choice=found.choice,
        step_s=found.step_s,
        sync_s=found.sync_s,
        exposed_s=found.timeline.exposed_s,
        share=found.share,
        bytes_per_step=found.bytes_per_step,
        speedup=now.step_s / found.step_s,
        exact=pattern.exact,
        allowed=may or found.choice == now.choice,
        risk=known.risk,
        note=known.note,
        steps_factor=known.steps_factor,
        time_to_loss=to_loss,
    )


def _rendered(choice: Choice) -> str:
    return spec.render(spec.parse(choice.strategy, "strategy"))


def _best(rows: Sequence[Row], margin: float) -> Row:
    """The allowed row that reaches a loss soonest. Among equally good ones: what ran, or else an exact one."""
    now = rows[0]
    candidates = [row for row in rows if row.allowed]
    least = min(row.rank_by for row in candidates)
    if now.rank_by <= least * (1 + margin):
        # Another bucket size is easy to try, and the model is most accurate about the wait for the last bucket.
        # (It is less accurate about what fewer, larger collectives save: those must bring the whole margin.)
        resized = [row for row in candidates if row.choice.strategy == now.choice.strategy]
        sooner = [row for row in resized if row.exposed_s < now.exposed_s]
        soonest = min(sooner, key=lambda row: row.rank_by, default=now)
        return soonest if now.rank_by > soonest.rank_by * (1 + RESIZED * margin) else now
    as_good = [row for row in candidates if row.rank_by <= least * (1 + margin / 2)]
    return min(as_good, key=lambda row: (not row.exact, row.rank_by))


def _sentence(now: Row, best: Row, rows: Sequence[Row], waiting_s: float, margin: float) -> str:
    if now.share < WORTH_NAMING:
        return f"your step is {_percent(1 - now.share)} compute: change nothing"
    cost = f"synchronization costs {_percent(now.share)} of your step"
    if waiting_s > now.sync_s / 2:
        cost += "; it is waiting for slower ranks and not the wire"
        if best is now:
            return f"{cost}: change nothing here, and look at what the slow ranks do"
    elif waiting_s > 0.0:
        cost += "; it is the wire, not the stragglers"
    if best is not now:
        return f"{cost}; `{best.choice}` would take it to about {_percent(best.share)}"
    known = [row for row in rows if not row.allowed and row.steps_factor is not None]
    lossy = [row for row in known if row.risk in ("low", "medium") and row.rank_by < 1 - margin]
    if not lossy:
        return f"{cost}, and no choice makes it worth a change: change nothing"
    first = min(lossy, key=lambda row: row.rank_by)
    return (
        f"{cost}; no exact choice helps: change nothing, or allow `{first.choice}` (convergence risk: {first.risk}), "
        f"which would take it to about {_percent(first.share)}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


__all__ = ["Advice", "Compute", "Row", "advise", "default_choices", "scaling"]
