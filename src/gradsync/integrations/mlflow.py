"""Step records as metrics of an MLflow run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gradsync.integrations.scalars import change_scalars_of, scalars_of
from gradsync.profiling.record import PARTS, StepRecord


class MetricLogger(Protocol):
    """The part of the ``mlflow`` module that is used."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> object: ...
    def log_params(self, params: dict[str, Any]) -> object: ...


class MLflow:
    """Logs the means of every ``every`` steps under the active run, and each change of the members when it comes.

    One call covers many steps, because each is a request to a tracking server.

    Args:
        logger: the ``mlflow`` module.
        every: the number of steps that a point averages. Higher => fewer requests.
        params: logged once, with the first point, such as entries of ``sync.stats()``.
        prefix: of the metrics' names.

    >>> from gradsync.profiling import Breakdown, StepRecord
    >>> from gradsync.integrations.mlflow import MLflow
    >>> class Printer:
    ...     def log_params(self, params):
    ...         print(params)
    ...     def log_metrics(self, metrics, step=None):
    ...         print(metrics["gradsync.step_s"], step)
    >>> adapter = MLflow(Printer(), every=2, params={"strategy": "allreduce"})
    >>> for step, taken_s in enumerate((0.3, 0.5)):
    ...     adapter(StepRecord(step=step, rank=0, began_s=0.0, step_s=taken_s, parts=Breakdown(compute_s=taken_s)))
    {'gradsync.strategy': 'allreduce'}
    0.4 1
    """

    def __init__(
        self,
        logger: MetricLogger,
        *,
        every: int = 50,
        params: Mapping[str, Any] | None = None,
        prefix: str = "gradsync",
    ) -> None:
        if every < 1:
            raise ValueError(f"expected a point for at least 1 step; got {every=}.")
        self._logger = logger
        self._every = every
        self._params = dict(params or {})
        self._prefix = prefix
        self._gathered: list[dict[str, float]] = []

    def __call__(self, record: StepRecord) -> None:
        if changes := change_scalars_of(record):
            self._logger.log_metrics({f"{self._prefix}.{name}": value for name, value in changes.items()}, record.step)
        if record.discarded:
            return
        self._gathered.append(scalars_of(record))
        if len(self._gathered) < self._every:
            return
        gathered, self._gathered = self._gathered, []
        if self._params:
            self._logger.log_params({f"{self._prefix}.{name}": value for name, value in self._params.items()})
            self._params = {}
        names = set.intersection(*(set(each) for each in gathered))
        order = [name for name in ("step_s", *(f"{part}_s" for part in PARTS), "sync_share") if name in names]
        order += sorted(names - set(order))
        means = {f"{self._prefix}.{name}": sum(each[name] for each in gathered) / len(gathered) for name in order}
        self._logger.log_metrics(means, step=record.step)
