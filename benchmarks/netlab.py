"""The lab of ``gradsync.testing`` from a shell: each command gets torchrun's environment variables for its host.

python benchmarks/netlab.py run --hosts 2 --rate 1gbit -- python train.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gradsync.testing import Lab, LabError, lab_unavailable_reason, run_commands
from gradsync.testing.network import INTERFACE, MASTER_PORT

__all__ = ["INTERFACE", "MASTER_PORT", "Lab", "LabError", "lab_unavailable_reason", "main", "run_commands"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command on every host of a lab."""
    parser = argparse.ArgumentParser(description="Hosts made of network namespaces, on links of a chosen rate.")
    run = parser.add_subparsers(required=True).add_parser("run", help="run a command on every host")
    run.add_argument("--hosts", type=int, default=2, help="how many (default: 2)")
    run.add_argument("--rate", help='of each link, as tc writes it: "1gbit" (default: unlimited)')
    run.add_argument("--timeout-s", type=float, default=3600.0, help="end all after this time (default: 3600)")
    run.add_argument("command", nargs="+", help="{rank} becomes the host's number, {addr} its address")
    options = parser.parse_args(arguments)
    try:
        with Lab(hosts=options.hosts, rate=options.rate) as lab:
            commands = [
                [word.replace("{rank}", str(h)).replace("{addr}", lab.address(h)) for word in options.command]
                for h in range(options.hosts)
            ]
            lab.run(commands, timeout_s=options.timeout_s)
            for host in range(options.hosts):
                print(f"host {host} sent {lab.bytes_sent(host):,} bytes", file=sys.stderr)
    except (LabError, ValueError) as error:
        sys.exit(f"netlab: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
