"""The compiled part of the shared-memory transport: how ranks meet, and how data goes through the slots.

All ranks of a group share a control segment: a part for each rank, with its counters, its ring of slots and its
mailboxes. A *floor* is a private array of 64-bit words that says where all of that is: the kernels take its address.

[Note: turns] Every collective is a sequence of *turns*, counted over the whole life of the communicator. In a turn each
rank puts something where all can see it and raises its ``arrived`` counter; when all have arrived it takes what it
needs. Where a second meeting is needed it raises ``done``.

[Note: four slots suffice] Turn t goes through slot t % 4. A rank puts one turn ahead: it takes turn t-1 before it puts
turn t+1, so a rank that has arrived at t-1 has taken everything up to t-3. To take t-1 this rank saw everybody arrive
at t-1. So nobody still reads the slot of t-3 when t+1 overwrites it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.comm.shm_atomics import (
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
from gradsync.compiled import numba

# Where in a rank's part things are: counters, slots, and a mailbox for each peer.
ARRIVED, DONE, SLEEPING, DOORBELL = (line * LINE_BYTES for line in range(4))
SLOTS = 4096
SLOT_BYTES = 64 * 1024
RING = 4
MAILBOXES = SLOTS + RING * SLOT_BYTES
SENT, RECEIVED, MAIL = 0, LINE_BYTES, 4096  # within a mailbox: two counters, and what is sent
MAIL_BYTES = 256 * 1024
MAILBOX_BYTES = MAIL + MAIL_BYTES

# The words of a floor; behind them the addresses of all slots, by slot and rank, and room for those of a sum's inputs.
RANK, WORLD, PARTS, STRIDE, TURNS, FLOOR_WORDS = range(6)  # TURNS: how many were reserved so far

# The words of what can be reduced in one call: see `reduce_eagerly`.
SMALL_SUM, SMALL_BYTES, SMALL_ITEM, SMALL_WORDS = range(4)

# The words of a collective that goes through the slots.
KIND, TURN, PUT, NUM_TURNS, FIRST, SUMMED, IN, OUT, COUNT, ITEM, WIDTH, ROOT, STATE_WORDS = range(13)
DIRECT, SLICES, GATHER, BROADCAST, SCATTER, EXCHANGE = range(6)

ALIGN = 64  # values: no two ranks write to one cache line


@numba.njit(inline="always")
def words_at(address: int, count: int) -> Any:
    """The 64-bit words at an address, as an array."""
    return numba.carray(pointer(address), count, np.int64)


@numba.njit("b1(i8, i8, i8, i8, i8)", nogil=True, cache=True)
def wait_all(address: int, stride_bytes: int, num_ranks: int, value: int, spins: int) -> bool:
    """Whether every rank's counter has reached ``value``, looking at most ``spins`` times at each."""
    for rank in range(num_ranks):
        looked = 0
        while load_acquire(address + rank * stride_bytes) < value:
            looked += 1
            if looked >= spins:
                return False
            relax()
    return True


@numba.njit("void(i8)", nogil=True, cache=True)
def ring(floor: int) -> None:
    """Wake the ranks that sleep."""
    words = words_at(floor, FLOOR_WORDS)
    for rank in range(words[WORLD]):
        part = words[PARTS] + rank * words[STRIDE]
        if rank != words[RANK] and load_acquire(part + SLEEPING) != 0:
            increment(part + DOORBELL)
            wake(part + DOORBELL)


@numba.njit("void(i8, i8, i8)", nogil=True, cache=True)
def publish(floor: int, counter: int, number: int) -> None:
    """Set this rank's counter, and wake who may be waiting for it."""
    words = words_at(floor, FLOOR_WORDS)
    store_and_fence(words[PARTS] + words[RANK] * words[STRIDE] + counter, number)
    ring(floor)


@numba.njit("b1(i8, i8, i8, i8)", nogil=True, cache=True)
def all_at(floor: int, counter: int, number: int, spins: int) -> bool:
    """Whether all ranks' counters have come to ``number``."""
    words = words_at(floor, FLOOR_WORDS)
    arrived: bool = wait_all(words[PARTS] + counter, words[STRIDE], words[WORLD], number, spins)
    return arrived


@numba.njit("void(i8, i8)", nogil=True, cache=True)
def store(address: int, value: int) -> None:
    """Set a word that no sleeper waits for."""
    store_and_fence(address, value)


@numba.njit("i8(i8)", nogil=True, cache=True)
def load(address: int) -> int:
    """Read a word, and whatever was written before it was set."""
    value: int = load_acquire(address)
    return value


@numba.njit("i8(i8, i8, i8)", nogil=True, cache=True)
def slice_start(count: int, world_size: int, rank: int) -> int:
    """The first value that ``rank`` sums for all; its last is where the next rank's begin."""
    share = (count + world_size * ALIGN - 1) // (world_size * ALIGN) * ALIGN
    return min(count, rank * share)


# -- buffers that lie in shared memory: reduced in place --------------------------------------------------------------

NOT_YET, HAS_ARRIVED, HAS_SUMMED, IS_OVER = range(4)
EVERYWHERE, APART, SHARE = range(3)  # sum into all buffers; each lane's values into its buffer; or fetch the lanes'


@numba.njit("void(i8, i8, i8, i8, i8, i8, i8, i8)", nogil=True, cache=True)
def _do_slice(floor: int, sum_rows: int, rows: int, count: int, item: int, mode: int, lanes: int, out: int) -> None:
    """This rank's part. A *lane* is a rank whose buffer holds a slice for all, which SHARE fetches to ``out``."""
    words = words_at(floor, FLOOR_WORDS)
    rank, world_size = words[RANK], words[WORLD]
    addresses = words_at(rows, world_size)
    first, end = slice_start(count, world_size, rank), slice_start(count, world_size, rank + 1)
    if mode == EVERYWHERE:
        call_sum(sum_rows, rows, world_size, 0, first, end)
        return
    for lane in range(lanes):
        begin, stop = slice_start(count, lanes, lane), slice_start(count, lanes, lane + 1)
        if mode == APART:  # all ranks sum, also where the lanes are fewer
            begin, stop = max(begin, first), min(stop, end)
            if stop > begin:
                call_sum(sum_rows, rows, world_size, addresses[lane], begin, stop)
        elif stop > begin and addresses[lane] != out:
            copy(out + begin * item, addresses[lane] + begin * item, (stop - begin) * item)


@numba.njit("i8(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)", nogil=True, cache=True)
def in_place(
    floor: int,
    sum_rows: int,
    rows: int,
    count: int,
    item: int,
    mode: int,
    lanes: int,
    out: int,
    number: int,
    phase: int,
    spins: int,
) -> int:
    """Move a collective on the buffers at ``rows`` on from its ``phase``; returns the phase it came to."""
    if phase == NOT_YET:
        publish(floor, ARRIVED, number)
        phase = HAS_ARRIVED
    if phase == HAS_ARRIVED and all_at(floor, ARRIVED, number, spins):
        _do_slice(floor, sum_rows, rows, count, item, mode, lanes, out)
        publish(floor, DONE, number)
        phase = HAS_SUMMED
    if phase == HAS_SUMMED and all_at(floor, DONE, number, spins):
        phase = IS_OVER
    return phase


@numba.njit("void(i8, i8, i8, i8, i8)", nogil=True, cache=True)
def sum_everywhere(sum_rows: int, rows: int, num_rows: int, first: int, end: int) -> None:
    """Sum some values of the buffers at ``rows`` into all of them."""
    call_sum(sum_rows, rows, num_rows, 0, first, end)


# -- anything else: through the slots ---------------------------------------------------------------------------------


@numba.njit("i8(i8, i8, i8)", nogil=True, cache=True)
def slots_of(floor: int, number: int, world_size: int) -> int:
    """Where the addresses of everybody's slots for a turn are."""
    return floor + 8 * (FLOOR_WORDS + number % RING * world_size)


@numba.njit("i8(i8, i8)", nogil=True, cache=True)
def _room_for_rows(floor: int, world_size: int) -> int:
    return floor + 8 * (FLOOR_WORDS + RING * world_size)


@numba.njit("void(i8, i8, i8)", nogil=True, cache=True)
def _put(floor: int, state: int, turn: int) -> None:
    words, work = words_at(floor, FLOOR_WORDS), words_at(state, STATE_WORDS)
    rank, world_size = words[RANK], words[WORLD]
    slot = words_at(slots_of(floor, work[FIRST] + turn, world_size), world_size)[rank]
    done = turn * work[WIDTH]
    width = min(work[WIDTH], work[COUNT] - done) * work[ITEM]
    start = work[IN] + done * work[ITEM]
    kind = work[KIND]
    if kind in (SCATTER, EXCHANGE):
        for peer in range(world_size):
            copy(slot + peer * work[WIDTH] * work[ITEM], start + peer * work[COUNT] * work[ITEM], width)
    elif kind != BROADCAST or rank == work[ROOT]:
        copy(slot, start, width)


@numba.njit("void(i8, i8, i8)", nogil=True, cache=True)
def _sum_my_slice(floor: int, sum_rows: int, state: int) -> None:
    """Between two meetings: sum this rank's slice of all slots into its own slot."""
    words, work = words_at(floor, FLOOR_WORDS), words_at(state, STATE_WORDS)
    rank, world_size = words[RANK], words[WORLD]
    rows = slots_of(floor, work[FIRST] + work[TURN], world_size)
    width = min(work[WIDTH], work[COUNT] - work[TURN] * work[WIDTH])
    first, end = slice_start(width, world_size, rank), slice_start(width, world_size, rank + 1)
    call_sum(sum_rows, rows, world_size, words_at(rows, world_size)[rank], first, end)


@numba.njit("void(i8, i8, i8, i8, i8)", nogil=True, cache=True)
def _sum_all(floor: int, sum_rows: int, number: int, tensor: int, count: int) -> None:
    """Sum the others' slots and this rank's own values, which are still where they were, in rank order."""
    words = words_at(floor, FLOOR_WORDS)
    rank, world_size = words[RANK], words[WORLD]
    slots = words_at(slots_of(floor, number, world_size), world_size)
    rows = _room_for_rows(floor, world_size)
    for peer in range(world_size):
        words_at(rows, world_size)[peer] = slots[peer] if peer != rank else tensor
    call_sum(sum_rows, rows, world_size, tensor, 0, count)


@numba.njit("void(i8, i8, i8)", nogil=True, cache=True)
def _take(floor: int, sum_rows: int, state: int) -> None:
    words, work = words_at(floor, FLOOR_WORDS), words_at(state, STATE_WORDS)
    rank, world_size, item, kind = words[RANK], words[WORLD], work[ITEM], work[KIND]
    number = work[FIRST] + work[TURN]
    slots = words_at(slots_of(floor, number, world_size), world_size)
    done = work[TURN] * work[WIDTH]
    width = min(work[WIDTH], work[COUNT] - done)
    out = work[OUT] + done * item
    if kind == DIRECT:
        _sum_all(floor, sum_rows, number, out, width)
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
            copy(out + peer * work[COUNT] * item, slots[peer] + rank * work[WIDTH] * item, width * item)
    else:
        rows = _room_for_rows(floor, world_size)
        for peer in range(world_size):
            words_at(rows, world_size)[peer] = slots[peer] + rank * work[WIDTH] * item
        call_sum(sum_rows, rows, world_size, out, 0, width)


@numba.njit("b1(i8, i8, i8, i8)", nogil=True, cache=True)
def through_slots(floor: int, sum_rows: int, state: int, spins: int) -> bool:
    """Move a collective on as far as the other ranks let it; True when it is over."""
    work = words_at(state, STATE_WORDS)
    while work[TURN] < work[NUM_TURNS]:
        while work[PUT] < min(work[NUM_TURNS], work[TURN] + 2):
            _put(floor, state, work[PUT])
            publish(floor, ARRIVED, work[FIRST] + work[PUT])
            work[PUT] += 1
        number = work[FIRST] + work[TURN]
        if not all_at(floor, ARRIVED, number, spins):
            return False
        if work[KIND] == SLICES:
            if work[SUMMED] <= work[TURN]:
                _sum_my_slice(floor, sum_rows, state)
                work[SUMMED] = work[TURN] + 1
                publish(floor, DONE, number)
            if not all_at(floor, DONE, number, spins):
                return False
        _take(floor, sum_rows, state)
        work[TURN] += 1
    return True


@numba.njit("i8(i8)", nogil=True, cache=True)
def num_turns(num_bytes: int) -> int:
    """How many slotfuls there are in so many bytes."""
    return (num_bytes + SLOT_BYTES - 1) // SLOT_BYTES


@numba.njit("i8(i8, i8, i8, i8)", nogil=True, cache=True)
def reduce_eagerly(floor: int, small: int, address: int, spins: int) -> int:
    """An all-reduce in which everybody sums everything, as far as the others are here: returns the turns it took.

    It reserves its turns itself, and takes few arguments: Python would be slower at both than the ranks are at meeting.
    What is left goes on as DIRECT work, with one turn more put than taken.
    """
    words, what = words_at(floor, FLOOR_WORDS), words_at(small, SMALL_WORDS)
    rank, world_size, num_bytes = words[RANK], words[WORLD], what[SMALL_BYTES]
    turns: int = num_turns(num_bytes)
    number = words[TURNS] + 1
    words[TURNS] += turns
    put = 0
    for turn in range(turns):
        while put < min(turns, turn + 2):
            slot = words_at(slots_of(floor, number + put, world_size), world_size)[rank]
            copy(slot, address + put * SLOT_BYTES, min(SLOT_BYTES, num_bytes - put * SLOT_BYTES))
            publish(floor, ARRIVED, number + put)
            put += 1
        if not all_at(floor, ARRIVED, number + turn, spins):
            return turn
        done = turn * SLOT_BYTES
        count = min(SLOT_BYTES, num_bytes - done) // what[SMALL_ITEM]
        _sum_all(floor, what[SMALL_SUM], number + turn, address + done, count)
    return turns
