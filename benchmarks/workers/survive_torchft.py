"""The training of survive.py with torchft 0.2: one worker is one replica group, as in torchft's own example.

``python survive_torchft.py FOLDER --supervise 4 ...`` starts a lighthouse and four workers, and each worker that dies
again. Each worker appends a line for every step: its samples, and whether the step was discarded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.workers.survive import BATCH, NUM_SAMPLES, Indexed, make_model

LIGHTHOUSE = "127.0.0.1:29561"
# Soon to give up a dead replica: with its defaults (5 s, 60 s) each loss would take that long.
SETTINGS = [
    "--min_replicas",
    "1",
    "--quorum_tick_ms",
    "50",
    "--join_timeout_ms",
    "1000",
    "--heartbeat_timeout_ms",
    "1000",
]
LIMIT = timedelta(seconds=10)


def supervise(options: argparse.Namespace) -> int:
    """Run the lighthouse and the workers until all steps are done; returns the exit code."""
    binary = Path(sys.executable).parent / "torchft_lighthouse"
    lighthouse = subprocess.Popen([str(binary), *SETTINGS, "--bind", LIGHTHOUSE])
    started = [0] * options.supervise
    workers: dict[int, subprocess.Popen[bytes]] = {}
    try:
        while True:
            for slot in range(options.supervise):
                code = workers[slot].poll() if slot in workers else -1
                if code == 0:
                    return 0  # the first to finish ends it: a newcomer would wait for a quorum of itself
                if code is not None:
                    uid = f"{slot}.{started[slot]}"
                    started[slot] += 1
                    command = [sys.executable, __file__, str(options.folder), "--uid", uid, *_own(options)]
                    workers[slot] = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
            time.sleep(0.02)
    finally:
        for process in (*workers.values(), lighthouse):
            process.kill()
            process.wait()


def _own(options: argparse.Namespace) -> list[str]:
    return ["--epochs", str(options.epochs), "--step-s", str(options.step_s), "--workers", str(options.supervise)]


def train(options: argparse.Namespace) -> None:
    """Be one worker."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    slot = int(options.uid.partition(".")[0])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica_{slot}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{LIGHTHOUSE}",
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        connect_timeout=LIMIT,
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    samples = Indexed(NUM_SAMPLES)
    sampler = DistributedSampler(samples, slot, options.workers, group_rank=0, num_replicas=1, shuffle=True, seed=3)
    loader = torch.utils.data.DataLoader(samples, batch_size=BATCH // options.workers, sampler=sampler)
    log = open(options.folder / f"steps.{options.uid}", "a", buffering=1)  # noqa: SIM115 - for the life of the process
    total = options.epochs * NUM_SAMPLES // BATCH
    epoch, is_ready = 0, False
    while manager.current_step() < total:
        sampler.set_epoch(epoch)
        for index, x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(parallel(x), y)
            time.sleep(options.step_s)
            loss.backward()
            before = manager.current_step()
            optimizer.step()
            if not is_ready:
                (options.folder / f"ready.{options.uid}").write_text(str(os.getpid()))
                is_ready = True
            line = {"step": manager.current_step(), "epoch": epoch, "samples": index.tolist(), "at_s": time.time()}
            line["discarded"] = manager.current_step() == before or not manager.is_participating()
            log.write(json.dumps(line) + "\n")
            if manager.current_step() >= total:
                break
        epoch += 1
    os._exit(0)  # its threads may wait for others


def main() -> None:
    """Supervise, or be one worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--supervise", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--uid", default="0.0")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.05)
    options = parser.parse_args()
    if options.supervise:
        sys.exit(supervise(options))
    train(options)


if __name__ == "__main__":
    main()
