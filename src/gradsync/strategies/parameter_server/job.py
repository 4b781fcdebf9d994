"""The ``Job``: what the workers of one run and the servers agree on: parameters, optimizer, staleness.

The first worker sends it to the servers, as JSON; a worker with a different one is refused. It contains no code: the
optimizer is the name of a class of ``torch.optim``. This file also holds the hyperparameters that travel with every
push, and the assignment of parameters to shards.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsync.messaging.format import DTYPES, Json

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
UNSUPPORTED = {"LBFGS": "it evaluates the loss again during its step, and a server has no loss"}
NOT_HYPERPARAMETERS = ("params", "param_names")  # keys of a parameter group

Hyperparameters = dict[str, Json]  # of one group of parameters


@dataclass(frozen=True)
class Param:
    """One parameter: its name, shape, dtype, and the number of its parameter group in the optimizer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the servers train, and how.

    >>> import torch
    >>> from gradsync.strategies.parameter_server.job import Job
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> job = Job.describe(dict(model.named_parameters()), optimizer, num_workers=4, staleness=2)
    >>> job.optimizer, [param.name for param in job.params]
    ('AdamW', ['weight', 'bias'])
    >>> Job.from_json(job.to_json()) == job
    True
    """

    params: tuple[Param, ...]
    optimizer: str
    num_workers: int  # expected from the start, as 0 .. num_workers - 1
    staleness: int | None = 0  # higher => less waiting, older parameters; 0: bulk-synchronous; None: never wait
    backup: int = 0  # higher => bulk-synchronous steps wait for fewer workers, and drop late pushes
    clip_norm: float | None = None  # of the whole model's gradient; lower => smaller steps
    policy: str = ""  # the staleness policy, as a spec; empty: stale gradients are applied as they are
    codecs: dict[str, str] = field(
        default_factory=dict
    )  # by parameter name, as specs; other gradients are not compressed
    seed: int = 0  # of the codecs that round or choose at random
    mirrors: int = 0  # 1: every shard has a second copy on the next server
    snapshot_every: int = 0  # updates between snapshots, 0: never; lower => less is lost with a server, more is written

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS or self.optimizer in UNSUPPORTED:
            why = UNSUPPORTED.get(self.optimizer, "it is none of torch.optim")
            allowed = ", ".join(sorted(set(OPTIMIZERS) - set(UNSUPPORTED)))
            raise ValueError(f"optimizer {self.optimizer!r} can't run at a server: {why}. There are {allowed}.")
        if self.num_workers < 1 or self.mirrors not in (0, 1) or self.snapshot_every < 0:
            raise ValueError(
                "expected num_workers of 1 or more, mirrors of 0 or 1 and snapshot_every of 0 or more; got "
                f"{self.num_workers}, {self.mirrors} and {self.snapshot_every}."
            )
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"staleness must be 0 or more, or None to never wait; got {self.staleness}.")
        if not 0 <= self.backup < self.num_workers or (self.backup and self.staleness != 0):
            raise ValueError(
                "backup must be less than the number of workers, and requires staleness=0; got "
                f"backup={self.backup}, {self.num_workers} workers, staleness={self.staleness}."
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, or None for no clipping; got {self.clip_norm}.")
        names = {param.name for param in self.params}
        if len(names) != len(self.params) or not names or not names.issuperset(self.codecs):
            raise ValueError("a job needs parameters with distinct names, and codecs for these parameters only.")

    @classmethod
    def describe(cls, params: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, **options: Any) -> Job:
        """The job of training ``params``, by name, with this optimizer; ``options`` are the fields above."""
        kind = type(optimizer)
        if OPTIMIZERS.get(kind.__name__) is not kind:
            raise ValueError(
                f"a server makes its optimizer by the name of a class of torch.optim; got {kind.__module__}."
                f"{kind.__qualname__}. Take one of {', '.join(sorted(set(OPTIMIZERS) - set(UNSUPPORTED)))}."
            )
        hyperparameters(optimizer)  # refuses values that JSON can't hold
        group_of = {
            id(param): number for number, group in enumerate(optimizer.param_groups) for param in group["params"]
        }
        found = []
        for name, param in params.items():
            if id(param) not in group_of:
                raise ValueError(f"parameter {name!r} is not the optimizer's. Give only those that it steps.")
            dtype = str(param.dtype).removeprefix("torch.")
            if dtype not in DTYPES:
                raise ValueError(f"parameter {name!r} is of {param.dtype}, which servers do not know.")
            found.append(Param(name, tuple(param.shape), dtype, group_of[id(param)]))
        return cls(params=tuple(found), optimizer=kind.__name__, **options)

    def to_json(self) -> dict[str, Json]:
        fields = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        fields["params"] = [[param.name, list(param.shape), param.dtype, param.group] for param in self.params]
        return fields

    @classmethod
    def from_json(cls, data: Json) -> Job:
        """Parse a job; ``ValueError`` for anything else."""
        known = {entry.name for entry in dataclasses.fields(cls)}
        if not isinstance(data, dict) or data.keys() != known:
            raise ValueError(f"a job has the fields {', '.join(sorted(known))}.")
        try:
            params = tuple(_param(entry) for entry in data["params"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"a job's parameters are lists of name, shape, dtype and group: {error}") from None
        checks: dict[str, tuple[type, ...]] = {
            "optimizer": (str,),
            "num_workers": (int,),
            "staleness": (int, type(None)),
            "backup": (int,),
            "clip_norm": (int, float, type(None)),
            "policy": (str,),
            "codecs": (dict,),
            "seed": (int,),
            "mirrors": (int,),
            "snapshot_every": (int,),
        }
        for name, kinds in checks.items():
            if type(data[name]) not in kinds:
                raise ValueError(f"a job's {name} is no {type(data[name]).__name__}.")
        if not all(isinstance(text, str) for text in data["codecs"].values()):
            raise ValueError("a job's codecs are specs by parameter name.")
        return cls(**{**data, "params": params})

    def difference(self, other: Job) -> str:
        """The first difference of two jobs, in words; empty if they are the same."""
        for entry in dataclasses.fields(self):
            mine, its = getattr(self, entry.name), getattr(other, entry.name)
            if mine == its:
                continue
            if entry.name != "params":
                return f"{entry.name} is {its!r} and not {mine!r}"
            if len(mine) != len(its):
                return f"there are {len(its)} parameters and not {len(mine)}"
            one, another = next((one, another) for one, another in zip(mine, its, strict=True) if one != another)
            return f"a parameter is {another} and not {one}"
        return ""


def _param(entry: Json) -> Param:
    name, shape, dtype, group = entry
    if not isinstance(name, str) or dtype not in DTYPES or type(group) is not int or not 0 <= group < 10_000:
        raise ValueError(f"{entry!r:.100}")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{entry!r:.100}")
    return Param(name, tuple(shape), dtype, group)


class HyperparameterCheck:
    """Checks that the job's optimizer accepts the hyperparameters of a push.

    Without it a bad value would fail only in the middle of a step, and the worker that pushed last would be blamed.

    >>> from gradsync.strategies.parameter_server.job import HyperparameterCheck
    >>> hyperparameters = HyperparameterCheck("SGD")
    >>> hyperparameters.check([{"lr": 0.1, "momentum": 0.9}])
    >>> hyperparameters.check([{"lr": "fast"}])
    Traceback (most recent call last):
    ValueError: SGD takes no lr of 'fast': expected a finite number, 0 or more.
    """

    def __init__(self, optimizer: str) -> None:
        self._name = optimizer
        self._last_valid: list[Hyperparameters] = []  # without the learning rates

    def check(self, groups: Sequence[Hyperparameters]) -> None:
        """``ValueError`` for hyperparameters that the optimizer does not accept."""
        for group in groups:
            rate = group.get("lr", 0.0)
            if type(rate) not in (int, float) or not 0 <= rate < math.inf:
                raise ValueError(f"{self._name} takes no lr of {rate!r:.40}: expected a finite number, 0 or more.")
        rest = [{key: value for key, value in group.items() if key != "lr"} for group in groups]
        if rest == self._last_valid:  # as in nearly every step: schedules only change the learning rate
            return
        kind: Any = OPTIMIZERS[self._name]
        taken = inspect.signature(kind).parameters
        param = torch.nn.Parameter(torch.zeros(1, 1))
        param.grad = torch.zeros(1, 1)
        for group in groups:
            try:  # its constructor refuses most; some, as a momentum, are first read by the second step
                optimizer = kind([param], **{key: value for key, value in group.items() if key in taken})
                optimizer.step()
                optimizer.step()
            except Exception as error:
                raise ValueError(f"{self._name} can't step with {group!r:.200}: {error!r:.200}") from None
        self._last_valid = rest


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[Hyperparameters]:
    """The hyperparameters of each group, as JSON: they are sent with every push.

    >>> import torch
    >>> from gradsync.strategies.parameter_server.job import hyperparameters
    >>> hyperparameters(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))[0]["lr"]
    0.1
    """
    return [
        {key: _to_json(key, value) for key, value in group.items() if key not in NOT_HYPERPARAMETERS}
        for group in optimizer.param_groups
    ]


def _to_json(key: str, value: Any) -> Json:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_to_json(key, entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"hyperparameter {key!r} must be a number, text or a list, to travel to a server; got {value!r}.")


def parse_hyperparameters(groups: Json) -> list[Hyperparameters]:
    """Parse received hyperparameters, with tuples where JSON has lists; ``ValueError`` for anything else."""
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError("hyperparameters are a list of objects.")
    made: list[Hyperparameters] = []
    for group in groups:
        if any(key in NOT_HYPERPARAMETERS for key in group):
            raise ValueError("hyperparameters hold no parameters.")
        made.append({key: tuple(value) if isinstance(value, list) else value for key, value in group.items()})
    return made


def assign_shards(params: Sequence[Param], num_servers: int) -> list[list[str]]:
    """The parameter names of each server's shard.

    Each parameter goes to the server with the fewest bytes so far, the largest parameters first.

    >>> from gradsync.strategies.parameter_server.job import Param, assign_shards
    >>> assign_shards([Param(name, (size,), "float32", 0) for name, size in (("a", 5), ("b", 3), ("c", 2))], 2)
    [['a'], ['b', 'c']]
    """
    if num_servers < 1:
        raise ValueError(f"there must be at least one server; got {num_servers}.")
    loads = [0] * num_servers
    chosen: dict[str, int] = {}
    for param in sorted(params, key=lambda param: (-param.num_bytes, param.name)):
        server = loads.index(min(loads))
        loads[server] += param.num_bytes
        chosen[param.name] = server
    return [[param.name for param in params if chosen[param.name] == server] for server in range(num_servers)]
