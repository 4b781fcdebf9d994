"""Ranks whose sets of names have other orders: separately started processes, each with its own seed of str hashes."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.support.launch import rank_environments
from gradsync.testing import run_commands

SCRIPT = """
import hashlib, torch
from torch import nn
import gradsync

STRATEGIES = (
    "allreduce", "allreduce(codec=int8)", "allreduce(codec=topk)", "allreduce(reducer=powersgd)",
    "allreduce(reducer=adasum)", "sharded", "local_sgd(every=2)", "diloco(every=2)",
)
print("order", list({f"name{number}" for number in range(20)}))  # the only line that differs
for strategy in STRATEGIES:
    torch.manual_seed(0)
    model = nn.ModuleDict({f"layer{number}": nn.Linear(40, 40) for number in range(5)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with gradsync.synchronize(model, optimizer, strategy, bucket_bytes=9000) as sync:
        for step in range(4):
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(10 * step + sync.rank))
            for number, layer in enumerate(model.values()):
                x = layer(x).relu() if number != step else x  # each step leaves one of them unused
            optimizer.zero_grad()
            x.square().mean().backward()
            optimizer.step()
        saved = sync.optimizer_state_dict(dst=None)
        sync.state_dict()
    values = [*model.state_dict().values()]
    if strategy in ("allreduce", "sharded"):
        values += [each["exp_avg"] for each in saved["state"].values()]
    bits = b"".join(value.numpy().tobytes() for value in values)
    print(strategy, hashlib.sha256(bits).hexdigest())
"""


def test_ranks_agree_whatever_the_order_of_their_sets(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environments = [{**env, "PYTHONHASHSEED": env["RANK"]} for env in rank_environments(2)]
    outputs = run_commands([[sys.executable, str(script)]] * 2, envs=environments, timeout_s=150, capture=True)
    (order, *lines), (other_order, *other_lines) = (output.splitlines() for output in outputs)
    assert order != other_order
    assert len(lines) == 8
    assert lines == other_lines
