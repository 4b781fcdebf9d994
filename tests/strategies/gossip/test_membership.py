"""Membership views and their epochs: which of two epochs is older, if any."""

from __future__ import annotations

from gradsync.strategies.gossip.membership import MembershipEpoch, MembershipView


def test_membership_epochs_are_partially_ordered() -> None:
    membership = MembershipView({0: "a", 1: "b", 2: "c"})
    first = membership.epoch(5)
    membership.left[2] = 7
    assert membership.epoch(6) == first, "a member that leaves in order takes part until then"
    left = membership.epoch(7)
    assert first.is_before(left)
    assert not left.is_before(first)
    assert left.members == [0, 1]
    other = MembershipEpoch(first.joined, frozenset({1}))
    assert not other.is_before(left)
    assert not left.is_before(other), "each knows of another death: neither is older"
    membership.merge(MembershipView({3: "d"}, {1: "gone"}))
    assert membership.epoch(9).members == [0, 3]
    assert other.is_before(membership.epoch(9))
    assert MembershipEpoch.from_json(membership.epoch(9).to_json()) == membership.epoch(9)
