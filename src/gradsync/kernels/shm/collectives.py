"""The compiled part of the shared-memory transport: synchronization of the ranks, and copying through shared slots.

All ranks of a group share a control segment. It has a part for each rank: the rank's counters, its ring of slots (for
collectives on private tensors) and its channels (for send and recv, one for each receiver). Each rank also has a
private array of 64-bit words, the *control words*, with the addresses of all parts and slots. Its address is the
argument ``control`` of the kernels.

[Note: sequence numbers] A collective on private tensors goes through the slots in chunks; one on shared buffers is a
single chunk. Every chunk has a sequence number, counted over the whole life of the communicator and the same on all
ranks. For a chunk each rank writes its data where all can see it and sets its ``ARRIVED`` counter to the sequence
number. When all ranks have arrived, it reads what it needs. Where a second barrier is needed, it sets ``DONE`` too.

[Note: four slots suffice] Chunk t goes through slot t % 4. A rank copies in one chunk ahead: it copies chunk t-1 out
before it copies chunk t+1 in, so a rank that has arrived at t-1 has read everything up to t-3. To copy t-1 out, this
rank saw all ranks arrive at t-1. So no rank still reads the slot of t-3 when t+1 overwrites it.

[Note: fingerprints] For the first chunk of a collective each rank writes a fingerprint of its call (kind, op, dtype,
number of values, root) to the cache line of its ``ARRIVED`` counter, before it raises that counter. No rank reads data
before all fingerprints are equal. There is room for four fingerprints, for the reason above. Only collectives on shared
buffers may arrive further ahead. A fingerprint that was overwritten by then is skipped: it is stored together with its
sequence number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.kernels.base import numba
from gradsync.kernels.shm.atomics import (
    LINE_BYTES,
    call_sum,
    copy,
    increment,
    load_acquire,
    pointer,
    relax,
    store_and_fence,
    wake,
)

# Byte offsets within a rank's part: counters, slots, and a channel for each receiver.
ARRIVED, DONE, SLEEPING, FUTEX_WORD = (line * LINE_BYTES for line in range(4))  # each on a cache line of its own
FINGERPRINTS = 8  # behind the counter ARRIVED, on its cache line: see [Note: fingerprints]
NUM_FINGERPRINTS = 4
# A rank's description of its call, written when the fingerprints differ: sequence number, length, text.
CALL_TEXT, CALL_TEXT_BYTES = 2048, 1024
SLOTS = 4096
SLOT_BYTES = 64 * 1024
NUM_SLOTS = 4
CHANNELS = SLOTS + NUM_SLOTS * SLOT_BYTES
SENT, RECEIVED, CHANNEL_DATA = 0, LINE_BYTES, 4096  # offsets within a channel: two counters and the data
CHANNEL_DATA_BYTES = 256 * 1024
CHANNEL_BYTES = CHANNEL_DATA + CHANNEL_DATA_BYTES

# The control words. Behind them: the addresses of all slots, by slot and rank, and room for the addresses of a sum's
# inputs. LAST_SEQUENCE: the last sequence number that was reserved.
RANK, WORLD, PARTS, STRIDE, LAST_SEQUENCE, CONTROL_WORDS = range(6)

# The words of an all-reduce that is tried in one call: see `reduce_eagerly`.
SMALL_SUM, SMALL_BYTES, SMALL_ITEM_BYTES, SMALL_FINGERPRINT, SMALL_WORDS = range(5)

# The words of a collective that goes through the slots. CHUNK, COPIED_IN and SUMMED count the chunks that were copied
# out, copied in and summed so far; IN and OUT are addresses; COUNT and CHUNK_COUNT are numbers of values.
KIND, CHUNK, COPIED_IN, NUM_CHUNKS, FIRST_SEQUENCE, SUMMED, IN, OUT, COUNT, ITEM_BYTES, CHUNK_COUNT = range(11)
ROOT, FINGERPRINT, STATE_WORDS = range(11, 14)
DIRECT, SLICES, GATHER, BROADCAST, SCATTER, EXCHANGE = range(6)

ALIGN = 64  # values: no two ranks write to one cache line

FINGERPRINT_BITS = 40
_FINGERPRINT_MASK = (1 << FINGERPRINT_BITS) - 1
_SEQUENCE_MASK = (1 << (63 - FINGERPRINT_BITS)) - 1
MISMATCH = -1  # what a kernel returns when the ranks' calls differ


@numba.njit(inline="always")
def words_at(address: int, count: int) -> Any:
    """The 64-bit words at an address, as an array."""
    return numba.carray(pointer(address), count, np.int64)


@numba.njit("b1(i8, i8, i8, i8, i8)", nogil=True, cache=True)
def counters_reached(address: int, stride_bytes: int, num_ranks: int, value: int, spins: int) -> bool:
    """Whether every rank's counter has reached ``value``; polls each at most ``spins`` times."""
    for rank in range(num_ranks):
        looked = 0
        while load_acquire(address + rank * stride_bytes) < value:
            looked += 1
            if looked >= spins:
                return False
            relax()
    return True


@numba.njit("void(i8)", nogil=True, cache=True)
def wake_sleepers(control: int) -> None:
    """Wake the other ranks that sleep."""
    words = words_at(control, CONTROL_WORDS)
    for rank in range(words[WORLD]):
        part = words[PARTS] + rank * words[STRIDE]
        if rank != words[RANK] and load_acquire(part + SLEEPING) != 0:
            increment(part + FUTEX_WORD)
            wake(part + FUTEX_WORD)


@numba.njit("void(i8, i8, i8)", nogil=True, cache=True)
def publish(control: int, counter: int, sequence: int) -> None:
    """Set this rank's counter, and wake the ranks that may be waiting for it."""
    words = words_at(control, CONTROL_WORDS)
    store_and_fence(words[PARTS] + words[RANK] * words[STRIDE] + counter, sequence)
    wake_sleepers(control)


@numba.njit("b1(i8, i8, i8, i8)", nogil=True, cache=True)
def all_reached(control: int, counter: int, sequence: int, spins: int) -> bool:
    """Whether all ranks' counters have reached ``sequence``."""
    words = words_at(control, CONTROL_WORDS)
    arrived: bool = counters_reached(words[PARTS] + counter, words[STRIDE], words[WORLD], sequence, spins)
    return arrived


@numba.njit("void(i8, i8, i8)", nogil=True, cache=True)
def arrive(control: int, sequence: int, fingerprint: int) -> None:
    """Publish the fingerprint of a call, then raise this rank's ``ARRIVED`` counter to its first chunk."""
    words = words_at(control, CONTROL_WORDS)
    place = words[PARTS] + words[RANK] * words[STRIDE] + FINGERPRINTS + 8 * (sequence % NUM_FINGERPRINTS)
    words_at(place, 1)[0] = ((sequence & _SEQUENCE_MASK) << FINGERPRINT_BITS) | fingerprint
    publish(control, ARRIVED, sequence)


@numba.njit("b1(i8, i8, i8)", nogil=True, cache=True)
def fingerprints_agree(control: int, sequence: int, fingerprint: int) -> bool:
    """Whether all ranks, which have arrived at the first chunk of a call, make the same call."""
    words = words_at(control, CONTROL_WORDS)
    place = words[PARTS] + FINGERPRINTS + 8 * (sequence % NUM_FINGERPRINTS)
    for rank in range(words[WORLD]):
        found = words_at(place + rank * words[STRIDE], 1)[0]
        if found >> FINGERPRINT_BITS == sequence & _SEQUENCE_MASK and found & _FINGERPRINT_MASK != fingerprint:
            return False
    return True


@numba.njit("void(i8, i8)", nogil=True, cache=True)
def store(address: int, value: int) -> None:
    """Set a word without waking sleeping ranks."""
    store_and_fence(address, value)


@numba.njit("i8(i8)", nogil=True, cache=True)
def load(address: int) -> int:
    """Read a word; everything that was written before it was set is visible afterwards."""
    value: int = load_acquire(address)
    return value


@numba.njit("i8(i8, i8, i8)", nogil=True, cache=True)
def slice_start(count: int, world_size: int, rank: int) -> int:
    """The index of the first value that ``rank`` sums for all; its slice ends where that of the next rank begins."""
    share = (count + world_size * ALIGN - 1) // (world_size * ALIGN) * ALIGN
    return min(count, rank * share)


# -- shared buffers: reduced in place --------------------------------------------------------------------------------

NOT_ARRIVED, HAS_ARRIVED, HAS_SUMMED, COMPLETE = range(4)  # or MISMATCH
# Modes: sum into all buffers; sum each owner's slice into the owner's buffer only; copy the slices from their owners.
TO_ALL, TO_OWNERS, FETCH = range(3)


@numba.njit("void(i8, i8, i8, i8, i8, i8, i8, i8, i8)", nogil=True, cache=True)
def _do_own_part(
    control: int,
    sum_rows: int,
    rows: int,
    count: int,
    item: int,
    mode: int,
    first_owner: int,
    num_owners: int,
    out: int,
) -> None:
    """This rank's part. An *owner* is a rank whose buffer holds one slice for all; FETCH copies them to ``out``.

    The owners are ``num_owners`` ranks from ``first_owner`` on.
    """
    words = words_at(control, CONTROL_WORDS)
    rank, world_size = words[RANK], words[WORLD]
    addresses = words_at(rows, world_size)
    first, end = slice_start(count, world_size, rank), slice_start(count, world_size, rank + 1)
    if mode == TO_ALL:
        call_sum(sum_rows, rows, world_size, 0, first, end)
        return
    for index in range(num_owners):
        begin, stop = slice_start(count, num_owners, index), slice_start(count, num_owners, index + 1)
        owner = addresses[first_owner + index]
        if mode == TO_OWNERS:  # all ranks sum, even if there are fewer owners
            begin, stop = max(begin, first), min(stop, end)
            if stop > begin:
                call_sum(sum_rows, rows, world_size, owner, begin, stop)
        elif stop > begin and owner != out:
            copy(out + begin * item, owner + begin * item, (stop - begin) * item)


@numba.njit("i8(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)", nogil=True, cache=True)
def in_place(
    control: int,
    sum_rows: int,
    rows: int,
    count: int,
    item: int,
    mode: int,
    first_owner: int,
    num_owners: int,
    out: int,
    fingerprint: int,
    sequence: int,
    phase: int,
    spins: int,
) -> int:
    """Advance a collective on the shared buffers at ``rows`` as far as possible; returns its new ``phase``."""
    if phase == NOT_ARRIVED:
        arrive(control, sequence, fingerprint)
        phase = HAS_ARRIVED
    if phase == HAS_ARRIVED and all_reached(control, ARRIVED, sequence, spins):
        if not fingerprints_agree(control, sequence, fingerprint):
            return MISMATCH
        _do_own_part(control, sum_rows, rows, count, item, mode, first_owner, num_owners, out)
        publish(control, DONE, sequence)
        phase = HAS_SUMMED
    if phase == HAS_SUMMED and all_reached(control, DONE, sequence, spins):
        phase = COMPLETE
    return phase


@numba.njit("void(i8, i8, i8, i8, i8, i8)", nogil=True, cache=True)
def sum_range(sum_rows: int, rows: int, num_rows: int, out: int, first: int, end: int) -> None:
    """Sum some values of the buffers at ``rows`` into the buffer at ``out``, or if it is 0 into all of them."""
    call_sum(sum_rows, rows, num_rows, out, first, end)


# -- private tensors: through the slots -------------------------------------------------------------------------------


@numba.njit("i8(i8, i8, i8)", nogil=True, cache=True)
def slots_of(control: int, sequence: int, world_size: int) -> int:
    """The address of the list of all ranks' slots for a chunk."""
    return control + 8 * (CONTROL_WORDS + sequence % NUM_SLOTS * world_size)


@numba.njit("i8(i8, i8)", nogil=True, cache=True)
def _row_scratch(control: int, world_size: int) -> int:
    """The address of the room for a list of a sum's inputs."""
    return control + 8 * (CONTROL_WORDS + NUM_SLOTS * world_size)


@numba.njit("void(i8, i8, i8)", nogil=True, cache=True)
def _copy_in(control: int, state: int, chunk: int) -> None:
    """Copy this rank's data for a chunk into its slot."""
    words, work = words_at(control, CONTROL_WORDS), words_at(state, STATE_WORDS)
    rank, world_size = words[RANK], words[WORLD]
    slot = words_at(slots_of(control, work[FIRST_SEQUENCE] + chunk, world_size), world_size)[rank]
    done = chunk * work[CHUNK_COUNT]
    width = min(work[CHUNK_COUNT], work[COUNT] - done) * work[ITEM_BYTES]
    start = work[IN] + done * work[ITEM_BYTES]
    kind = work[KIND]
    if kind in (SCATTER, EXCHANGE):
        for peer in range(world_size):
            copy(
                slot + peer * work[CHUNK_COUNT] * work[ITEM_BYTES], start + peer * work[COUNT] * work[ITEM_BYTES], width
            )
    elif kind != BROADCAST or rank == work[ROOT]:
        copy(slot, start, width)


@numba.njit("void(i8, i8, i8)", nogil=True, cache=True)
def _sum_own_slice(control: int, sum_rows: int, state: int) -> None:
    """Between the two barriers of SLICES: sum this rank's slice of all slots into its own slot."""
    words, work = words_at(control, CONTROL_WORDS), words_at(state, STATE_WORDS)
    rank, world_size = words[RANK], words[WORLD]
    rows = slots_of(control, work[FIRST_SEQUENCE] + work[CHUNK], world_size)
    width = min(work[CHUNK_COUNT], work[COUNT] - work[CHUNK] * work[CHUNK_COUNT])
    first, end = slice_start(width, world_size, rank), slice_start(width, world_size, rank + 1)
    call_sum(sum_rows, rows, world_size, words_at(rows, world_size)[rank], first, end)


@numba.njit("void(i8, i8, i8, i8, i8)", nogil=True, cache=True)
def _sum_all(control: int, sum_rows: int, sequence: int, tensor: int, count: int) -> None:
    """Sum the others' slots and this rank's own values, which are still in ``tensor``, in rank order."""
    words = words_at(control, CONTROL_WORDS)
    rank, world_size = words[RANK], words[WORLD]
    slots = words_at(slots_of(control, sequence, world_size), world_size)
    rows = _row_scratch(control, world_size)
    for peer in range(world_size):
        words_at(rows, world_size)[peer] = slots[peer] if peer != rank else tensor
    call_sum(sum_rows, rows, world_size, tensor, 0, count)


@numba.njit("void(i8, i8, i8)", nogil=True, cache=True)
def _copy_out(control: int, sum_rows: int, state: int) -> None:
    """Copy or sum the current chunk from the slots into this rank's tensor."""
    words, work = words_at(control, CONTROL_WORDS), words_at(state, STATE_WORDS)
    rank, world_size, item, kind = words[RANK], words[WORLD], work[ITEM_BYTES], work[KIND]
    sequence = work[FIRST_SEQUENCE] + work[CHUNK]
    slots = words_at(slots_of(control, sequence, world_size), world_size)
    done = work[CHUNK] * work[CHUNK_COUNT]
    width = min(work[CHUNK_COUNT], work[COUNT] - done)
    out = work[OUT] + done * item
    if kind == DIRECT:
        _sum_all(control, sum_rows, sequence, out, width)
    elif kind == SLICES:
        for peer in range(world_size):
            first, end = slice_start(width, world_size, peer), slice_start(width, world_size, peer + 1)
            copy(out + first * item, slots[peer] + first * item, (end - first) * item)
    elif kind == GATHER:
        for peer in range(world_size):
            copy(out + peer * work[COUNT] * item, slots[peer], width * item)
    elif kind == BROADCAST:
        if rank != work[ROOT]:
            copy(out, slots[work[ROOT]], width * item)
    elif kind == EXCHANGE:
        for peer in range(world_size):
            copy(out + peer * work[COUNT] * item, slots[peer] + rank * work[CHUNK_COUNT] * item, width * item)
    else:
        rows = _row_scratch(control, world_size)
        for peer in range(world_size):
            words_at(rows, world_size)[peer] = slots[peer] + rank * work[CHUNK_COUNT] * item
        call_sum(sum_rows, rows, world_size, out, 0, width)


@numba.njit("i8(i8, i8, i8, i8)", nogil=True, cache=True)
def through_slots(control: int, sum_rows: int, state: int, spins: int) -> int:
    """Advance a collective as far as the other ranks allow; returns 1 when it is complete, else 0 or MISMATCH."""
    work = words_at(state, STATE_WORDS)
    while work[CHUNK] < work[NUM_CHUNKS]:
        while work[COPIED_IN] < min(work[NUM_CHUNKS], work[CHUNK] + 2):
            _copy_in(control, state, work[COPIED_IN])
            if work[COPIED_IN] == 0:
                arrive(control, work[FIRST_SEQUENCE], work[FINGERPRINT])
            else:
                publish(control, ARRIVED, work[FIRST_SEQUENCE] + work[COPIED_IN])
            work[COPIED_IN] += 1
        sequence = work[FIRST_SEQUENCE] + work[CHUNK]
        if not all_reached(control, ARRIVED, sequence, spins):
            return 0
        if work[CHUNK] == 0 and not fingerprints_agree(control, sequence, work[FINGERPRINT]):
            return MISMATCH
        if work[KIND] == SLICES:
            if work[SUMMED] <= work[CHUNK]:
                _sum_own_slice(control, sum_rows, state)
                work[SUMMED] = work[CHUNK] + 1
                publish(control, DONE, sequence)
            if not all_reached(control, DONE, sequence, spins):
                return 0
        _copy_out(control, sum_rows, state)
        work[CHUNK] += 1
    return 1


@numba.njit("i8(i8)", nogil=True, cache=True)
def num_chunks(num_bytes: int) -> int:
    """The number of slots that ``num_bytes`` fill."""
    return (num_bytes + SLOT_BYTES - 1) // SLOT_BYTES


@numba.njit("i8(i8, i8, i8, i8)", nogil=True, cache=True)
def reduce_eagerly(control: int, small: int, address: int, spins: int) -> int:
    """An all-reduce in which every rank sums everything, as far as the other ranks have arrived.

    Returns the number of chunks that were reduced, or MISMATCH.

    It reserves its sequence numbers itself and takes few arguments: doing either in Python would take longer than the
    synchronization. The rest continues as DIRECT work, with one more chunk copied in than copied out.
    """
    words, call = words_at(control, CONTROL_WORDS), words_at(small, SMALL_WORDS)
    rank, world_size, num_bytes = words[RANK], words[WORLD], call[SMALL_BYTES]
    chunks: int = num_chunks(num_bytes)
    sequence = words[LAST_SEQUENCE] + 1
    words[LAST_SEQUENCE] += chunks
    copied_in = 0
    for chunk in range(chunks):
        while copied_in < min(chunks, chunk + 2):
            slot = words_at(slots_of(control, sequence + copied_in, world_size), world_size)[rank]
            copy(slot, address + copied_in * SLOT_BYTES, min(SLOT_BYTES, num_bytes - copied_in * SLOT_BYTES))
            if copied_in == 0:
                arrive(control, sequence, call[SMALL_FINGERPRINT])
            else:
                publish(control, ARRIVED, sequence + copied_in)
            copied_in += 1
        if not all_reached(control, ARRIVED, sequence + chunk, spins):
            return chunk
        if chunk == 0 and not fingerprints_agree(control, sequence, call[SMALL_FINGERPRINT]):
            return MISMATCH
        done = chunk * SLOT_BYTES
        count = min(SLOT_BYTES, num_bytes - done) // call[SMALL_ITEM_BYTES]
        _sum_all(control, call[SMALL_SUM], sequence + chunk, address + done, count)
    return chunks
