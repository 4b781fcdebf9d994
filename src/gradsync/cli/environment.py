"""The environment of a profiled run: the network, and the costs of the choices' arithmetic, for the advisor.

The workers measure it once the script has ended, and rank 0 saves it. ``gradsync profile`` reads it and asks the
advisor (:func:`advice_for`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradsync.advisor import (
    Choice,
    Costs,
    Gradient,
    Measurement,
    Network,
    advise,
    default_choices,
    measure_costs,
    measure_network,
)
from gradsync.buckets.bucket import BUCKET_BYTES
from gradsync.comm import connect
from gradsync.comm.tcp.communicator import Tcp
from gradsync.profiling.record import StepRecord
from gradsync.profiling.run import Run, read_raw_records
from gradsync.profiling.summary import RunSummary, summarize

FILE = "environment.json"


def measure_environment(folder: Path, *, seconds: float) -> None:
    """Measure with all other workers; rank 0 writes ``environment.json``. Blocks; every worker calls it.

    If the script has closed its connection, nothing can be measured, and the file says so.
    """
    comm = connect().unchecked()  # as strategies use it
    if comm.world_size == 1:
        return
    path = folder / f"rank-{comm.rank}.jsonl"
    raw = read_raw_records(path) if path.exists() else None
    if raw is None or not raw.steps:
        return  # as on every other rank, since all ranks do the same steps
    try:
        network = measure_network(comm, seconds=seconds)
        gradients = [Gradient(name, shape, dtype) for name, (shape, dtype) in raw.meta.params.items()]
        choices = (Choice(raw.meta.strategy), *default_choices())
        costs = measure_costs(gradients, choices, world_size=comm.world_size, comm=comm)
        found: dict[str, Any] = {"network": network.as_dict(), "costs": costs.as_dict()}
    except (RuntimeError, ValueError) as error:
        found = {"problem": f"the network could not be measured: {error}"}
    if comm.rank == 0:
        (folder / FILE).write_text(json.dumps(found) + "\n")


def read_environment(folder: Path) -> dict[str, Any]:
    """The saved measurements; only a ``problem`` if there are none."""
    path = folder / FILE
    if not path.exists():
        return {"problem": "the network was not measured: the run did not come to its end"}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def advice_for(run: Run, environment: dict[str, Any]) -> dict[str, Any]:
    """The advisor's answer for a run, as plain data; only a ``problem`` if it has none."""
    if "problem" in environment:
        return {"problem": environment["problem"]}
    network = Network.from_dict(environment["network"])
    costs = Costs.from_dict(environment["costs"])
    try:
        advice = advise(measurement_of(run), network, costs=costs, allow="all", choices=default_choices()).as_dict()
    except ValueError as error:
        return {"problem": f"the advisor can't predict anything: {error}"}
    return on_one_scale(advice, summarize(run))


def on_one_scale(advice: dict[str, Any], summary: RunSummary) -> dict[str, Any]:
    """Scale the advisor's answer to the report's figures: what ran is as measured, the others are relative to it.

    The advisor predicts the slowest rank, which never waits for a slower one. A report shows means over the ranks,
    where the other ranks do wait: there, synchronization is the part of the step that is not compute.
    """
    compute_s, predicted_s = summary.parts.compute_s, advice["rows"][0]["step_s"]
    rows = []
    for at, row in enumerate(advice["rows"]):
        step_s = summary.step_s * row["step_s"] / predicted_s
        sync_s = max(0.0, step_s - compute_s)
        sent = summary.sent_bytes if at == 0 else row["bytes_per_step"]
        rows.append(row | {"step_s": step_s, "sync_s": sync_s, "share": sync_s / step_s, "bytes_per_step": sent})
    return advice | {"rows": rows}


def measurement_of(run: Run) -> Measurement:
    """A typical step of the run's slowest rank, as the advisor's input."""
    rank = max(run.raw, key=lambda rank: _mean([step.parts.busy_s for step in run.typical(rank)]))
    steps, meta = run.typical(rank), run.ranks[rank]
    if not steps:
        raise ValueError("no step was recorded.")
    came: dict[str, list[float]] = {}
    for step in steps:
        for name, when_s in step.gradients:
            came.setdefault(name, []).append(when_s)
    ready_s = {name: _mean(times) for name, times in came.items() if name in meta.params}
    order = sorted(ready_s, key=lambda name: ready_s[name])
    hosts = [other.host for other in run.ranks.values()]
    after_s = _mean([step.optimizer_s for step in steps])
    return Measurement(
        # A record begins with the optimizer's step, after a backward; the advisor's step ends with it.
        gradients=tuple(Gradient(name, *meta.params[name], ready_s[name] - after_s) for name in order),
        forward_s=max(0.0, _mean([step.opened_s for step in steps]) - after_s),
        backward_s=_mean([step.backward_s - step.opened_s for step in steps]),
        exposed_s=_mean([step.step_s - step.backward_s for step in steps]),
        after_s=after_s,
        waiting_s=_mean([_waiting_after_backward_s(step) for step in steps]),
        choice=Choice(meta.strategy, meta.bucket_bytes),
        exact_bucket_bytes=Tcp.bucket_bytes if meta.transport == Tcp.transport else BUCKET_BYTES,
        world_size=run.world_size,
        ranks_per_host=max(hosts.count(host) for host in hosts),
        cores_per_host=meta.cores,
        threads=meta.threads,
    )


def _waiting_after_backward_s(step: StepRecord) -> float:
    return min(step.parts.waiting_s, step.step_s - step.backward_s)


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))
