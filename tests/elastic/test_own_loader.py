"""Elastic runs whose script deals its own batches: members then change at the first gradient of a backward."""

from __future__ import annotations

import json
from pathlib import Path

from tests.elastic.test_survive import END_S, environment
from tests.support.launching import GRADSYNC, Launched

SCRIPT = """
import json, os, signal, sys, time
import torch, gradsync

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sync = gradsync.synchronize(model, optimizer)
uid = json.loads(os.environ["GRADSYNC_ELASTIC"])["uid"]
empty = []
while sync.stats()["step"] < 60:
    optimizer.zero_grad()
    model(torch.randn(6, 4)).square().mean().backward()
    if not sync.discarded:
        empty += [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    optimizer.step()
    time.sleep(0.03)
    if uid == "1.0" and sync.stats()["step"] == 8:
        os.kill(os.getpid(), signal.SIGTERM)
open(f"empty.{uid}", "w").write(json.dumps([empty, sync.world_size]))
"""


def test_first_gradient_of_the_backward_in_which_members_change_is_kept(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [*GRADSYNC, "run", "--elastic", "-n", "3", "--timeout-s", "20", "train.py"]
    with open(tmp_path / "log", "w") as log:
        process = Launched(command, cwd=tmp_path, env=environment(), stdout=log, stderr=log, text=True)
    with process:
        assert process.wait(END_S) == 0, (tmp_path / "log").read_text()
    found = [json.loads(path.read_text()) for path in tmp_path.glob("empty.*")]
    assert found == [[[], 2], [[], 2]], (tmp_path / "log").read_text()
