"""Staleness policies: what a server does with a push that was computed from old parameters.

For each push the shard calls ``Policy.admit`` with a ``StalePush``. The policy returns a factor for the learning rate
of this update, or None to drop the push, and may change the gradients. Users name ``Scale``, ``Drop`` and
``Compensate`` in their specs; ``CustomPolicy`` wraps a user's function, and ``ApplyAsIs`` is the default.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsync import spec


@dataclass
class StalePush:
    """One push that a shard is about to apply.

    Attributes:
        worker: the number of the worker that pushed.
        clock: how many pushes it had made before.
        tau: its staleness: the updates that the shard has made since this worker last read it.
        grads: by parameter name; may be changed in place.
        params: the shard's current parameters; not to be changed.
        backup: the parameters that this worker read last; None unless the policy ``needs_backup``.
        state: the policy's own tensors on this shard, by names of its choice; saved with the shard.
    """

    worker: int
    clock: int
    tau: int
    grads: dict[str, Tensor]
    params: dict[str, Tensor]
    backup: dict[str, Tensor] | None
    state: dict[str, Tensor]


KIND = "staleness_policy"  # named as the argument is, so that a spec's `staleness_policy=scale` finds it
EPSILON = 1e-7  # added to the mean square, so that a gradient that is always zero does not divide by zero
FUNCTION_PREFIX = "<"  # of the text that stands for a function: it can't be parsed back


class Policy(abc.ABC):
    """Decides what happens to stale gradients. Keeps no state of its own: that is in ``StalePush.state``.

    >>> from gradsync.strategies.parameter_server.server.staleness import policy_from_text
    >>> policy_from_text("drop(older_than=4)")
    Drop(older_than=4)
    """

    needs_backup: bool = False  # True => the server keeps what each worker last read: a copy of its shard per worker

    @abc.abstractmethod
    def admit(self, push: StalePush) -> float | None:
        """The factor for the learning rate of this update; None drops the push. May change ``push.grads``."""


spec.declare(KIND, Policy)


class ApplyAsIs(Policy):
    """Stale gradients are applied as if they were fresh."""

    def admit(self, push: StalePush) -> float | None:
        return 1.0


@spec.register(KIND, "scale")
@dataclass(frozen=True)
class Scale(Policy):
    """Divides the learning rate by τ (not for a fresh push, τ = 0): Zhang et al.'s staleness-aware SGD.

    With n workers τ is about n, so their n updates together move as far as one synchronous step.

    >>> from gradsync.strategies.parameter_server.server.staleness import Scale, StalePush
    >>> push = StalePush(worker=1, clock=5, tau=4, grads={}, params={}, backup=None, state={})
    >>> Scale().admit(push)
    0.25
    """

    def admit(self, push: StalePush) -> float | None:
        return 1.0 / max(1, push.tau)


@spec.register(KIND, "drop")
@dataclass(frozen=True, kw_only=True)
class Drop(Policy):
    """Drops gradients older than a bound; the shard counts them.

    >>> from gradsync.strategies.parameter_server.server.staleness import Drop, StalePush
    >>> push = StalePush(worker=1, clock=5, tau=5, grads={}, params={}, backup=None, state={})
    >>> Drop(older_than=4).admit(push) is None
    True
    """

    older_than: int = 16  # in updates; lower => fresher updates, more work thrown away

    def __post_init__(self) -> None:
        if self.older_than < 0:
            raise ValueError(f"older_than is a number of updates, 0 or more; got {self.older_than}. Try 16.")

    def admit(self, push: StalePush) -> float | None:
        return 1.0 if push.tau <= self.older_than else None


@spec.register(KIND, "compensate")
@dataclass(frozen=True, kw_only=True)
class Compensate(Policy):
    """DC-ASGD-a, bounded: estimates the gradient at the current weights, to first order, with g² for the Hessian.

    The published formula is MS ← m·MS + (1-m)·g², then g · (1 + λ/√(MS + 1e-7) · g · (w - w_read)). At high learning
    rates it diverges: the further the weights have moved, the more it adds. So here the factor of g is clamped to
    0 .. 1: the updates of other workers may have done a part of what this gradient asks for, or all of it, and that
    part is subtracted. A bounded correction can be stronger: λ is 8, where the paper has 2.

    The server needs a copy of its shard per worker, and one for MS.

    >>> from gradsync.strategies.parameter_server.server.staleness import Compensate
    >>> Compensate(strength=4.0)
    Compensate(strength=4.0, memory=0.95, bounded=True)
    >>> as_published = Compensate(strength=2.0, bounded=False)
    """

    strength: float = 8.0  # λ: higher => old gradients are corrected more
    memory: float = 0.95  # m: higher => the mean of g² follows more slowly
    bounded: bool = True  # False => as published: it may also enlarge a gradient or change its sign

    needs_backup = True

    def __post_init__(self) -> None:
        if not 0 <= self.memory < 1 or not math.isfinite(self.strength) or self.strength < 0:
            raise ValueError(
                f"expected strength of 0 or more and memory from 0 to below 1; got strength={self.strength}, "
                f"memory={self.memory}. Try strength=8, memory=0.95."
            )

    def admit(self, push: StalePush) -> float | None:
        assert push.backup is not None, "the policy has needs_backup"
        for name, pushed in push.grads.items():
            grad, now, read = (_parts(tensor) for tensor in (pushed, push.params[name], push.backup[name]))
            key = f"MS/{name}"
            mean = push.state.get(key)
            if mean is None:
                mean = push.state[key] = torch.zeros_like(grad)
            mean.mul_(self.memory).addcmul_(grad, grad, value=1 - self.memory)
            kept = (now - read).mul_(grad).div_((mean + EPSILON).sqrt_()).mul_(self.strength).add_(1)
            grad.mul_(kept.clamp_(0, 1) if self.bounded else kept)
        return 1.0


class CustomPolicy(Policy):
    """A user's function from the staleness to the factor for the learning rate; None or 0 drops the push.

    >>> from gradsync.strategies.parameter_server.server.staleness import resolve_policy
    >>> resolve_policy(lambda tau: 0.9**tau).function(2)
    0.81
    """

    def __init__(self, function: Callable[[int], float | None]) -> None:
        self.function = function

    def admit(self, push: StalePush) -> float | None:
        factor = self.function(push.tau)
        if factor is not None and not (math.isfinite(factor) and factor >= 0):
            raise ValueError(
                f"{_name_of(self.function)} must return a factor for the learning rate: finite, 0 or more, or None; "
                f"got {factor} for a staleness of {push.tau}."
            )
        return None if not factor else float(factor)


PolicyLike = Policy | str | Callable[[int], float | None]


def policy_from_text(text: str) -> Policy:
    """The policy of a job's text; the empty text is ``ApplyAsIs``."""
    return resolve_policy(text) if text else ApplyAsIs()


def resolve_policy(policy: Any) -> Policy:
    """The policy for a name, a spec (``drop(older_than=4)``), an object or a function."""
    if isinstance(policy, str) and policy.startswith(FUNCTION_PREFIX):
        raise ValueError(
            f"{policy} was a function, and a text can't hold one. Give the policy in Python, or register a class: "
            f'@gradsync.spec.register("{KIND}", "its_name").'
        )
    if callable(policy) and not isinstance(policy, type | Policy):
        return CustomPolicy(policy)
    chosen = spec.resolve(policy, KIND)
    assert isinstance(chosen, Policy), "only policies are registered as such"
    return chosen


def policy_for_spec(policy: Policy | None) -> Policy | str | None:
    """The policy as an argument of a spec: a function becomes its name, which can be compared but not parsed back."""
    return f"{FUNCTION_PREFIX}{_name_of(policy.function)}>" if isinstance(policy, CustomPolicy) else policy


def policy_text(policy: Policy | None) -> str:
    """The text from which a server in another process makes the same policy; refuses a function."""
    if isinstance(policy, CustomPolicy):
        raise ValueError(
            f"staleness_policy={_name_of(policy.function)} is a function, and functions do not go to a server in "
            "another process: it runs no received code. Use scale, compensate or drop there, or let the ranks "
            "host the shards (no servers=)."
        )
    return "" if policy is None else spec.render(policy)


def _name_of(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


def _parts(tensor: Tensor) -> Tensor:
    """A real view of a tensor. The two parts of a complex number are bounded separately, as weights of their own."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
