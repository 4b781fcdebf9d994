"""The training script of bench_survive.py: deterministic in float64, and it writes down what it has trained on.

Each worker appends a line to a file of its own for every backward: the step, the epoch of the membership, its samples,
and whether the step was discarded. The first worker of the last step writes the final parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

import gradsync

NUM_SAMPLES = 240
BATCH = 24
WIDTH = 64


class Indexed(torch.utils.data.Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Random samples from a seed, each with its number."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64)
        self.y = torch.randn(num_samples, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.x[index], self.y[index]


def make_model() -> torch.nn.Module:
    """The same weights in every run."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)]
    return torch.nn.Sequential(*layers).double()


class Place:
    """The step that is under way, and the number of the members. Asks for them only when the members have changed."""

    def __init__(self, sync: gradsync.Synchronizer) -> None:
        self._sync = sync
        self._has_changed = True
        self._step = self._members = 0
        sync.on_new_epoch(self._on_new_epoch)

    def begin_step(self) -> tuple[int, int]:
        if self._has_changed:
            self._has_changed = False
            stats = self._sync.stats()
            self._step, self._members = stats["step"], stats.get("elastic", {}).get("epoch", 0)
        return self._step + 1, self._members

    def end_step(self) -> None:
        self._step += not self._sync.discarded

    def _on_new_epoch(self, _: object) -> None:
        self._has_changed = True


def main() -> None:
    """Train, and write what was trained into the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--strategy", default="allreduce")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.05)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=10**6)
    loader = gradsync.shard(Indexed(NUM_SAMPLES), global_batch_size=BATCH, seed=3)
    sync = gradsync.synchronize(model, optimizer, options.strategy, scheduler=schedule)
    uid = json.loads(os.environ["GRADSYNC_ELASTIC"])["uid"] if "GRADSYNC_ELASTIC" in os.environ else f"{sync.rank}.0"
    (options.folder / f"ready.{uid}").write_text(str(os.getpid()))
    log = open(options.folder / f"steps.{uid}", "a", buffering=1)  # noqa: SIM115 - for the life of the process
    place = Place(sync)
    for _ in range(options.epochs):
        for index, x, y in loader:
            number, members = place.begin_step()
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            time.sleep(options.step_s)
            loss.backward()
            line = {"step": number, "members": members, "at_s": time.time()}
            line |= {"discarded": True} if sync.discarded else {"samples": index.tolist()}
            log.write(json.dumps(line) + "\n")
            optimizer.step()
            schedule.step()
            place.end_step()
    if sync.rank == 0:
        torch.save({"model": model.state_dict(), "lr": schedule.get_last_lr()}, options.folder / "final.pt")
    (options.folder / f"stats.{uid}").write_text(json.dumps(sync.stats().get("elastic", {})))
    sync.close()


if __name__ == "__main__":
    main()
