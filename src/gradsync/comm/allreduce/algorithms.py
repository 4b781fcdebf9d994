"""All-reduce over sends and receives: ring, halving, doubling, tree and direct, each written once for all transports.

An algorithm is a generator over a channel. It starts sends and receives, and yields them one by one: the code after a
``yield`` runs when the yielded message is over. When the generator ends, all messages are over. executor.py resumes it.

[Note: the same bits everywhere] Every value is summed along a path that depends only on ranks and sizes, so the same
inputs give the same bits on every run. All ranks get the same bits, because one rank computes the sum and the others
get a copy: the owner of a slice (ring, halving, direct) or the root (tree). In ``doubling`` every rank sums everything;
there both of a pair add the same two values in the same order, the lower rank's first. Another algorithm, or another
number of ranks, may give other bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from gradsync.comm.allreduce.primitives import (
    AHEAD,
    Channel,
    Steps,
    cut,
    exchange,
    pieces,
    receive_buffers,
    reduce_rows,
    swap,
    until,
)
from gradsync.comm.base import ReduceOp, Work

Algorithm = Callable[[Channel, Tensor, ReduceOp], Steps]  # the tensor is flat, and overwritten with the result


def ring(channel: Channel, values: Tensor, op: ReduceOp) -> Steps:
    """Each rank exchanges with its two neighbours only: 2(n-1) rounds of 1/n of the data, the fewest bytes possible."""
    n, rank = channel.world_size, channel.rank
    left, right = (rank - 1) % n, (rank + 1) % n
    slices, scratch = cut(values, n), receive_buffers(values)
    for step in range(n - 1):  # slice i starts at rank i, and is complete when it reaches rank i - 1
        give, take = slices[(rank - step) % n], slices[(rank - step - 1) % n]
        yield from exchange(channel, give, right, take, left, op, scratch)
    for step in range(n - 1):
        yield from swap(channel, slices[(rank + 1 - step) % n], right, slices[(rank - step) % n], left)


def halving(channel: Channel, values: Tensor, op: ReduceOp) -> Steps:
    """Recursive halving: halve a rank's share with a partner, log2 n times; then double back. As few bytes as a ring.

    The first partner, with whom the most is exchanged, is the nearest rank: where ranks are numbered by host, one on
    the same host.
    """

    def among_partners(peers: list[tuple[int, bool]]) -> Steps:
        mine, scratch, halvings = values, receive_buffers(values), []
        for peer, is_upper in peers:
            lower, upper = cut(mine, 2)
            mine, theirs = (upper, lower) if is_upper else (lower, upper)
            yield from exchange(channel, theirs, peer, mine, peer, op, scratch)
            halvings.append((peer, mine, theirs))
        for peer, mine, theirs in reversed(halvings):
            yield from swap(channel, mine, peer, theirs, peer)

    return _folded(channel, values, op, among_partners)


def doubling(channel: Channel, values: Tensor, op: ReduceOp) -> Steps:
    """Recursive doubling: exchange everything with a partner, log2 n times. The fewest rounds: for small tensors."""

    def among_partners(peers: list[tuple[int, bool]]) -> Steps:
        scratch = receive_buffers(values)
        for peer, _ in peers:
            yield from exchange(channel, values, peer, values, peer, op, scratch)

    return _folded(channel, values, op, among_partners)


def _folded(
    channel: Channel, values: Tensor, op: ReduceOp, among_partners: Callable[[list[tuple[int, bool]]], Steps]
) -> Steps:
    """Run an algorithm that needs a power of two ranks.

    The ranks beyond send their values to a neighbour, and get the result back.
    ``among_partners`` is given each partner's rank, nearest first, and whether this rank is the upper one of the two.
    """
    n, rank = channel.world_size, channel.rank
    size = 1 << (n.bit_length() - 1)
    extra = n - size  # of the first 2 * extra ranks, the even ones do not take part
    if rank < 2 * extra and rank % 2 == 0:
        yield from exchange(channel, values, rank + 1, values[:0], rank + 1, op, [])
        yield channel.recv(values, rank + 1)
        return
    if rank < 2 * extra:
        yield from exchange(channel, values[:0], rank - 1, values, rank - 1, op, receive_buffers(values))
    place = rank // 2 if rank < 2 * extra else rank - extra  # among the ranks that take part
    peers = []
    for bit in range(size.bit_length() - 1):
        partner = place ^ (1 << bit)
        peers.append((2 * partner + 1 if partner < extra else partner + extra, place > partner))
    yield from among_partners(peers)
    if rank < 2 * extra:
        yield channel.send(values, rank - 1)


def tree(channel: Channel, values: Tensor, op: ReduceOp) -> Steps:
    """Sum up a binary tree to rank 0, and send the result down again: 2 log2 n rounds, and the fewest messages."""
    n, rank = channel.world_size, channel.rank
    parent = (rank - 1) // 2 if rank > 0 else None
    children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < n]
    parts = pieces(values)
    scratch = {child: receive_buffers(values) for child in children}
    sends: deque[Work] = deque()

    def post(at: int) -> list[tuple[Tensor, Work]]:
        if at >= len(parts):
            return []
        here = [(child, scratch[child][at % AHEAD][: parts[at].numel()]) for child in children]
        return [(buffer, channel.recv(buffer, child)) for child, buffer in here]

    posted = deque(post(at) for at in range(AHEAD))
    for at, part in enumerate(parts):
        arriving = posted.popleft()
        for _, work in arriving:
            yield work
        if arriving:
            reduce_rows([part, *(buffer for buffer, _ in arriving)], op, out=part)
        posted.append(post(at + AHEAD))
        if parent is not None:
            sends.append(channel.send(part, parent))
            yield from until(sends, AHEAD)
    # Not before every part has gone up: sending down to a child that still sends up could deadlock.
    yield from until(sends, 0)
    for part in parts:
        if parent is not None:
            yield channel.recv(part, parent)
        sends.extend(channel.send(part, child) for child in children)
        yield from until(sends, AHEAD * len(children))
    yield from until(sends, 0)


def direct(channel: Channel, values: Tensor, op: ReduceOp) -> Steps:
    """Every rank sends each other rank its slice, and gets that slice's sum back: 2 rounds of n - 1 messages each.

    The owner of a slice adds in rank order, as the shared-memory transport does.
    """
    n, rank = channel.world_size, channel.rank
    others = [(rank + step) % n for step in range(1, n)]  # each rank begins with another one
    blocks = [cut(block, n) for block in pieces(values, n)]
    scratch = values.new_empty(AHEAD, n, max((block[rank].numel() for block in blocks), default=0))

    def scatter(number: int) -> tuple[list[Work], dict[int, Work]]:
        if number >= len(blocks):
            return [], {}
        block, rows = blocks[number], scratch[number % AHEAD]
        recvs = [channel.recv(rows[peer][: block[rank].numel()], peer) for peer in others]
        return recvs, {peer: channel.send(block[peer], peer) for peer in others}

    last: deque[Work] = deque()
    scattered = scatter(0)
    for number, block in enumerate(blocks):
        (recvs, sends), scattered = scattered, scatter(number + 1)
        yield from recvs
        mine, rows = block[rank], scratch[number % AHEAD]
        reduce_rows([mine if peer == rank else rows[peer][: mine.numel()] for peer in range(n)], op, out=mine)
        last.extend(channel.send(mine, peer) for peer in others)
        for peer in others:
            yield sends[peer]  # only now may the sent values be overwritten
            last.append(channel.recv(block[peer], peer))
        yield from until(last, 2 * len(others))
    yield from until(last, 0)


ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring,
    "halving": halving,
    "doubling": doubling,
    "tree": tree,
    "direct": direct,
}
