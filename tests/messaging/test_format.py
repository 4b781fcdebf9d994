"""The wire format: round trips for every dtype and shape, and ``Malformed`` for anything else."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.messaging import format as wire_format
from gradsync.messaging.format import CHUNK_BYTES, DTYPES, Malformed, Message, pack, unpack
from gradsync.messaging.schema import NotRequired, address, integer, number, optional, text

KINDS = {"push", "pull"}


def over_the_wire(message: Message, **options: Any) -> Message:
    """Pack and unpack as a socket does: writable copies of the frames, which may begin at any address."""
    frames = []
    for frame in pack(message):
        room = bytearray(3) + bytearray(frame)
        frames.append(memoryview(room)[3:])
    return unpack(frames, kinds=KINDS, **options)


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 3)])
def test_messages_survive_the_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    got = over_the_wire(Message("push", {"a": [1, "x", None, 2.5]}, {"t": tensor, "again": tensor}))
    assert got.fields == {"a": [1, "x", None, 2.5]}
    for name in ("t", "again"):
        assert got.tensors[name].dtype == dtype
        assert got.tensors[name].shape == shape
        assert torch.equal(got.tensors[name], tensor)
        assert got.tensors[name].data_ptr() % 16 == 0  # wherever the frames began


def test_pack_splits_large_tensors_into_chunks_without_a_copy() -> None:
    tensor = torch.arange(CHUNK_BYTES // 4 * 2 + 5, dtype=torch.float32)
    frames = pack(Message("push", {}, {"t": tensor}))
    assert [memoryview(frame).nbytes for frame in frames[1:]] == [CHUNK_BYTES, CHUNK_BYTES, 20]
    tensor[0] = 99.0
    assert torch.frombuffer(bytearray(frames[1]), dtype=torch.float32)[0] == 99.0  # no copy was made
    assert torch.equal(over_the_wire(Message("push", {}, {"t": tensor})).tensors["t"], tensor)


def test_pack_makes_other_layouts_contiguous() -> None:
    turned = torch.arange(12.0).reshape(3, 4).t()
    conjugate = torch.tensor([1 + 2j]).conj()
    needs_grad = torch.ones(2, requires_grad=True)
    got = over_the_wire(Message("push", {}, {"t": turned, "c": conjugate, "g": needs_grad})).tensors
    assert torch.equal(got["t"], turned)
    assert got["c"].item() == 1 - 2j
    assert torch.equal(got["g"], torch.ones(2))


def test_unpack_writes_into_given_tensors_if_they_fit() -> None:
    sent = torch.arange(6.0)
    fits, other_shape, turned = torch.zeros(6), torch.zeros(5), torch.zeros(12)[::2]
    message = Message("push", {}, {"a": sent, "b": sent, "c": sent})
    got = over_the_wire(message, into={"a": fits, "b": other_shape, "c": turned}).tensors
    assert got["a"] is fits
    assert torch.equal(fits, sent)
    assert got["b"] is not other_shape
    assert got["c"] is not turned
    assert torch.equal(got["c"], sent)


def test_pack_refuses_what_the_format_does_not_hold() -> None:
    with pytest.raises(ValueError, match="must be JSON values"):
        pack(Message("push", {"x": object()}))
    with pytest.raises(ValueError, match="dtypes"):
        pack(Message("push", {}, {"t": torch.zeros(2, dtype=torch.float8_e4m3fn)}))


GOOD: dict[str, Any] = {"kind": "push", "fields": {}, "tensors": [["t", "float32", [2]]]}


@pytest.mark.parametrize(
    "head",
    [
        None,
        [],
        "text",
        {},
        {**GOOD, "more": 1},
        {**GOOD, "kind": "evil"},
        {**GOOD, "kind": ["push"]},
        {**GOOD, "fields": []},
        {**GOOD, "tensors": {}},
        {**GOOD, "tensors": [["t", "float32"]]},
        {**GOOD, "tensors": [[1, "float32", [2]]]},
        {**GOOD, "tensors": [["t", "float99", [2]]]},
        {**GOOD, "tensors": [["t", ["float32"], [2]]]},
        {**GOOD, "tensors": [["t", "float32", [-2]]]},
        {**GOOD, "tensors": [["t", "float32", [2.0]]]},
        {**GOOD, "tensors": [["t", "float32", [True, 2]]]},
        {**GOOD, "tensors": [["t", "float32", 2]]},
        {**GOOD, "tensors": [["t", "float32", [1 << 62, 1 << 62]]]},
        {**GOOD, "tensors": [["t", "float32", [1 << 40, 1 << 40, 0]], ["u", "float32", [2]]]},
        {**GOOD, "tensors": [["t", "float32", [0, 1 << 40, 1 << 40]], ["u", "float32", [2]]]},
        {**GOOD, "tensors": [["t", "float32", [1] * 65]]},
        {**GOOD, "tensors": [["t", "float32", [3]]]},
        {**GOOD, "tensors": []},
        {**GOOD, "tensors": [["t", "float32", [1]], ["t", "float32", [1]]]},
        {**GOOD, "tensors": [["t", "float32", [2]], ["u", "float32", [1]]]},
    ],
)
def test_unpack_refuses_malformed_headers(head: Any) -> None:
    with pytest.raises(Malformed):
        unpack([json.dumps(head).encode(), bytes(8)], kinds=KINDS)


SCHEMAS = {
    "push": {
        "clock": integer(),
        "weight": number(0),
        "square": optional(number(finite=False)),
        "tag": text(10),
        "at": NotRequired(address),
    }
}
FIELDS: dict[str, Any] = {"clock": 3, "weight": 1.5, "square": None, "tag": "x"}


def test_unpack_accepts_fields_that_the_schema_allows() -> None:
    for fields in (FIELDS, {**FIELDS, "square": math.inf}, {**FIELDS, "weight": 2, "at": "tcp://[::1]:5"}):
        assert unpack(pack(Message("push", fields)), kinds=SCHEMAS).fields == fields


@pytest.mark.parametrize(
    "wrong",
    [
        {"clock": math.inf},
        {"clock": math.nan},
        {"clock": 3.0},
        {"clock": -1},
        {"clock": 1 << 63},
        {"clock": True},
        {"clock": None},
        {"weight": math.inf},
        {"weight": math.nan},
        {"weight": -0.5},
        {"weight": 10**300},
        {"square": "x"},
        {"tag": "x" * 11},
        {"tag": "\ud800"},
        {"at": "tcp://\x00"},
        {"at": "tcp://ü"},
        {"unknown": 1},
    ],
)
def test_unpack_refuses_fields_that_the_schema_does_not_allow(wrong: dict[str, Any]) -> None:
    with pytest.raises(Malformed, match="field"):
        unpack(pack(Message("push", {**FIELDS, **wrong})), kinds=SCHEMAS)
    with pytest.raises(Malformed, match="'tag' is missing"):
        unpack(pack(Message("push", {name: FIELDS[name] for name in ("clock", "weight", "square")})), kinds=SCHEMAS)


DEEP = json.loads("[" * 50 + "]" * 50)


@pytest.mark.parametrize("value", [math.inf, math.nan, 1 << 63, "\ud800", {"\ud800": 1}, DEEP])
def test_unpack_bounds_fields_without_a_schema(value: Any) -> None:
    with pytest.raises(Malformed, match="nested too deep, or a number"):
        unpack(pack(Message("push", {"a": [value]})), kinds=KINDS)


@pytest.mark.parametrize("error", [RecursionError, OverflowError, MemoryError, RuntimeError, KeyError])
def test_unpack_turns_every_error_into_malformed(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(wire_format, "_parse_header", fail)
    with pytest.raises(Malformed, match=f"can't be read: {error.__name__}"):
        unpack([b"{}"], kinds=KINDS)


def test_unpack_allocates_nothing_for_a_claimed_size() -> None:
    raw = json.dumps({**GOOD, "tensors": [["t", "uint8", [1 << 40]]]}).encode()
    tracemalloc.start()
    try:
        with pytest.raises(Malformed, match="1099511627776 bytes; 8 received"):
            unpack([raw, bytes(8)], kinds=KINDS)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xff\xfe{"],
        [b"[" * 100_000],
        [b'{"kind": ' + b"9" * 5000 + b"}"],
        [json.dumps(GOOD).encode()],
        [json.dumps(GOOD).encode(), bytes(7)],
        [json.dumps(GOOD).encode(), bytes(4), bytes(4)],
        [json.dumps(GOOD).encode(), bytes(8), bytes(8)],
    ],
)
def test_unpack_refuses_malformed_frames(frames: list[bytes]) -> None:
    with pytest.raises(Malformed):
        unpack(frames, kinds=KINDS)


def test_unpack_of_a_malformed_message_leaves_the_given_tensors_unchanged() -> None:
    out = torch.full((2,), 7.0)
    head = {**GOOD, "tensors": [["t", "float32", [2]], ["u", "float32", [2]]]}
    with pytest.raises(Malformed):
        unpack([json.dumps(head).encode(), bytes(8), bytes(4)], kinds=KINDS, into={"t": out})
    assert torch.equal(out, torch.full((2,), 7.0))


def test_unpack_reads_or_refuses_randomly_changed_messages(exhaustive: bool) -> None:
    rng = random.Random(3)
    tensors: dict[str, Tensor] = {"t": torch.ones(3), "u": torch.zeros(2, 2, dtype=torch.int64)}
    good = [bytes(frame) for frame in pack(Message("push", {"clock": 4}, tensors))]
    refused = 0
    for _ in range(100_000 if exhaustive else 3000):
        frames = [bytearray(frame) for frame in good]
        for _ in range(rng.randint(1, 4)):
            frame = rng.choice(frames)
            choice = rng.random()
            if choice < 0.6 and frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            elif choice < 0.8:
                frame += rng.randbytes(rng.randint(1, 5))
            elif len(frames) > 1:
                frames.remove(frame)
        try:
            got = unpack(frames, kinds=KINDS)
            assert sum(tensor.nbytes for tensor in got.tensors.values()) == sum(map(len, frames[1:]))
        except Malformed:
            refused += 1
    assert refused > 1000
