"""What is known of who takes part, and which of two that know different things is older."""

from __future__ import annotations

from gradsync.gossip.book import Book, Epoch


def test_epochs_are_ordered_as_what_is_known() -> None:
    book = Book({0: "a", 1: "b", 2: "c"})
    first = book.epoch(5)
    book.left[2] = 7
    assert book.epoch(6) == first, "who leaves in order was there until then"
    left = book.epoch(7)
    assert first.is_before(left)
    assert not left.is_before(first)
    assert left.members == [0, 1]
    other = Epoch(first.joined, frozenset({1}))
    assert not other.is_before(left)
    assert not left.is_before(other), "two deaths that were learnt apart: neither is older"
    book.add(Book({3: "d"}, {1: "gone"}))
    assert book.epoch(9).members == [0, 3]
    assert other.is_before(book.epoch(9))
    assert Epoch.from_json(book.epoch(9).to_json()) == book.epoch(9)
