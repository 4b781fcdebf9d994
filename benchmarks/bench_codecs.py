"""What encoding and decoding cost: gradsync's codecs against the same maths in eager torch and in torch.compile.

    python benchmarks/bench_codecs.py

One thread, float32, error feedback included: encode reads the values and the residual, and writes the payload and the
new residual; decode writes the values. Every round times all of them, in a rotating order, so that other load on the
machine affects all alike. Speeds are the size of the values over the time, however few bytes are sent.
"both" is the size over encode and decode together. Compare speeds only within one run; "memcpy" copies as many bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it also runs as a file, from anywhere

import torch  # noqa: E402
from rich import box  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.support.paired import paired_ratio  # noqa: E402
from benchmarks.support.reporting import Reporting, add_saving  # noqa: E402
from benchmarks.support.sizes import parse_size  # noqa: E402
from gradsync import spec  # noqa: E402
from gradsync.codecs import Codec, Payload, Residual  # noqa: E402

CODECS = (
    "int8",
    "int8(rounding='stochastic')",
    "int4",
    "sign",
    "ternary",
    "fp16",
    "bf16",
    "topk(density=0.01)",
    "randomk(density=0.01)",
    "chain(topk(density=0.01), int8)",
)
MODES = ("ours", "eager", "compile")

# A codec in plain torch: encode returns the parts of a payload and the new residual, decode the values.
Encode = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
Decode = Callable[..., Tensor]


# -- the same maths in torch ----------------------------------------------------------------------------------------


def int8_encode(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """Quantize blocks of 256 to 8 bits."""
    y = (x + residual).view(-1, 256)
    scale = y.abs().amax(1, keepdim=True) / 127
    codes = (y / scale).round()
    return codes.to(torch.int8), scale, (y - codes * scale).view(-1)


def int8_decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Restore the values of ``int8_encode``."""
    return (codes * scale).view(-1)


def int4_encode(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """Quantize blocks of 256 to 4 bits, two in a byte."""
    y = (x + residual).view(-1, 256)
    scale = y.abs().amax(1, keepdim=True) / 7
    codes = (y / scale).round()
    both = codes.to(torch.int8).view(-1, 2, 128)
    return (both[:, 0] & 15) | (both[:, 1] << 4), scale, (y - codes * scale).view(-1)


def int4_decode(packed: Tensor, scale: Tensor) -> Tensor:
    """Restore the values of ``int4_encode``."""
    codes = torch.stack([(packed << 4) >> 4, packed >> 4], 1).view(-1, 256)
    return (codes * scale).view(-1)


def sign_encode(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """Pack the signs of blocks of 1024, eight in a byte."""
    y = (x + residual).view(-1, 1024)
    scale = y.abs().mean(1, keepdim=True)
    negative = y < 0
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    packed = (negative.view(-1, 8, 128).to(torch.uint8) << shifts).sum(1, dtype=torch.uint8)
    return packed, scale, (y - torch.where(negative, -scale, scale)).view(-1)


def sign_decode(packed: Tensor, scale: Tensor) -> Tensor:
    """Restore the values of ``sign_encode``."""
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    negative = ((packed.unsqueeze(1) >> shifts) & 1).bool().view(-1, 1024)
    return torch.where(negative, -scale, scale).view(-1)


def fp16_encode(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """Cast to 16 bits."""
    y = x + residual
    short = y.to(torch.float16)
    return short, y - short


def fp16_decode(short: Tensor) -> Tensor:
    """Restore the values of ``fp16_encode``."""
    return short.to(torch.float32)


def topk_encode(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """Keep the largest hundredth."""
    y = x + residual
    index = torch.topk(y.abs(), y.numel() // 100, sorted=False).indices
    kept = y[index]
    return kept, index.to(torch.int32), torch.full_like(y[:1], y.numel()), y.index_fill(0, index, 0.0)


def topk_decode(kept: Tensor, index: Tensor, numel: Tensor) -> Tensor:
    """Restore the values of ``topk_encode``."""
    return torch.zeros(int(numel)).index_copy_(0, index.long(), kept)


PLAIN: dict[str, tuple[Encode, Decode]] = {
    "int8": (int8_encode, int8_decode),
    "int4": (int4_encode, int4_decode),
    "sign": (sign_encode, sign_decode),
    "fp16": (fp16_encode, fp16_decode),
    "topk(density=0.01)": (topk_encode, topk_decode),
}
NOT_COMPILED = ("topk(density=0.01)",)  # a sort and an index: nothing to fuse


# -- measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One codec in one mode, timed once in each round."""

    name: str
    mode: str
    encode: Callable[[], Any]
    decode: Callable[[], Any]


def our_entry(text: str, x: Tensor) -> Entry:
    """A codec of the library, with its residual in place."""
    codec: Codec = spec.parse(text, kind="codec")
    payload = Payload(torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8))
    left, out = torch.zeros_like(x), torch.empty_like(x)
    residual = Residual(left, left)
    return Entry(text, "ours", lambda: codec.encode(x, payload, residual=residual), lambda: codec.decode(payload, out))


def plain_entry(text: str, mode: str, x: Tensor) -> Entry:
    """The same in torch, eager or compiled; the new residual replaces the old one."""
    encode, decode = PLAIN[text]
    if mode == "compile":
        encode, decode = torch.compile(encode, dynamic=False), torch.compile(decode, dynamic=False)
    held: dict[str, Any] = {"left": torch.zeros_like(x)}

    def run_encode() -> None:
        *held["parts"], held["left"] = encode(x, held["left"])

    def run_decode() -> None:
        held["out"] = decode(*held["parts"])

    return Entry(text, mode, run_encode, run_decode)


def measure(entries: Sequence[Entry], rounds: int, show: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Time every entry in every round: seconds of encode and of decode, by codec and mode."""
    seconds: dict[str, dict[str, Any]] = {}
    for entry in entries:
        show(f"{entry.name} ({entry.mode}): compiling")
        for _ in range(2):  # the second call allocates no memory
            entry.encode()
            entry.decode()
        seconds.setdefault(entry.name, {})[entry.mode] = {"encode_s": [], "decode_s": []}
    for number in range(rounds):
        for entry in (*entries[number % len(entries) :], *entries[: number % len(entries)]):
            show(f"round {number + 1} of {rounds}: {entry.name} ({entry.mode})")
            times = [time.perf_counter()]
            for call in (entry.encode, entry.decode):
                call()
                times.append(time.perf_counter())
            taken = seconds[entry.name][entry.mode]
            taken["encode_s"].append(times[1] - times[0])
            taken["decode_s"].append(times[2] - times[1])
    return seconds


def summarize(seconds: dict[str, dict[str, Any]], num_bytes: int) -> dict[str, dict[str, Any]]:
    """Reduce the rounds to medians and speeds, and ours to ratios to the others of the same rounds."""
    summary: dict[str, dict[str, Any]] = {}
    for name, modes in seconds.items():
        row = summary[name] = {}
        both = {mode: [e + d for e, d in zip(t["encode_s"], t["decode_s"], strict=True)] for mode, t in modes.items()}
        for mode, taken in modes.items():
            speeds = {"encode": taken["encode_s"], "decode": taken["decode_s"], "both": both[mode]}
            row[mode] = {f"{what}_gb_per_s": num_bytes / 1e9 / statistics.median(s) for what, s in speeds.items()}
        for mode in set(modes) - {"ours"} if "ours" in modes else ():
            row["ours"][f"times_as_fast_as_{mode}"] = paired_ratio(both[mode], both["ours"]).as_dict()
    return summary


def table_of(summary: dict[str, dict[str, Any]], *, num_bytes: int, rounds: int) -> Table:
    """The table of speeds."""
    caption = f"GB/s of float32 values ({num_bytes / 2**20:.0f} MB), one thread, medians of {rounds} rounds."
    table = Table(title="Codecs with error feedback", caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("codec", no_wrap=True)
    for title in ("bytes : float32", "encode", "decode", "both", "eager", "compile", ": eager", ": compile"):
        table.add_column(title, justify="right")
    for name, row in summary.items():
        numel = num_bytes // 4
        cells = [
            "" if name == "memcpy" else f"1 : {num_bytes / spec.parse(name, kind='codec').encoded_bytes(numel):.1f}"
        ]
        ours = row["ours"]
        cells += [f"{ours[f'{what}_gb_per_s']:.1f}" for what in ("encode", "decode", "both")]
        cells += [f"{row[mode]['both_gb_per_s']:.2f}" if mode in row else "" for mode in MODES[1:]]
        for mode in MODES[1:]:
            ratio = ours.get(f"times_as_fast_as_{mode}")
            cells.append(f"{ratio['ratio']:.1f}" if ratio else "")
        table.add_row(name, *cells)
    return table


# -- the command line -----------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="What encoding and decoding cost: gradsync, eager torch, torch.compile."
    )
    parser.add_argument("--codecs", help="specs, separated by ';' (default: all)")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {','.join(MODES)}; ours is always measured")
    parser.add_argument("--size", type=parse_size, default=100 * 2**20, help="of the values (default: 100MB)")
    parser.add_argument("--rounds", type=int, default=11, help="pairs for the ratios (default: 11)")
    add_saving(parser, files="JSON")
    options = parser.parse_args(arguments)
    if options.rounds < 3:
        parser.error(f"--rounds must be 3 or more, for an interval; got {options.rounds}.")
    if options.size % 4096:
        parser.error(f"--size must be a multiple of 4KB, the largest block of the plain versions; got {options.size}.")
    options.codecs = [text.strip() for text in options.codecs.split(";")] if options.codecs else list(CODECS)
    for text in options.codecs:
        try:
            spec.parse(text, kind="codec")
        except spec.SpecError as error:
            parser.error(str(error))
    options.modes = options.modes.split(",")
    if not set(options.modes) <= set(MODES):
        parser.error(f"--modes must be of {', '.join(MODES)}; got {', '.join(options.modes)}.")
    return options


def entries_of(options: argparse.Namespace, x: Tensor) -> list[Entry]:
    """All entries to be timed: memcpy, and each codec in each mode."""
    copy, again = torch.zeros_like(x), torch.zeros_like(x)
    entries = [Entry("memcpy", "ours", lambda: copy.copy_(x), lambda: again.copy_(copy))]
    for text in options.codecs:
        entries.append(our_entry(text, x))
        for mode in MODES[1:]:
            if mode in options.modes and text in PLAIN and not (mode == "compile" and text in NOT_COMPILED):
                entries.append(plain_entry(text, mode, x))
    return entries


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    options = parse(arguments)
    torch.set_num_threads(1)
    reporting = Reporting("codecs", arguments)
    x = torch.randn(options.size // 4, generator=torch.Generator().manual_seed(0))
    entries = entries_of(options, x)
    with reporting.counting(len(entries) * (options.rounds + 1)) as show:
        seconds = measure(entries, options.rounds, show)
    summary = summarize(seconds, options.size)
    reporting.console.print(table_of(summary, num_bytes=options.size, rounds=options.rounds))
    if not options.no_save:
        reporting.write(options.output, {"size_bytes": options.size, "summary": summary, "measured": seconds})


if __name__ == "__main__":
    main()
