"""One shard of the parameters with its optimizer. It knows nothing of clocks or connections: see shard_service.py."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.codecs.base import compute_dtype
from gradsync.messaging.format import DTYPES, Json
from gradsync.strategies.parameter_server.job import NOT_HYPERPARAMETERS, OPTIMIZERS, Hyperparameters, Job
from gradsync.strategies.parameter_server.server.staleness import Policy, StalePush

SEP = "\0"  # between the parts of a saved tensor's name: no parameter's name has it
NORM_EPSILON = 1e-6  # as in torch's clip_grad_norm_, so that clipping here is clipping there


@dataclass
class Push:
    """One worker's push to one shard."""

    worker: int
    clock: int  # how many pushes it had made before
    weight: float  # samples or tokens
    groups: list[Hyperparameters]
    grads: dict[str, Tensor]  # of the parameters that were used
    squared_norm: float | None = None  # of this worker's gradient over all shards; for clipping
    lr_share: float = 1.0  # factor of the learning rate: the pushes of one clock together move as far as one step


@dataclass
class AggregatedGradients:
    """The gradients for one step of the optimizer: the weighted mean over the workers' pushes, or one push."""

    grads: dict[str, Tensor]
    groups: list[Hyperparameters]
    squared_norm: float  # of this shard's part


class Shard:
    """A shard's parameters and their optimizer.

    >>> import torch
    >>> from gradsync.strategies.parameter_server.job import Job, hyperparameters
    >>> from gradsync.strategies.parameter_server.server.shard import Push, Shard
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> sgd = torch.optim.SGD([weight], lr=1.0)
    >>> job = Job.describe({"w": weight}, sgd, num_workers=2)
    >>> shard = Shard(job, ["w"], hyperparameters(sgd))
    >>> shard.fill({"w": torch.zeros(2)})
    >>> groups = hyperparameters(sgd)
    >>> first = Push(0, clock=0, weight=1, groups=groups, grads={"w": torch.zeros(2)})
    >>> other = Push(1, clock=0, weight=3, groups=groups, grads={"w": torch.ones(2)})
    >>> shard.step(shard.aggregate([first, other]))
    >>> shard.read(worker=0)["w"]                              # - (1·0 + 3·1) / 4
    tensor([-0.7500, -0.7500])
    """

    def __init__(
        self, job: Job, names: Iterable[str], groups: Sequence[Hyperparameters], policy: Policy | None = None
    ) -> None:
        wanted = set(names)
        described = [param for param in job.params if param.name in wanted]
        self.job = job
        self.names = [param.name for param in described]
        self.params = {
            param.name: Parameter(torch.zeros(param.shape, dtype=DTYPES[param.dtype]), requires_grad=False)
            for param in described
        }
        self.filled = False
        self.version = 0  # updates made
        self.read_at: dict[int, int] = {}  # by worker: the version that it read last
        self.taus: Counter[int] = Counter()
        self.dropped = 0
        self.policy = policy
        self.policy_state: dict[str, Tensor] = {}
        self._backups: dict[int, dict[str, Tensor]] = {}
        self._published: dict[str, Tensor] = {}
        self._published_at = -1
        members: dict[int, list[Parameter]] = {}
        for param in described:
            members.setdefault(param.group, []).append(self.params[param.name])
        if members and max(members) >= len(groups):
            raise ValueError(f"a parameter is in group {max(members)}, and there are {len(groups)} groups.")
        self._group_numbers = sorted(members)
        self.optimizer: torch.optim.Optimizer | None = None  # None: a shard without parameters
        if members:
            kind: Any = OPTIMIZERS[job.optimizer]
            self.optimizer = kind([{"params": members[number], **groups[number]} for number in self._group_numbers])

    # -- requests of workers --------------------------------------------------------------------------------------

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the parameters to the first worker's values."""
        self.check(tensors)
        if tensors.keys() != self.params.keys():
            raise ValueError(f"expected the parameters {self.names}; got {sorted(tensors)}.")
        for name, param in self.params.items():
            param.data.copy_(tensors[name])
        self.filled, self._published_at = True, -1

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors that do not match this shard's parameters."""
        for name, tensor in tensors.items():
            param = self.params.get(name)
            if param is None or param.shape != tensor.shape or param.dtype != tensor.dtype:
                raise ValueError(f"{name!r:.100} of {tensor.dtype} {list(tensor.shape)} is no parameter of this shard.")

    def aggregate(self, pushes: Sequence[Push]) -> AggregatedGradients:
        """Bulk-synchronous: the weighted mean of the workers' gradients, added up in the order of their numbers."""
        ordered = sorted(pushes, key=lambda push: push.worker)
        weight = sum(push.weight for push in ordered)
        grads: dict[str, Tensor] = {}
        for name, param in self.params.items():
            found = [(push.grads[name], push.weight) for push in ordered if name in push.grads and push.weight > 0]
            if not found:
                continue  # no worker used it: the optimizer leaves it alone
            total = torch.zeros(param.shape, dtype=compute_dtype(param.dtype))
            for grad, grad_weight in found:
                total.add_(grad.to(total.dtype), alpha=grad_weight / weight)
            grads[name] = total.to(param.dtype)
        return AggregatedGradients(grads, ordered[0].groups, compute_squared_norm(grads.values()))

    def step(self, gradients: AggregatedGradients, *, squared_norm: float | None = None, factor: float = 1.0) -> None:
        """One step of the optimizer.

        ``squared_norm``: of the whole model's gradient, for clipping. ``factor``: of the learning rate.
        """
        coefficient = self._clip_coefficient(squared_norm)
        for name, grad in gradients.grads.items():
            self.params[name].grad = grad.mul_(coefficient) if coefficient < 1.0 else grad
        if self.optimizer is not None:
            self._set_hyperparameters(gradients.groups, factor)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.version += 1

    def apply_push(self, push: Push) -> bool:
        """Stale-synchronous and asynchronous: step with one worker's gradients; False if the policy dropped them."""
        tau = self.tau(push.worker)
        self.taus[tau] += 1
        coefficient = self._clip_coefficient(push.squared_norm)
        if coefficient < 1.0:
            for grad in push.grads.values():
                grad.mul_(coefficient)
        factor: float | None = 1.0
        if self.policy is not None:
            backup = self._backups.get(push.worker, self.published()) if self.policy.needs_backup else None
            params = {name: param.data for name, param in self.params.items()}
            factor = self.policy.admit(
                StalePush(push.worker, push.clock, tau, push.grads, params, backup, self.policy_state)
            )
        if factor is None:
            self.dropped += 1
            return False
        self.step(AggregatedGradients(push.grads, push.groups, 0.0), factor=factor * push.lr_share)
        return True

    def tau(self, worker: int) -> int:
        """The staleness of a worker: the updates since it last read."""
        return max(0, self.version - self.read_at.get(worker, self.version))

    def read(self, worker: int) -> dict[str, Tensor]:
        """The current parameters, for this worker. They are a copy that later steps do not change."""
        self.record_read(worker)
        return self.published()

    def record_read(self, worker: int) -> None:
        """Record that a worker now has the current version."""
        self.read_at[worker] = self.version
        if self.policy is not None and self.policy.needs_backup:
            self._backups[worker] = self.published()

    def published(self) -> dict[str, Tensor]:
        """A copy of the current version, shared by all its readers: it may be being sent while the next step runs."""
        if self._published_at != self.version:
            self._published = {name: param.detach().clone() for name, param in self.params.items()}
            self._published_at = self.version
        return self._published

    def remove_worker(self, worker: int) -> None:
        self.read_at.pop(worker, None)
        self._backups.pop(worker, None)

    def _clip_coefficient(self, squared_norm: float | None) -> float:
        if self.job.clip_norm is None or squared_norm is None:
            return 1.0
        return self.job.clip_norm / (math.sqrt(squared_norm) + NORM_EPSILON)

    def _set_hyperparameters(self, groups: Sequence[Hyperparameters], factor: float) -> None:
        assert self.optimizer is not None
        for number, group in zip(self._group_numbers, self.optimizer.param_groups, strict=True):
            group.update(groups[number])
            if factor != 1.0:
                group["lr"] = group["lr"] * factor

    def hyperparameters(self) -> list[Hyperparameters]:
        """The current hyperparameters of each of the job's groups; empty for a group without parameters here."""
        if self.optimizer is None:
            return []
        here = dict(zip(self._group_numbers, self.optimizer.param_groups, strict=True))
        return [
            {key: value for key, value in here[number].items() if key not in NOT_HYPERPARAMETERS}
            if number in here
            else {}
            for number in range(max(here) + 1)
        ]

    # -- saving and loading ---------------------------------------------------------------------------------------

    def save(self) -> tuple[dict[str, Json], dict[str, Tensor]]:
        """The whole state: metadata for JSON, and the shard's own tensors: copy them before the next step."""
        tensors = {f"param{SEP}{name}": param.detach() for name, param in self.params.items()}
        plain: list[list[Json]] = []
        for name, param in self.params.items():
            kept = self.optimizer.state.get(param, {}) if self.optimizer is not None else {}
            for key, value in kept.items():
                if isinstance(value, Tensor):
                    tensors[f"state{SEP}{name}{SEP}{key}"] = value
                elif value is not None:
                    plain.append([name, key, value])
        tensors |= {f"policy{SEP}{key}": tensor for key, tensor in self.policy_state.items()}
        for worker, backup in self._backups.items():
            tensors |= {f"backup{SEP}{worker}{SEP}{name}": tensor for name, tensor in backup.items()}
        metadata: dict[str, Json] = {
            "version": self.version,
            "filled": self.filled,
            "plain": plain,
            "read_at": [list(entry) for entry in self.read_at.items()],
            "taus": [list(entry) for entry in self.taus.items()],
            "dropped": self.dropped,
        }
        return metadata, tensors

    def load(self, metadata: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> None:
        """Load what ``save`` returned. The tensors are copied."""
        params: dict[str, Tensor] = {}
        state: dict[str, dict[str, Any]] = {name: {} for name in self.params}
        policy_state: dict[str, Tensor] = {}
        backups: dict[int, dict[str, Tensor]] = {}
        for place, tensor in tensors.items():
            kind, _, rest = place.partition(SEP)
            if kind == "param":
                params[rest] = tensor
            elif kind == "state":
                name, _, key = rest.partition(SEP)
                state[name][key] = tensor.clone()
            elif kind == "policy":
                policy_state[rest] = tensor.clone()
            elif kind == "backup":
                worker, _, name = rest.partition(SEP)
                backups.setdefault(int(worker), {})[name] = tensor.clone()
            else:
                raise ValueError(f"a saved shard has param, state, policy and backup; got {kind!r:.40}.")
        for name, key, value in metadata["plain"]:
            state[name][key] = value
        self.fill(params)
        if self.optimizer is not None:
            for name, kept in state.items():
                if kept:
                    self.optimizer.state[self.params[name]] = kept
                else:
                    self.optimizer.state.pop(self.params[name], None)
        self.filled = bool(metadata["filled"])
        self.version = int(metadata["version"])
        self.read_at = {int(worker): int(version) for worker, version in metadata["read_at"]}
        self.taus = Counter({int(tau): int(count) for tau, count in metadata["taus"]})
        self.dropped = int(metadata["dropped"])
        self.policy_state, self._backups, self._published_at = policy_state, backups, -1


def compute_squared_norm(tensors: Iterable[Tensor]) -> float:
    """The squared norm of several tensors together, in double precision."""
    return sum(float(torch.linalg.vector_norm(tensor, dtype=_wide(tensor))) ** 2 for tensor in tensors)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.dtype.is_complex else torch.float64
