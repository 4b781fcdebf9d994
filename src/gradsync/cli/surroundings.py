"""What ``gradsync profile`` measures once the script is over: the network, and what the choices' arithmetic takes."""

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
from gradsync.comm import connect
from gradsync.profiling.files import read_notes
from gradsync.profiling.record import StepRecord
from gradsync.profiling.run import Run

FILE = "surroundings.json"


def measure_surroundings(folder: Path, *, seconds: float) -> None:
    """Measure with all other workers; rank 0 writes ``surroundings.json``. Blocks; every worker calls it.

    A script that has taken its connection down leaves nothing to measure with: then the file says so.
    """
    comm = connect()
    if comm.world_size == 1:
        return
    notes = read_notes(folder / f"rank-{comm.rank}.jsonl") if (folder / f"rank-{comm.rank}.jsonl").exists() else None
    if notes is None or not notes.steps:
        return  # as on every other rank: steps are taken together
    try:
        network = measure_network(comm, seconds=seconds)
        gradients = [Gradient(name, shape, dtype) for name, (shape, dtype) in notes.meta.params.items()]
        choices = (Choice(notes.meta.strategy), *default_choices())
        costs = measure_costs(gradients, choices, world_size=comm.world_size, comm=comm)
        found: dict[str, Any] = {"network": network.as_dict(), "costs": costs.as_dict()}
    except (RuntimeError, ValueError) as error:
        found = {"problem": f"the network could not be measured: {error}"}
    if comm.rank == 0:
        (folder / FILE).write_text(json.dumps(found) + "\n")


def read_surroundings(folder: Path) -> dict[str, Any]:
    """What was measured; a ``problem`` alone if nothing was."""
    path = folder / FILE
    if not path.exists():
        return {"problem": "the network was not measured: the run did not come to its end"}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def advice_for(run: Run, surroundings: dict[str, Any]) -> dict[str, Any]:
    """What the adviser says of a run, in plain data; a ``problem`` if it can say nothing."""
    if "problem" in surroundings:
        return {"problem": surroundings["problem"]}
    network = Network.from_dict(surroundings["network"])
    costs = Costs.from_dict(surroundings["costs"])
    try:
        return advise(measurement_of(run), network, costs=costs, allow="all", choices=default_choices()).as_dict()
    except ValueError as error:
        return {"problem": f"the adviser can't say anything: {error}"}


def measurement_of(run: Run) -> Measurement:
    """A typical step of the run's slowest rank, as the adviser reads it."""
    rank = max(run.notes, key=lambda rank: _mean([step.parts.busy_s for step in run.typical(rank)]))
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
        # A record begins where a backward ended, with the optimizer's step: the adviser's step ends with it.
        gradients=tuple(Gradient(name, *meta.params[name], ready_s[name] - after_s) for name in order),
        forward_s=max(0.0, _mean([step.opened_s for step in steps]) - after_s),
        backward_s=_mean([step.backward_s - step.opened_s for step in steps]),
        exposed_s=_mean([step.step_s - step.backward_s for step in steps]),
        after_s=after_s,
        waiting_s=_mean([_waiting_after_backward_s(step) for step in steps]),
        choice=Choice(meta.strategy, meta.bucket_bytes),
        world_size=run.world_size,
        ranks_per_host=max(hosts.count(host) for host in hosts),
        cores_per_host=meta.cores,
        threads=meta.threads,
    )


def _waiting_after_backward_s(step: StepRecord) -> float:
    return min(step.parts.waiting_s, step.step_s - step.backward_s)


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))
