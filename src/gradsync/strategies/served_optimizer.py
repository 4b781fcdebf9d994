"""The user's optimizer where servers do its steps: its state is theirs; it comes when saved, and goes when loaded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradsync.server.client import Client

HELD = ("params", "optimizer")  # of the servers' state: what the user's model and optimizer hold themselves


class ServedOptimizer:
    """Hooks on the optimizer's ``state_dict`` and ``load_state_dict``, until ``release``.

    Args:
        optimizer: the user's.
        params: what it steps, by name.
        client: the line to the servers.
        sends: a state that all ranks load is brought to the servers by this one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, torch.nn.Parameter],
        client: Client,
        *,
        sends: bool,
    ) -> None:
        self._optimizer = optimizer
        self._params = params
        self._client = client
        self._sends = sends
        self.takes_over = False  # the next state that it loads is another rank's, and the servers have it already
        alive = weakref.ref(self)  # the optimizer may outlive a model that was dropped without close()

        def call(method: Callable[[ServedOptimizer], None]) -> None:
            served = alive()
            if served is not None:
                method(served)

        saved = optimizer.register_state_dict_pre_hook(lambda _: call(ServedOptimizer.fetch))
        loaded = optimizer.register_load_state_dict_post_hook(lambda _: call(ServedOptimizer._was_loaded))
        self._removers = [saved.remove, loaded.remove]

    def fetch(self) -> None:
        """Have the optimizer hold what the servers' do. Blocks."""
        fetched = self._client.fetch_state()["optimizer"]
        for name, param in self._params.items():
            if fetched.get(name):
                self._optimizer.state[param] = {
                    # Counts stay where torch has them: on the CPU.
                    key: value.to(param.device) if isinstance(value, Tensor) and value.dim() else value
                    for key, value in fetched[name].items()
                }

    def hand_over(self, rest: Mapping[str, Any] | None = None) -> None:
        """Give the servers this rank's parameters and optimizer state; ``rest``: clocks and the like, else theirs."""
        if rest is None:
            rest = self.fetch_rest()
        states = self._optimizer.state
        params = {name: param.detach() for name, param in self._params.items()}
        kept = {name: dict(states[param]) for name, param in self._params.items() if param in states}
        self._client.load_state({**rest, "params": params, "optimizer": kept})

    def fetch_rest(self) -> dict[str, Any]:
        """What the servers have beyond parameters and optimizer state."""
        return {key: value for key, value in self._client.fetch_state().items() if key not in HELD}

    def _was_loaded(self) -> None:
        takes_over, self.takes_over = self.takes_over, False
        if self._sends and not takes_over:
            self.hand_over()

    def release(self) -> None:
        """Leave the optimizer as it was."""
        for remove in self._removers:
            remove()
