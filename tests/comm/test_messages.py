"""Messages: there and back for every dtype and shape, and nothing but ``Malformed`` for anything else."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.comm.messages import CHUNK_BYTES, DTYPES, Malformed, Message, pack, unpack

KINDS = {"push", "pull"}


def over_the_wire(message: Message, **options: Any) -> Message:
    """As a socket does it: writable copies of the frames, which may begin anywhere."""
    frames = []
    for frame in pack(message):
        room = bytearray(3) + bytearray(frame)
        frames.append(memoryview(room)[3:])
    return unpack(frames, kinds=KINDS, **options)


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 3)])
def test_every_dtype_and_shape_there_and_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    got = over_the_wire(Message("push", {"a": [1, "x", None, 2.5]}, {"t": tensor, "again": tensor}))
    assert got.fields == {"a": [1, "x", None, 2.5]}
    for name in ("t", "again"):
        assert got.tensors[name].dtype == dtype
        assert got.tensors[name].shape == shape
        assert torch.equal(got.tensors[name], tensor)
        assert got.tensors[name].data_ptr() % 16 == 0  # however the frames lay


def test_large_tensors_go_in_chunks_of_their_own_memory() -> None:
    tensor = torch.arange(CHUNK_BYTES // 4 * 2 + 5, dtype=torch.float32)
    frames = pack(Message("push", {}, {"t": tensor}))
    assert [memoryview(frame).nbytes for frame in frames[1:]] == [CHUNK_BYTES, CHUNK_BYTES, 20]
    tensor[0] = 99.0
    assert torch.frombuffer(bytearray(frames[1]), dtype=torch.float32)[0] == 99.0  # no copy was made
    assert torch.equal(over_the_wire(Message("push", {}, {"t": tensor})).tensors["t"], tensor)


def test_strange_layouts_are_made_plain() -> None:
    turned = torch.arange(12.0).reshape(3, 4).t()
    conjugate = torch.tensor([1 + 2j]).conj()
    needs_grad = torch.ones(2, requires_grad=True)
    got = over_the_wire(Message("push", {}, {"t": turned, "c": conjugate, "g": needs_grad})).tensors
    assert torch.equal(got["t"], turned)
    assert got["c"].item() == 1 - 2j
    assert torch.equal(got["g"], torch.ones(2))


def test_tensors_are_written_where_they_belong_if_they_fit() -> None:
    sent = torch.arange(6.0)
    fits, other_shape, turned = torch.zeros(6), torch.zeros(5), torch.zeros(12)[::2]
    message = Message("push", {}, {"a": sent, "b": sent, "c": sent})
    got = over_the_wire(message, into={"a": fits, "b": other_shape, "c": turned}).tensors
    assert got["a"] is fits
    assert torch.equal(fits, sent)
    assert got["b"] is not other_shape
    assert got["c"] is not turned
    assert torch.equal(got["c"], sent)


def test_refuses_to_send_what_can_not_be_said() -> None:
    with pytest.raises(ValueError, match="what JSON can say"):
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
        {**GOOD, "tensors": [["t", "float32", [1] * 65]]},
        {**GOOD, "tensors": [["t", "float32", [3]]]},
        {**GOOD, "tensors": []},
        {**GOOD, "tensors": [["t", "float32", [1]], ["t", "float32", [1]]]},
        {**GOOD, "tensors": [["t", "float32", [2]], ["u", "float32", [1]]]},
    ],
)
def test_malformed_heads(head: Any) -> None:
    with pytest.raises(Malformed):
        unpack([json.dumps(head).encode(), bytes(8)], kinds=KINDS)


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
def test_malformed_frames(frames: list[bytes]) -> None:
    with pytest.raises(Malformed):
        unpack(frames, kinds=KINDS)


def test_a_bad_message_leaves_what_was_there() -> None:
    out = torch.full((2,), 7.0)
    head = {**GOOD, "tensors": [["t", "float32", [2]], ["u", "float32", [2]]]}
    with pytest.raises(Malformed):
        unpack([json.dumps(head).encode(), bytes(8), bytes(4)], kinds=KINDS, into={"t": out})
    assert torch.equal(out, torch.full((2,), 7.0))


def test_random_changes_of_good_messages_are_read_or_refused(exhaustive: bool) -> None:
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
