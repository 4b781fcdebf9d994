"""The wire format: ``pack`` turns a ``Message`` (kind, fields, tensors) into frames, ``unpack`` reads it back.

The first frame is the header, in JSON: kind, fields, and each tensor's name, dtype and shape. The other frames are the
tensors' bytes, sent from the tensors' own memory in chunks of at most 1 MB, the size that moves fastest through a
socket. Nothing is ever pickled.

Received bytes are not trusted. ``unpack`` returns a message whose fields match its schema and whose tensors have
exactly the bytes that their shapes ask for, or it raises ``Malformed`` and nothing else. It never allocates more than
the bytes that were received.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradsync.errors import GradSyncError
from gradsync.messaging.schema import Json as Json
from gradsync.messaging.schema import Schema, validation_error

CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20  # a hundred thousand parameters by name
MAX_TENSORS = 200_000
MAX_DIMENSIONS = 64
ALIGNED_BYTES = 16  # the size of a complex128, the largest element
MAX_BYTES = 1 << 40  # of a message's tensors: keeps sizes far from integer overflow; memory is the real limit

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Kinds = Collection[str] | Mapping[str, Schema | None]  # the kinds that an endpoint accepts, with or without schemas

# A frame as it is sent or received: any object with the buffer protocol.
Frame = bytes | bytearray | memoryview


def schemas_of(kinds: Kinds) -> dict[str, Schema | None]:
    """The schema of each kind, None where there is none."""
    return dict(kinds) if isinstance(kinds, Mapping) else dict.fromkeys(kinds)


class Malformed(GradSyncError):
    """The received frames are not a valid message.

    >>> from gradsync.messaging.format import Malformed, unpack
    >>> try:
    ...     unpack([b"GET / HTTP/1.1"], kinds={"push"})
    ... except Malformed as error:
    ...     print(error)
    the first frame is no JSON object
    """


@dataclass
class Message:
    """One message: its kind, JSON fields, and tensors by name.

    >>> import torch
    >>> from gradsync.messaging.format import Message, pack, unpack
    >>> frames = pack(Message("push", {"clock": 3}, {"weight": torch.ones(2, 2)}))
    >>> len(frames)                                            # the header, and 16 bytes of tensor
    2
    >>> message = unpack(frames, kinds={"push", "pull"})
    >>> message.kind, message.fields, message.tensors["weight"].sum()
    ('push', {'clock': 3}, tensor(4.))
    """

    kind: str
    fields: dict[str, Json] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The size of the tensors; the header is not counted."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def pack(message: Message) -> list[Frame]:
    """The message's frames. They are views of the tensors' memory, which must not change until they are sent."""
    described: list[list[Json]] = []
    chunks: list[Frame] = []
    for name, tensor in message.tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(f"tensors on the wire have one of the dtypes {', '.join(DTYPES)}; got {tensor.dtype}.")
        described.append([name, _NAMES[tensor.dtype], list(tensor.shape)])
        chunks += _chunks(_bytes_of(tensor))
    head = {"kind": message.kind, "fields": message.fields, "tensors": described}
    try:
        first = json.dumps(head, separators=(",", ":"), allow_nan=True).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"fields of a message must be JSON values; {message.kind!r}: {error}") from None
    if len(first) > MAX_HEADER_BYTES or len(described) > MAX_TENSORS:
        raise ValueError(
            f"a message has at most {MAX_HEADER_BYTES} bytes of fields and {MAX_TENSORS} tensors; "
            f"got {len(first)} and {len(described)}."
        )
    return [first, *chunks]


def unpack(frames: Sequence[Frame], *, kinds: Kinds, into: Mapping[str, Tensor] | None = None) -> Message:
    """Parse frames into a message. Raises ``Malformed``, and nothing else, for any other input.

    A tensor named in ``into`` is written there if dtype, shape and layout agree. Any other tensor of one chunk is a
    view of its frame, without a copy; a tensor of several chunks is assembled in newly allocated memory.
    """
    try:
        return _unpack(frames, kinds, into)
    except Malformed:
        raise
    except Exception as error:  # one that the checks did not foresee: received bytes must not end the thread
        raise Malformed(f"it can't be read: {error!r:.200}") from error


def _unpack(frames: Sequence[Frame], kinds: Kinds, into: Mapping[str, Tensor] | None) -> Message:
    head = _parse_header(frames)
    kind, fields = head["kind"], head["fields"]
    if not isinstance(kind, str) or kind not in kinds:
        raise Malformed(f"kind {kind!r:.60} is none of {', '.join(sorted(kinds))}")
    if not isinstance(fields, dict):
        raise Malformed("fields is no object")
    if wrong := validation_error(fields, kinds[kind] if isinstance(kinds, Mapping) else None):
        raise Malformed(f"{kind}: {wrong}")
    # Everything is checked before a byte is written: a bad message leaves `into` as it was.
    described = _parse_descriptions(head["tensors"])
    num_bytes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in described]
    got = [memoryview(frame).nbytes for frame in frames[1:]]
    if sum(num_bytes) != sum(got):
        raise Malformed(f"tensors of {sum(num_bytes)} bytes; {sum(got)} received")
    sizes = [_chunk_sizes(size) for size in num_bytes]
    expected = [size for of_one in sizes for size in of_one]
    if expected != got:
        raise Malformed(f"tensors of {sum(expected)} bytes in {len(expected)} chunks; received {len(got)} chunks")
    tensors: dict[str, Tensor] = {}
    start = 1
    for (name, dtype, shape), chunks in zip(described, sizes, strict=True):
        parts = frames[start : start + len(chunks)]
        start += len(chunks)
        tensors[name] = _assemble(parts, dtype, shape, None if into is None else into.get(name))
    return Message(kind, fields, tensors)


def _parse_header(frames: Sequence[Frame]) -> dict[str, Json]:
    if not frames or memoryview(frames[0]).nbytes > MAX_HEADER_BYTES:
        raise Malformed("there is no first frame, or it is too large")
    try:
        head = json.loads(bytes(frames[0]))
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict):
        raise Malformed("the first frame is no JSON object")
    if head.keys() != {"kind", "fields", "tensors"}:
        raise Malformed("the first frame must have kind, fields and tensors, and nothing else")
    return head


def _parse_descriptions(described: Json) -> list[tuple[str, torch.dtype, list[int]]]:
    if not isinstance(described, list) or len(described) > MAX_TENSORS:
        raise Malformed(f"tensors is no list of at most {MAX_TENSORS}")
    found: list[tuple[str, torch.dtype, list[int]]] = []
    names: set[str] = set()
    total = 0
    for entry in described:
        if not isinstance(entry, list) or len(entry) != 3:
            raise Malformed("a tensor is described by its name, dtype and shape")
        name, dtype, shape = entry
        if not isinstance(name, str) or name in names:
            raise Malformed("a tensor's name is a string, each another")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise Malformed(f"dtype {dtype!r:.40} is none of {', '.join(DTYPES)}")
        if not _is_shape(shape):
            raise Malformed(f"shape {shape!r:.60} is no list of sizes")
        total += math.prod(shape) * DTYPES[dtype].itemsize
        if total > MAX_BYTES:
            raise Malformed(f"tensors of more than {MAX_BYTES} bytes")
        names.add(name)
        found.append((name, DTYPES[dtype], shape))
    return found


def _is_shape(shape: Json) -> bool:
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        return False
    # Zeros are left out: torch multiplies all sizes for the strides, and [2**40, 2**40, 0] would overflow there.
    return all(type(size) is int and 0 <= size <= MAX_BYTES for size in shape) and (
        math.prod(size for size in shape if size) <= MAX_BYTES
    )


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's memory as bytes. A tensor that is not contiguous or not on the CPU is copied first."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _chunk_sizes(num_bytes: int) -> list[int]:
    whole, rest = divmod(num_bytes, CHUNK_BYTES)
    return [CHUNK_BYTES] * whole + ([rest] if rest else [])


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, data.nbytes, CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _assemble(parts: Sequence[Frame], dtype: torch.dtype, shape: list[int], out: Tensor | None) -> Tensor:
    fits = out is not None and out.dtype == dtype and list(out.shape) == shape and out.device.type == "cpu"
    if fits and out is not None and out.is_contiguous():
        _copy(parts, out)
        return out
    if len(parts) == 1 and not memoryview(parts[0]).readonly:
        seen = torch.frombuffer(parts[0], dtype=torch.uint8)
        if seen.data_ptr() % ALIGNED_BYTES == 0:  # small frames may start anywhere in the socket's buffer
            return seen.view(dtype).view(shape)
    made = torch.empty(shape, dtype=dtype)
    _copy(parts, made)
    return made


def _copy(parts: Sequence[Frame], out: Tensor) -> None:
    data = _bytes_of(out)
    start = 0
    for part in parts:
        end = start + memoryview(part).nbytes
        data[start:end] = memoryview(part).cast("B")
        start = end
