"""The user's optimizer while the servers do its steps.

Its state is on the servers. Hooks fetch it when the user calls ``optimizer.state_dict()``, and upload it when the user
calls ``optimizer.load_state_dict()``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradsync.strategies.parameter_server.client import Client

HELD_BY_USER = ("params", "optimizer")  # keys of the servers' state that the user's model and optimizer hold too


class RemoteOptimizer:
    """Hooks on the optimizer's ``state_dict`` and ``load_state_dict``, until ``release``.

    Args:
        optimizer: the user's.
        params: of the optimizer, by name.
        client: the connection to the servers.
        uploads: whether this rank uploads a state that all ranks load.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Mapping[str, torch.nn.Parameter],
        client: Client,
        *,
        uploads: bool,
    ) -> None:
        self._optimizer = optimizer
        self._params = params
        self._client = client
        self._uploads = uploads
        self.ignore_next_load = (
            False  # the next state that is loaded is another rank's, and the servers already have it
        )
        self._loaded = False
        reference = weakref.ref(self)  # the optimizer may outlive a model that was dropped without close()

        def call(method: Callable[[RemoteOptimizer], None]) -> None:
            remote = reference()
            if remote is not None:
                method(remote)

        saved = optimizer.register_state_dict_pre_hook(lambda _: call(RemoteOptimizer.fetch))
        loaded = optimizer.register_load_state_dict_post_hook(lambda _: call(RemoteOptimizer._on_load))
        self._removers = [saved.remove, loaded.remove]

    def fetch(self) -> None:
        """Copy the servers' optimizer state into the user's optimizer. Blocks."""
        fetched = self._client.fetch_state()["optimizer"]
        for name, param in self._params.items():
            if fetched.get(name):
                self._optimizer.state[param] = {
                    # Step counts stay on the CPU, as torch has them.
                    key: value.to(param.device) if isinstance(value, Tensor) and value.dim() else value
                    for key, value in fetched[name].items()
                }

    def upload(self, server_state: Mapping[str, Any] | None = None) -> None:
        """Load this rank's parameters and optimizer state into the servers. Blocks.

        ``server_state``: what ``fetch_server_state`` returned; default: the servers keep theirs.
        """
        if server_state is None:
            server_state = self.fetch_server_state()
        states = self._optimizer.state
        params = {name: param.detach() for name, param in self._params.items()}
        kept = {name: dict(states[param]) for name, param in self._params.items() if param in states}
        self._client.load_state({**server_state, "params": params, "optimizer": kept})

    def fetch_server_state(self) -> dict[str, Any]:
        """The servers' state without parameters and optimizer state: clocks, versions, the policy's tensors. Blocks."""
        return {key: value for key, value in self._client.fetch_state().items() if key not in HELD_BY_USER}

    def _on_load(self) -> None:
        ignored, self.ignore_next_load = self.ignore_next_load, False
        self._loaded = not ignored
        if self._uploads and not ignored:
            self.upload()

    def take_loaded(self) -> bool:
        """Whether the user has loaded a state since the last call. All ranks load at the same point."""
        loaded, self._loaded = self._loaded, False
        return loaded

    def release(self) -> None:
        """Remove the hooks."""
        for remove in self._removers:
            remove()
