"""A synchronizer's state: in a torch.distributed.checkpoint, in one file for all ranks, in a file of another rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import gradsync
from gradsync.comm import Communicator
from gradsync.testing import run_ranks
from tests.support.ranks import run_processes

STRATEGIES = (
    "allreduce",
    "allreduce(codec=int8)",
    "allreduce(codec=topk(density=0.1))",
    "allreduce(codec=dgc(density=0.1))",
    "allreduce(reducer=compressed(codec=int8, feedback='ef21'))",
    "allreduce(reducer=powersgd(rank=1))",
    "allreduce(reducer=powersgd(rank=1, alternating=True))",
    "onebit_adam(warmup_steps=3)",
    "sharded",
    "sharded(codec=int8)",
    "local_sgd(every=2, codec=int8)",
    "diloco(every=4, overlap=2, fragments=2, codec=int8)",  # at step 7 a fragment is under way
    "gossip",
    "gossip(topology=ring, codec=int8)",
    "parameter_server(codec=int8)",
)
STOP, END = 7, 12


class Run:
    """A model in training, each rank on data of its own."""

    def __init__(self, strategy: str, comm: Communicator, *, accumulate: int = 1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sync = gradsync.synchronize(
            self.model, self.optimizer, strategy, comm=comm, accumulate=accumulate, bucket_bytes=8000
        )

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            self.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step * 100 + self.sync.rank)
            x = torch.randn(16, 8, generator=generator)
            (self.model(x) - x[:, :2]).square().mean().backward()
            self.optimizer.step()

    def params(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]

    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds; the optimizer's state is a rank's own where ranks step alone."""
        optimizer = _Optimizer(self.optimizer, self.sync)
        return {"model": self.model, "sync": self.sync, f"optimizer.{self.sync.rank}": optimizer}


class _Optimizer:
    """An optimizer whose state has all its keys before the first step, as torch's own helper makes it."""

    def __init__(self, optimizer: torch.optim.Optimizer, sync: gradsync.Synchronizer) -> None:
        self.optimizer = optimizer
        self.sync = sync

    def state_dict(self) -> dict[str, Any]:
        whole = self.sync.optimizer_state_dict(dst=None)
        for number, param in enumerate(self.optimizer.param_groups[0]["params"]):
            zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            whole["state"].setdefault(number, {"step": torch.tensor(0.0), **zeros})
        return whole

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state["state"] = {int(key): value for key, value in state["state"].items()}
        self.optimizer.load_state_dict(state)


def resume(folder: str, strategies: tuple[str, ...]) -> dict[str, list[list[Tensor]]]:
    """For each strategy the parameters of a run that never stopped, and of one that went on from a checkpoint."""
    dist.init_process_group("gloo")
    outcome = {}
    comm = gradsync.connect(timeout_s=30)
    for number, strategy in enumerate(strategies):
        path = f"{folder}/{number}"
        whole = Run(strategy, comm)
        whole.train(0, STOP)
        dcp.save(whole.parts(), checkpoint_id=path)
        whole.train(STOP, END)
        whole.sync.close()
        rest = Run(strategy, comm)
        dcp.load(rest.parts(), checkpoint_id=path)
        rest.train(STOP, END)
        rest.sync.close()
        outcome[strategy] = [whole.params(), rest.params()]
    dist.destroy_process_group()
    return outcome


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoint_resumes_bit_for_bit(tmp_path: Path) -> None:
    for outcome in run_processes(2, resume, str(tmp_path), STRATEGIES, timeout_s=120):
        for strategy, (whole, rest) in outcome.items():
            assert all(torch.equal(a, b) for a, b in zip(whole, rest, strict=True)), strategy


def save_with_distributed_checkpoint(folder: str, strategy: str) -> list[Tensor]:
    dist.init_process_group("gloo")
    run = Run(strategy, gradsync.connect(timeout_s=30))
    run.train(0, STOP)
    dcp.save({"model": run.model, "sync": run.sync}, checkpoint_id=folder)
    run.sync.close()
    dist.destroy_process_group()
    return list(residuals(run.sync.state_dict()).values())


def load_with_distributed_checkpoint(folder: str, strategy: str) -> str:
    dist.init_process_group("gloo")
    run = Run(strategy, gradsync.connect(timeout_s=30))
    try:
        dcp.load({"model": run.model, "sync": run.sync}, checkpoint_id=folder)
    except BaseException as error:  # torch's has no base class but this
        return str(error)
    finally:
        run.sync.close()
        dist.destroy_process_group()
    return ""


def residuals(state: dict[str, Any]) -> dict[str, Tensor]:
    (own,) = state["own"].values()
    found: dict[str, Tensor] = own["strategy_state"]["reducer"]["own"]["residuals"]
    return found


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoint_goes_to_another_number_of_ranks(tmp_path: Path) -> None:
    strategy, folder = "allreduce(codec=int8)", str(tmp_path / "checkpoint")
    before = run_processes(2, save_with_distributed_checkpoint, folder, strategy)
    (fewer,) = run_processes(1, load_with_distributed_checkpoint, folder, strategy)
    assert re.search("rank 0 of 2.*gather_state_dict", fewer, re.DOTALL)
    assert all("own.rank2" in error for error in run_processes(3, load_with_distributed_checkpoint, folder, strategy))
    dcp_to_torch_save(folder, tmp_path / "one_file.pt")  # as docs/how_to/checkpoints.md says
    saved = torch.load(tmp_path / "one_file.pt")

    def go(comm: Communicator) -> list[Tensor]:
        run = Run(strategy, comm)
        run.sync.load_state_dict(saved["sync"])
        assert run.sync.stats()["step"] == STOP
        run.sync.close()
        return list(residuals(run.sync.state_dict()).values())

    (alone,) = run_ranks(1, go)
    assert all(torch.equal(a + b, c) for a, b, c in zip(*before, alone, strict=True))
    assert any(total.any() for total in alone)
    for rank, kept in enumerate(run_ranks(3, go)):
        expected = before[rank] if rank < 2 else [torch.zeros_like(value) for value in before[0]]
        assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in ("allreduce", "sharded")])
def test_state_of_rank_0_alone_is_refused_on_other_ranks(strategy: str) -> None:
    """As accelerate's register_for_checkpointing saves it: only the main process's state, for all ranks."""
    saved: dict[int, Any] = {}

    def save(comm: Communicator) -> None:
        run = Run(strategy, comm)
        run.train(0, STOP)
        saved[comm.rank] = run.sync.state_dict()
        run.sync.close()

    def load(comm: Communicator) -> str:
        run = Run(strategy, comm)
        try:
            if comm.rank == 1:
                run.sync.load_state_dict(saved[0])
            return ""
        except ValueError as error:
            return str(error)
        finally:
            run.sync.close()

    run_ranks(2, save)
    assert re.search("rank 0 of 2.*this is rank 1 of 2.*gather_state_dict", run_ranks(2, load)[1])


def test_exact_state_of_rank_0_is_good_for_all() -> None:
    def go(comm: Communicator) -> int:
        run = Run("allreduce", comm)
        run.sync.load_state_dict(saved)
        run.sync.close()
        return int(run.sync.stats()["step"])

    def save(comm: Communicator) -> dict[str, Any]:
        run = Run("allreduce", comm)
        run.train(0, STOP)
        run.sync.close()
        return run.sync.state_dict()

    saved = run_ranks(2, save)[0]
    assert run_ranks(3, go) == [STOP] * 3


def test_state_saved_within_an_accumulation_is_each_ranks_own() -> None:
    def save(comm: Communicator) -> dict[str, Any]:
        run = Run("allreduce", comm, accumulate=2)
        run.train(0, 3)
        state = run.sync.state_dict()
        run.sync.close()
        return state

    def load(state: Callable[[int], Any]) -> Callable[[Communicator], bool]:
        def go(comm: Communicator) -> bool:
            run = Run("allreduce", comm, accumulate=2)
            try:
                run.sync.load_state_dict(state(comm.rank))
                run.train(3, 4)
                return run.sync.synchronized
            finally:
                run.sync.close()

        return go

    saved = run_ranks(2, save)
    assert run_ranks(2, load(lambda rank: saved[rank])) == [True, True]
    assert run_ranks(2, load(lambda rank: saved)) == [True, True]
    with pytest.raises(ValueError, match="rank 0 of 2"):
        run_ranks(2, load(lambda rank: saved[0]))
    with pytest.raises(ValueError, match="within an accumulation, by 2 ranks"):
        run_ranks(3, load(lambda rank: saved))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_has_its_keys_and_shapes_before_the_first_step(strategy: str) -> None:
    def shapes(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shapes(item) for key, item in value.items()}
        return tuple(value.shape) if isinstance(value, Tensor) else None

    def go(comm: Communicator) -> None:
        run = Run(strategy, comm)
        before = shapes(run.sync.state_dict())
        run.train(0, STOP)
        assert shapes(run.sync.state_dict()) == before
        run.sync.close()

    run_ranks(2, go)


def test_state_of_version_2_is_converted() -> None:
    def go(comm: Communicator) -> None:
        run = Run("allreduce(codec=int8)", comm)
        run.train(0, STOP)
        engine, state = run.sync._engine, run.sync.state_dict()
        old = {
            "version": 2,
            "rank": comm.rank,
            "world_size": 2,
            "strategy": state["strategy"],
            "strategy_state": engine.strategy.state_dict(),
            **engine.state_dict(),
        }
        run.sync.load_state_dict(old)
        again = residuals(run.sync.state_dict())
        assert all(torch.equal(value, again[name]) for name, value in residuals(state).items())
        with pytest.raises(ValueError, match="version 3; got 1"):
            run.sync.load_state_dict({**old, "version": 1})
        with pytest.raises(ValueError, match="empty list"):
            run.sync.load_state_dict([])
        with pytest.raises(ValueError, match="dst must be a rank, 0 to 1"):
            run.sync.gather_state_dict(dst=2)
        run.sync.close()

    run_ranks(2, go)


MODEL_BYTES = 16 << 20


def gather_big_residuals(dst: int | None) -> tuple[list[str], int]:
    """The ranks whose residuals were gathered here, and how much the memory of this process grew meanwhile at most."""
    model = nn.Linear(2048, MODEL_BYTES // 4 // 2048, bias=False)
    sync = gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), "allreduce(codec=int8)")
    model(torch.ones(1, 2048) * (1 + sync.rank)).square().mean().backward()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _memory("VmRSS")
    gathered = sync.gather_state_dict(dst)
    grown = _memory("VmHWM") - before
    sync.close()
    return list(gathered.get("own", {})), grown


def _memory(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def test_gathering_costs_only_the_saver_memory() -> None:
    saver, *others = run_processes(4, gather_big_residuals, 0)
    assert saver[0] == ["rank0", "rank1", "rank2", "rank3"]
    for owners, grown in others:
        assert owners == []
        assert grown < 2.5 * MODEL_BYTES, "a copy of its own state, and one on its way"


def test_gathering_to_all_gives_all_the_same() -> None:
    assert [owners for owners, _ in run_processes(2, gather_big_residuals, None)] == [["rank0", "rank1"]] * 2
