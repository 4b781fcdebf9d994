"""Values mix to the right mean on any graph, in any dtype, and with codecs."""

from __future__ import annotations

import pytest
import torch

from gradsync import spec
from gradsync.comm import Communicator
from gradsync.testing import run_ranks
from tests.strategies.gossip.trial import Lopsided, Trial, mixed


def test_exponential_topology_is_exact_after_log2_steps() -> None:
    start, ends, _ = mixed(4, "gossip", 2)
    for values in ends:
        torch.testing.assert_close(values, start.mean(0), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [("gossip(topology=ring)", 40), ("gossip(topology=random)", 40), ("gossip(topology=test_lopsided)", 60)],
)
def test_push_sum_converges_to_the_mean(strategy: str, steps: int) -> None:
    start, ends, stats = mixed(5, strategy, steps)
    for values, of_rank in zip(ends, stats, strict=True):
        torch.testing.assert_close(values, start.mean(0), rtol=0, atol=1e-6)
        assert of_rank["consensus"]["rms"] < 1e-5
    total = sum(of_rank["push_sum_weight"] for of_rank in stats)
    assert total == pytest.approx(5, abs=1e-12)
    if "lopsided" in strategy:  # without weights the third member would count for more
        assert max(of_rank["push_sum_weight"] for of_rank in stats) > 1.1


def test_push_sum_on_a_directed_graph_matches_the_mixing_matrix() -> None:
    world, steps = 4, 3
    start, ends, stats = mixed(world, "gossip(topology=test_lopsided)", steps)
    column = torch.zeros(world, world, dtype=torch.float64)  # column p: what p's values become
    for place in range(world):
        targets = Lopsided().targets(place, world, 0)
        for to in [place, *targets]:
            column[to, place] = 1 / (len(targets) + 1)
    x, weight = start.clone(), torch.ones(world, 1, dtype=torch.float64)
    for _ in range(steps):
        x, weight = column @ x, column @ weight
    torch.testing.assert_close(torch.stack(ends), x / weight, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        torch.tensor([of_rank["push_sum_weight"] for of_rank in stats], dtype=torch.float64), weight[:, 0]
    )


def test_push_sum_counts_all_optimizer_steps_alike() -> None:
    """The mean moves by the mean of what the ranks' optimizers do, however much weight each has."""

    def run(comm: Communicator) -> float:
        trial = Trial(comm, "gossip(topology=test_lopsided)", torch.zeros(1, dtype=torch.float64))
        trial.optimizer.param_groups[0]["lr"] = float(comm.rank)  # the gradient is 1
        with trial.sync:
            trial.step(10)
            trial.sync.settle()
            return float(trial.values)

    assert run_ranks(4, run) == [pytest.approx(-10 * 1.5, abs=1e-12)] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_push_sum_keeps_the_mean_of_narrow_dtypes(dtype: torch.dtype) -> None:
    start, ends, _ = mixed(3, "gossip(topology=ring)", 30, numel=200, dtype=dtype)
    expected = start.to(dtype).double().mean(0)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for values in ends:
        torch.testing.assert_close(values.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("codec", ["int8", "sign", "topk(density=0.1)", "randomk(density=0.25, unbiased=True)"])
def test_choco_keeps_the_mean_and_converges(codec: str) -> None:
    rule = "{'weight': " + codec + "}"
    start, ends, stats = mixed(3, f"gossip(topology=ring, codec={rule})", 50, numel=256)
    mean = torch.stack(ends).mean(0)
    torch.testing.assert_close(mean, start.mean(0), rtol=0, atol=1e-12)
    for values, of_rank in zip(ends, stats, strict=True):
        assert float((values - mean).square().mean().sqrt()) < 0.1, "it began at 1"
        assert of_rank["codecs"] == {"weight": spec.render(spec.parse(codec, "codec"))}
        assert of_rank["bytes_sent"] < 50 * 2 * 256 * 8 * 0.2
