"""What the workers of one run agree on with the servers: parameters, optimizer, and how stale a read may be.

The first worker brings it, in JSON; a worker that brings another is refused. Nothing in it is code: the optimizer is
the name of a class of ``torch.optim``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.messages import DTYPES, Json

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
REFUSED = {"LBFGS": "it evaluates the loss again during its step, and a server has no loss"}
LEFT_OUT = ("params", "param_names")  # of a group: what are no hyperparameters

Hyperparameters = dict[str, Json]  # of one group of parameters


@dataclass(frozen=True)
class Param:
    """One parameter: its name, shape, dtype and the optimizer's group it is in."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class Job:
    """What servers are asked to do.

    >>> import torch
    >>> from gradsync.server.job import Job
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
    num_workers: int  # awaited from the start, as 0 .. num_workers - 1
    staleness: int | None = 0  # higher => less waiting, older parameters; 0: bulk-synchronous; None: never wait
    backup: int = 0  # higher => bulk-synchronous steps wait for fewer workers, and drop the late
    clip_norm: float | None = None  # lower => calmer steps; of the whole model's gradient
    policy: str = ""  # what becomes of late gradients, as a spec; empty: they are applied as they are
    codecs: dict[str, str] = field(default_factory=dict)  # by parameter name, as specs; others travel whole
    seed: int = 0  # of the codecs that round or choose at random
    mirrors: int = 0  # 1: every shard has a second copy on the next server
    snapshot_every: int = 0  # lower => less is lost with a server, more is written; in updates, 0: never

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS or self.optimizer in REFUSED:
            why = REFUSED.get(self.optimizer, "it is none of torch.optim")
            allowed = ", ".join(sorted(set(OPTIMIZERS) - set(REFUSED)))
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
                "backup is less than the number of workers, and goes with staleness=0 alone; got "
                f"backup={self.backup}, {self.num_workers} workers, staleness={self.staleness}."
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, or None for no clipping; got {self.clip_norm}.")
        names = {param.name for param in self.params}
        if len(names) != len(self.params) or not names or not names.issuperset(self.codecs):
            raise ValueError("a job has parameters, each by another name, and codecs for no others.")

    @classmethod
    def describe(cls, params: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, **options: Any) -> Job:
        """The job of training ``params``, by name, with this optimizer; ``options`` are the fields above."""
        kind = type(optimizer)
        if OPTIMIZERS.get(kind.__name__) is not kind:
            raise ValueError(
                f"a server makes its optimizer by the name of a class of torch.optim; got {kind.__module__}."
                f"{kind.__qualname__}. Take one of {', '.join(sorted(set(OPTIMIZERS) - set(REFUSED)))}."
            )
        hyperparameters(optimizer)  # refuses what JSON can't say
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
    def from_json(cls, told: Json) -> Job:
        """The job that JSON says; ``ValueError`` for anything else."""
        known = {entry.name for entry in dataclasses.fields(cls)}
        if not isinstance(told, dict) or told.keys() != known:
            raise ValueError(f"a job has the fields {', '.join(sorted(known))}.")
        try:
            params = tuple(_param(entry) for entry in told["params"])
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
            if type(told[name]) not in kinds:
                raise ValueError(f"a job's {name} is no {type(told[name]).__name__}.")
        if not all(isinstance(text, str) for text in told["codecs"].values()):
            raise ValueError("a job's codecs are specs by parameter name.")
        return cls(**{**told, "params": params})

    def difference(self, other: Job) -> str:
        """The first thing in which two jobs differ, in words; empty if they are the same."""
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


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[Hyperparameters]:
    """Of each group all that is no parameter, as JSON can say it: what travels with every push.

    >>> import torch
    >>> from gradsync.server.job import hyperparameters
    >>> hyperparameters(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))[0]["lr"]
    0.1
    """
    return [
        {key: _plain(key, value) for key, value in group.items() if key not in LEFT_OUT}
        for group in optimizer.param_groups
    ]


def _plain(key: str, value: Any) -> Json:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(key, entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"hyperparameter {key!r} must be a number, text or a list, to travel to a server; got {value!r}.")


def checked(groups: Json) -> list[Hyperparameters]:
    """Hyperparameters from the wire, with tuples where JSON has lists; ``ValueError`` for anything else."""
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError("hyperparameters are a list of objects.")
    made: list[Hyperparameters] = []
    for group in groups:
        if any(key in LEFT_OUT for key in group):
            raise ValueError("hyperparameters hold no parameters.")
        made.append({key: tuple(value) if isinstance(value, list) else value for key, value in group.items()})
    return made


def assign(params: Sequence[Param], num_servers: int) -> list[list[str]]:
    """The names of each server's shard: whole parameters, the largest first, each to the server with the fewest bytes.

    >>> from gradsync.server.job import Param, assign
    >>> assign([Param(name, (size,), "float32", 0) for name, size in (("a", 5), ("b", 3), ("c", 2))], 2)
    [['a'], ['b', 'c']]
    """
    if num_servers < 1:
        raise ValueError(f"there must be a server at least; got {num_servers}.")
    loads = [0] * num_servers
    chosen: dict[str, int] = {}
    for param in sorted(params, key=lambda param: (-param.num_bytes, param.name)):
        server = loads.index(min(loads))
        loads[server] += param.num_bytes
        chosen[param.name] = server
    return [[param.name for param in params if chosen[param.name] == server] for server in range(num_servers)]
