"""A training script for tests of elastic runs: it kills itself where it is told to, and writes down what it trained.

``python trained.py FOLDER '{"kills": [["1.0", 3, "hook"]], ...}'``: worker 1 dies in the backward of its third step.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import gradsync
from gradsync.elastic.session import Change
from gradsync.engine.survival import Survival
from gradsync.integrations.prometheus import Prometheus
from gradsync.profiling import set_recording

ARGUMENTS = sys.argv[1:] if __name__ == "__main__" else ["."]  # tests import its data and its model
FOLDER = Path(ARGUMENTS[0])
OPTIONS: dict[str, Any] = {
    "kills": [],  # [uid, number, phase]: at this worker's n-th step, or call
    "strategy": "allreduce",
    "epochs": 3,
    "samples": 60,
    "accumulate": 1,
    "model": "mlp",  # "cnn": with SyncBatchNorm
    "block": False,  # the body of a step is in `with sync.step():`
    "record": False,  # into files, and for Prometheus
    "twice": False,  # the body has a second synchronizing backward
    "windows": False,  # a block holds all batches of an accumulation
    "step_s": 0.0,
    "amp": False,
    "dropout": 0.0,
    "mirror": False,
    "residuals": False,  # write them down after every step, and after every change of the members
    "on_partition": "pause",
    "skips_barrier": None,  # [uid, number]
    "hold_at": None,  # from this step on it trains slowly, until there is a file FOLDER/go
    "settle": False,  # at the end
    "optimizer": "adamw",
    "norm": False,  # a BatchNorm in the model
    "slow": {},  # uid: seconds that this worker sleeps longer in each step
    **json.loads(ARGUMENTS[1] if len(ARGUMENTS) > 1 else "{}"),
}
HOLD_S = 0.2
UID = json.loads(os.environ["GRADSYNC_ELASTIC"])["uid"] if "GRADSYNC_ELASTIC" in os.environ else "0.0"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_told_to_die(step: int, phase: str) -> bool:
    return [UID, step, phase] in OPTIONS["kills"]


def kill_in(module: str, name: str, phase: str) -> None:
    """Die when a function of gradsync is called that a worker runs while it joins or goes on."""
    if not any(kill[0] == UID and kill[2] == phase for kill in OPTIONS["kills"]):
        return
    owner: Any = importlib.import_module(module)
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    monitored = getattr(owner, name)
    calls = {"num": 0}

    def call(*args: Any, **kwargs: Any) -> Any:
        calls["num"] += 1
        if is_told_to_die(calls["num"], phase):
            if phase == "connecting":
                time.sleep(0.02)  # the others have begun to connect
            die()
        return monitored(*args, **kwargs)

    setattr(owner, name, call)


def skip_barrier() -> None:
    """At this worker's n-th end of an epoch of the data: go on as if all had come, when the worker that dies is dead.

    So it is when the others' part in the barrier has reached this worker, and its own has not reached them.
    """
    before_end = Survival.before_end
    calls = {"num": 0}

    def skipping(survival: Survival) -> None:
        calls["num"] += 1
        if [UID, calls["num"]] != OPTIONS["skips_barrier"]:
            before_end(survival)
            return
        victim = int((FOLDER / f"at.{OPTIONS['kills'][0][0]}").read_text().split()[1])
        while Path(f"/proc/{victim}").exists() and " Z " not in Path(f"/proc/{victim}/stat").read_text():
            time.sleep(0.01)
        time.sleep(0.3)

    Survival.before_end = skipping  # type: ignore[method-assign]


class Samples(torch.utils.data.Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(OPTIONS["samples"], 8, generator=generator, dtype=torch.float64)
        self.y = self.x.sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.x[index], self.y[index]


def make_model() -> torch.nn.Module:
    torch.manual_seed(1)
    if OPTIONS["model"] == "cnn":  # a bias before the normalization would have no gradient but rounding errors
        layers = [
            torch.nn.Unflatten(1, (1, 2, 4)),
            torch.nn.Conv2d(1, 4, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(4),
            torch.nn.Tanh(),
            torch.nn.Conv2d(4, 4, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(4),
            torch.nn.Flatten(),
            torch.nn.Linear(32, 1),
        ]
        return gradsync.SyncBatchNorm.convert(torch.nn.Sequential(*layers).double())
    norm = [torch.nn.BatchNorm1d(40)] if OPTIONS["norm"] else []
    layers = [
        torch.nn.Linear(8, 40),
        *norm,
        torch.nn.Tanh(),
        torch.nn.Dropout(OPTIONS["dropout"]),
        torch.nn.Linear(40, 1),
    ]
    return torch.nn.Sequential(*layers).double()


def keep_residuals(sync: gradsync.Synchronizer, when: str) -> None:
    """Save this worker's residuals under the step that they are of."""
    if OPTIONS["residuals"]:
        (own,) = sync.state_dict()["own"].values()
        path = FOLDER / f"residuals.{when}.{sync.stats()['step']}.{UID}"
        torch.save(own.get("strategy_state", {}).get("reducer", {}).get("own", {}), path)


def main() -> None:
    torch.set_num_threads(1)
    kill_in("gradsync.elastic.recovery", "copy_training_state", "healing")
    kill_in("gradsync.elastic.session", "connect_members", "connecting")
    kill_in("gradsync.strategies.periodic.exchange", "WeightExchange.reduce", "exchange")
    kill_in("gradsync.strategies.periodic.exchange", "WeightExchange.commit", "commit")
    kill_in("gradsync.strategies.periodic.exchange", "WeightExchange.settle", "settle")
    if OPTIONS["record"]:
        set_recording(folder=FOLDER / "records")
    kill_in("gradsync.engine.survival", "Survival.before_end", "end")
    if OPTIONS["skips_barrier"] is not None:
        skip_barrier()
    if OPTIONS["strategy"] == "diverging":
        from tests.support import diverging  # here: importing it registers a strategy

        diverging.folder, diverging.uid = FOLDER, UID
    model = make_model()
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = kinds[OPTIONS["optimizer"]](model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=100_000)
    loader = gradsync.shard(Samples(), global_batch_size=12, seed=2)
    sync = gradsync.synchronize(
        model,
        optimizer,
        OPTIONS["strategy"],
        scheduler=schedule,
        accumulate=OPTIONS["accumulate"],
        mirror_residuals=OPTIONS["mirror"],
        on_partition=OPTIONS["on_partition"],
    )
    sync.on_new_epoch(lambda change: keep_residuals(sync, f"epoch{change.epoch}"))
    metrics = Prometheus(port=0) if OPTIONS["record"] else None
    if metrics is not None:
        sync.record.on_step(metrics)
    step = number = 0  # of the run, and of this worker

    def on_change(change: Change) -> None:
        (FOLDER / f"change.{UID}").write_text(json.dumps([change.epoch, change.num_members, change.history]))

    sync.on_new_epoch(on_change)

    def die_in(phase: str) -> None:
        if is_told_to_die(number, phase):
            die()

    middle = model[4 if OPTIONS["model"] == "cnn" else 0]
    list(middle.parameters())[-1].register_post_accumulate_grad_hook(lambda _: die_in("hook"))
    middle.register_forward_pre_hook(lambda *_: die_in("in_forward"))
    log = open(FOLDER / f"steps.{UID}", "a", buffering=1)  # noqa: SIM115 - for the life of the process
    samples: list[int] = []  # of the step under way

    def begin() -> None:
        nonlocal step, number
        step, number = sync.stats()["step"] + 1, number + 1
        (FOLDER / f"written.{UID}").write_text(f"{step} {os.getpid()}")
        os.replace(FOLDER / f"written.{UID}", FOLDER / f"at.{UID}")  # tests read it at any time
        die_in("forward")
        if is_told_to_die(number, "stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if is_told_to_die(number, "leave"):
            os.kill(os.getpid(), signal.SIGTERM)

    def backward(index: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        loss = torch.nn.functional.mse_loss(model(x), y)
        time.sleep(OPTIONS["step_s"] + OPTIONS["slow"].get(UID, 0.0))
        if OPTIONS["hold_at"] is not None and step >= OPTIONS["hold_at"] and not (FOLDER / "go").exists():
            time.sleep(HOLD_S)
        loss.backward()
        samples.extend(index.tolist())

    def apply() -> None:
        if not sync.discarded:
            keep_residuals(sync, "step")
            epoch = sync.stats().get("elastic", {}).get("epoch", 0)
            log.write(json.dumps({"step": step, "samples": samples, "epoch": epoch}) + "\n")
        die_in("backward")
        optimizer.step()
        die_in("step")

    def block() -> contextlib.AbstractContextManager[object]:
        samples.clear()
        return sync.step() if OPTIONS["block"] else contextlib.nullcontext()

    for _ in range(OPTIONS["epochs"]):
        if OPTIONS["windows"]:
            batches: Iterator[Any] = iter(loader)
            while True:
                with block():
                    for batch in itertools.islice(batches, OPTIONS["accumulate"]):
                        if not samples:
                            begin()
                            optimizer.zero_grad()
                        backward(*batch)
                    if samples:
                        apply()
                if not samples and not sync.discarded:
                    break
                schedule.step()
            continue
        for batch in loader:
            with block():
                begin()
                optimizer.zero_grad()
                backward(*batch)
                if OPTIONS["twice"]:
                    backward(*batch)
                apply()
            schedule.step()
    if OPTIONS["settle"]:
        sync.settle()
    state = {"model": model.state_dict(), "lr": schedule.get_last_lr(), "steps": sync.stats()["step"]}
    torch.save(state, FOLDER / f"final.{UID}")
    if metrics is not None:
        url = f"http://127.0.0.1:{metrics.port}/metrics"
        (FOLDER / f"metrics.{UID}").write_bytes(urllib.request.urlopen(url, timeout=10).read())
    stats = sync.stats()
    own = {name: stats[name] for name in ("exchanges", "next_exchange", "late") if name in stats}
    (FOLDER / f"stats.{UID}").write_text(json.dumps({**stats.get("elastic", {}), **own}))


if __name__ == "__main__":
    main()
