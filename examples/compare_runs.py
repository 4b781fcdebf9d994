"""Compare two logs of char_lm.py: were they the same training, and which was faster?

    python examples/compare_runs.py one.json two.json

Ends with a code other than 0 if the losses do not agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

# Two workers add the same numbers in another order. Float32 rounds those sums differently, and training amplifies it
# a little with each step; a wrong average is off by tenths within ten steps.
TOLERANCE = 0.001


def name_of(log: dict[str, Any]) -> str:
    return "one process" if log["world_size"] == 1 else f"{log['world_size']} workers"


def samples_per_s(log: dict[str, Any]) -> float:
    return float(log["batch"] / statistics.median(log["step_s"]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare two logs of char_lm.py.")
    parser.add_argument("logs", type=Path, nargs=2, help="files that char_lm.py --json wrote")
    first, second = (json.loads(path.read_text()) for path in parser.parse_args().logs)
    if len(first["losses"]) != len(second["losses"]) or first["batch"] != second["batch"]:
        sys.exit("expected two runs of the same --steps and --batch; got different ones. Run both with the same.")

    gaps = [abs(a - b) for a, b in zip(first["losses"], second["losses"], strict=True)]
    gaps.append(abs(first["eval_loss"] - second["eval_loss"]))
    gap = max(gaps)
    agree = all(gap <= TOLERANCE for gap in gaps)  # not max(gaps): a loss that is not a number agrees with nothing

    names, speeds = [name_of(log) for log in (first, second)], [samples_per_s(log) for log in (first, second)]
    print(f"The same training: {len(first['losses'])} steps on the same {first['batch']} samples each.")
    for name, log in zip(names, (first, second), strict=True):
        print(f"  {name:<12} loss {log['losses'][0]:.4f} -> {log['losses'][-1]:.4f}, held-out {log['eval_loss']:.4f}")
    print(f"  largest difference along the whole curve: {gap:.6f} ({'agrees' if agree else 'DOES NOT AGREE'})")
    print("The speed (median step):")
    for name, speed in zip(names, speeds, strict=True):
        print(f"  {name:<12} {speed:6.1f} samples/s")
    print(f"  {names[1]} are {speeds[1] / speeds[0]:.2f} times as fast as {names[0]}.")
    if not agree:
        sys.exit(f"The losses must agree within {TOLERANCE}; got a difference of {gap:.6f}.")


if __name__ == "__main__":
    main()
