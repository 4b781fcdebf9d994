"""What a server does with a gradient that is late: apply it at a lower rate, correct it, or drop it.

The staleness τ of a push is how many updates its shard has made since the pushing worker last read from it. A policy
sees each push just before the optimizer's step. Policies remember nothing themselves: what they must keep is in
``late.state``, which the shard saves with the rest.
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
from gradsync.server.late import Late

KIND = "staleness_policy"  # named as the argument is, so that a spec's `staleness_policy=scale` finds it
FLOOR = 1e-7  # under the root of the mean square: a gradient that is always zero divides by nothing
UNWRITABLE = "<"  # how the text of a function begins: no spec is read back from it


class Policy(abc.ABC):
    """Decides what becomes of late gradients. Pure: no thread, no socket, no memory.

    >>> from gradsync.server.staleness import make
    >>> make("drop(older_than=4)")
    Drop(older_than=4)
    """

    needs_backup: bool = False  # the server then keeps what each worker last read: a copy of its shard a worker

    @abc.abstractmethod
    def admit(self, late: Late) -> float | None:
        """What the learning rate of this one update is multiplied by; None drops the push. May change ``grads``."""


spec.declare(KIND, Policy)


class Plain(Policy):
    """Late gradients are applied as if they were fresh."""

    def admit(self, late: Late) -> float | None:
        return 1.0


@spec.register(KIND, "scale")
@dataclass(frozen=True)
class Scale(Policy):
    """The learning rate divided by τ (a fresh push, τ = 0, goes whole): Zhang et al.'s staleness-aware SGD.

    With n workers τ is about n: their n updates together move as far as one synchronous step.

    >>> from gradsync.server.staleness import Scale
    >>> Scale()
    Scale()
    """

    def admit(self, late: Late) -> float | None:
        return 1.0 / max(1, late.tau)


@spec.register(KIND, "drop")
@dataclass(frozen=True, kw_only=True)
class Drop(Policy):
    """Gradients older than a bound are dropped, and counted.

    >>> from gradsync.server.staleness import Drop
    >>> Drop(older_than=4).older_than
    4
    """

    older_than: int = 16  # in updates; lower => fresher updates, more work thrown away

    def __post_init__(self) -> None:
        if self.older_than < 0:
            raise ValueError(f"older_than is a number of updates, 0 or more; got {self.older_than}. Try 16.")

    def admit(self, late: Late) -> float | None:
        return 1.0 if late.tau <= self.older_than else None


@spec.register(KIND, "compensate")
@dataclass(frozen=True, kw_only=True)
class Compensate(Policy):
    """DC-ASGD-a, bounded: what the gradient would be at today's weights, to first order, with g² for the Hessian.

    MS ← m·MS + (1-m)·g², then g · (1 + λ/√(MS + 1e-7) · g · (w - w_read)), which is the published formula. Where rates
    are high it diverges: the further the weights went, the more it adds. So here what g is multiplied by stays within
    0 and 1: others' updates can have done a part of what this gradient asks for, or all of it, and that is taken off.
    A bounded correction may be a strong one: λ is 8, where the paper has 2.

    It costs the server a copy of its shard a worker, and one for MS.

    >>> from gradsync.server.staleness import Compensate
    >>> Compensate(strength=4.0)
    Compensate(strength=4.0, memory=0.95, bounded=True)
    >>> as_published = Compensate(strength=2.0, bounded=False)
    """

    strength: float = 8.0  # λ: higher => old gradients are turned further towards today's
    memory: float = 0.95  # m: higher => the scale of g² follows more slowly
    bounded: bool = True  # False => as published: it may also enlarge a gradient or turn it round

    needs_backup = True

    def __post_init__(self) -> None:
        if not 0 <= self.memory < 1 or not math.isfinite(self.strength) or self.strength < 0:
            raise ValueError(
                f"expected strength of 0 or more and memory from 0 to below 1; got strength={self.strength}, "
                f"memory={self.memory}. Try strength=8, memory=0.95."
            )

    def admit(self, late: Late) -> float | None:
        assert late.backup is not None, "needs_backup says so"
        for name, pushed in late.grads.items():
            grad, now, read = (_parts(tensor) for tensor in (pushed, late.params[name], late.backup[name]))
            key = f"MS/{name}"
            mean = late.state.get(key)
            if mean is None:
                mean = late.state[key] = torch.zeros_like(grad)
            mean.mul_(self.memory).addcmul_(grad, grad, value=1 - self.memory)
            kept = (now - read).mul_(grad).div_((mean + FLOOR).sqrt_()).mul_(self.strength).add_(1)
            grad.mul_(kept.clamp_(0, 1) if self.bounded else kept)
        return 1.0


class Own(Policy):
    """A function of the user's: the staleness to what the learning rate is multiplied by; None or 0 drops the push.

    >>> from gradsync.server.staleness import resolve_policy
    >>> resolve_policy(lambda tau: 0.9**tau).function(2)
    0.81
    """

    def __init__(self, function: Callable[[int], float | None]) -> None:
        self.function = function

    def admit(self, late: Late) -> float | None:
        factor = self.function(late.tau)
        if factor is not None and not (math.isfinite(factor) and factor >= 0):
            raise ValueError(
                f"{_name_of(self.function)} gives what the learning rate is multiplied by: finite, 0 or more, or None; "
                f"got {factor} for a staleness of {late.tau}."
            )
        return None if not factor else float(factor)


PolicyLike = Policy | str | Callable[[int], float | None]


def make(text: str) -> Policy:
    """The policy that a text names, as a server is told it; an empty one is plain."""
    return resolve_policy(text) if text else Plain()


def resolve_policy(policy: Any) -> Policy:
    """The policy that a name, a spec (``drop(older_than=4)``), an object or a function stands for."""
    if isinstance(policy, str) and policy.startswith(UNWRITABLE):
        raise ValueError(
            f"{policy} was a function, and a text can't hold one. Give the policy in Python, or register a class: "
            f'@gradsync.spec.register("{KIND}", "its_name").'
        )
    if callable(policy) and not isinstance(policy, type | Policy):
        return Own(policy)
    chosen = spec.resolve(policy, KIND)
    assert isinstance(chosen, Policy), "only policies are registered as such"
    return chosen


def written(policy: Policy | None) -> Policy | str | None:
    """The policy as a spec may hold it: a function becomes its name, which can be compared but not read back."""
    return f"{UNWRITABLE}{_name_of(policy.function)}>" if isinstance(policy, Own) else policy


def wire_text(policy: Policy | None) -> str:
    """The text by which a server in another process makes the same policy; refuses what has none."""
    if isinstance(policy, Own):
        raise ValueError(
            f"staleness_policy={_name_of(policy.function)} is a function, and functions do not go to a server in "
            "another process: it would run a stranger's code. Use scale, compensate or drop there, or let the ranks "
            "host the shards (no servers=)."
        )
    return "" if policy is None else spec.render(policy)


def _name_of(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


def _parts(tensor: Tensor) -> Tensor:
    """A view of it in which a complex number is two real ones: each is a weight of its own, and can be bounded."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
