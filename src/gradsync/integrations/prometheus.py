"""Step records for Prometheus: an HTTP endpoint by the standard library's server, in a thread."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from gradsync.profiling.record import PARTS, Change, StepRecord

LOOPBACK = "127.0.0.1"
CHANGE_TOTALS = {  # once the members of an elastic run have changed
    "discarded_steps": "Steps of this worker that were rolled back and done again.",
    "lost_members": "Workers that died or were given up.",
    "heals": "Times that a worker has taken over the state of another.",
    "stalled_seconds": "Time that changes of the members have taken.",
}


class Prometheus:
    """Serves counters at ``http://host:port/metrics`` until ``close()``. Prometheus computes rates from them.

    Args:
        port: 0 takes a free one: see ``.port``. With several ranks on a host each needs its own.
        host: the address to listen on. Default: this machine only; "" is every interface.

    >>> import urllib.request
    >>> from gradsync.profiling import Breakdown, StepRecord
    >>> from gradsync.integrations.prometheus import Prometheus
    >>> with Prometheus(port=0) as adapter:
    ...     adapter(StepRecord(step=0, rank=1, began_s=0.0, step_s=0.5, parts=Breakdown(compute_s=0.4, wire_s=0.1)))
    ...     page = urllib.request.urlopen(f"http://127.0.0.1:{adapter.port}/metrics", timeout=5).read().decode()
    >>> print(next(line for line in page.splitlines() if 'part="wire"' in line))
    gradsync_step_seconds_total{rank="1",part="wire"} 0.1
    """

    def __init__(self, *, port: int, host: str = LOOPBACK) -> None:
        self._lock = threading.Lock()
        self._rank = 0
        self._steps = 0
        self._sent_bytes = 0
        self._part_s = dict.fromkeys(PARTS, 0.0)
        self._last_step_s = 0.0
        self._staleness: float | None = None
        self._change: Change | None = None  # of the members of an elastic run: the last one
        self._totals = dict.fromkeys(CHANGE_TOTALS, 0.0)
        adapter = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0  # of a client that connects and sends nothing

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, "the metrics are at /metrics")
                    return
                page = adapter.page().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: a scrape comes every few seconds."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="gradsync-prometheus", daemon=True)
        self._thread.start()

    def __call__(self, record: StepRecord) -> None:
        with self._lock:
            self._rank = record.rank
            for change in record.changes:
                self._add_change(change)
            if record.discarded:
                return
            self._steps += 1
            self._sent_bytes += record.sent_bytes
            self._last_step_s = record.step_s
            self._staleness = record.staleness
            for part in PARTS:
                self._part_s[part] += float(getattr(record.parts, f"{part}_s"))

    def _add_change(self, change: Change) -> None:
        self._change = change
        self._totals["discarded_steps"] += change.discarded
        self._totals["lost_members"] += len(change.lost)
        self._totals["heals"] += len(change.healed)
        self._totals["stalled_seconds"] += change.stalled_s

    def _elastic_lines(self, rank: str) -> list[str]:
        """The lines of a run whose members have changed; none before."""
        if self._change is None:
            return []
        gauges = {
            "epoch": ("The epoch of the elastic run.", self._change.epoch),
            "members": ("The workers that take part now.", self._change.num_members),
        }
        lines = []
        for name, (about, value) in gauges.items():
            lines += [
                f"# HELP gradsync_{name} {about}",
                f"# TYPE gradsync_{name} gauge",
                f"gradsync_{name}{{{rank}}} {value}",
            ]
        for name, about in CHANGE_TOTALS.items():
            lines += [
                f"# HELP gradsync_{name}_total {about}",
                f"# TYPE gradsync_{name}_total counter",
                f"gradsync_{name}_total{{{rank}}} {self._totals[name]:.9g}",
            ]
        return lines

    def page(self) -> str:
        """The response to a scrape."""
        with self._lock:
            rank = f'rank="{self._rank}"'
            lines = [
                "# HELP gradsync_steps_total Synchronizing steps so far.",
                "# TYPE gradsync_steps_total counter",
                f"gradsync_steps_total{{{rank}}} {self._steps}",
                "# HELP gradsync_step_seconds_total Time of the steps, by what it was spent on.",
                "# TYPE gradsync_step_seconds_total counter",
                *(f'gradsync_step_seconds_total{{{rank},part="{part}"}} {self._part_s[part]:.9g}' for part in PARTS),
                "# HELP gradsync_sent_bytes_total Bytes that this rank has sent.",
                "# TYPE gradsync_sent_bytes_total counter",
                f"gradsync_sent_bytes_total{{{rank}}} {self._sent_bytes}",
                "# HELP gradsync_last_step_seconds How long the last step took.",
                "# TYPE gradsync_last_step_seconds gauge",
                f"gradsync_last_step_seconds{{{rank}}} {self._last_step_s:.9g}",
            ]
            if self._staleness is not None:
                lines += [
                    "# HELP gradsync_staleness_steps How old the parameters of the last step were.",
                    "# TYPE gradsync_staleness_steps gauge",
                    f"gradsync_staleness_steps{{{rank}}} {self._staleness:.9g}",
                ]
            lines += self._elastic_lines(rank)
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
