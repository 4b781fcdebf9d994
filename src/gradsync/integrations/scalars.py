"""The scalars of a step record, under the same names in every integration."""

from __future__ import annotations

from gradsync.profiling.record import PARTS, StepRecord


def change_scalars_of(record: StepRecord) -> dict[str, float]:
    """What the changes of the members before this record were, as flat numbers; empty without a change.

    >>> from gradsync.profiling import Breakdown, StepRecord
    >>> from gradsync.profiling.record import Change
    >>> from gradsync.integrations.scalars import change_scalars_of
    >>> change = Change(epoch=3, cause="a test", members=(0, 2), lost=(1,), discarded=True, stalled_s=0.25)
    >>> record = StepRecord(step=7, rank=0, began_s=0.0, step_s=0.4, parts=Breakdown(compute_s=0.4), changes=(change,))
    >>> found = change_scalars_of(record)
    >>> found["epoch"], found["members"], found["lost_members"], found["stalled_s"]
    (3.0, 2.0, 1.0, 0.25)
    """
    changes = record.changes
    if not changes:
        return {}
    return {
        "epoch": float(changes[-1].epoch),
        "members": float(changes[-1].num_members),
        "lost_members": float(sum(len(change.lost) for change in changes)),
        "heals": float(sum(len(change.healed) for change in changes)),
        "discarded_steps": float(sum(change.discarded for change in changes)),
        "stalled_s": sum(change.stalled_s for change in changes),
    }


def scalars_of(record: StepRecord) -> dict[str, float]:
    """A record as flat numbers, in seconds and bytes.

    >>> from gradsync.profiling import Breakdown, StepRecord
    >>> from gradsync.integrations.scalars import scalars_of
    >>> parts = Breakdown(compute_s=0.3, wire_s=0.1)
    >>> found = scalars_of(StepRecord(step=7, rank=0, began_s=0.0, step_s=0.4, parts=parts, sent_bytes=100))
    >>> found["step_s"], found["wire_s"], found["sync_share"], found["sent_bytes"]
    (0.4, 0.1, 0.25, 100.0)
    """
    found = {"step_s": record.step_s}
    found |= {f"{part}_s": float(getattr(record.parts, f"{part}_s")) for part in PARTS}
    found["sync_share"] = record.parts.sync_s / record.step_s if record.step_s > 0.0 else 0.0
    found["sent_bytes"] = float(record.sent_bytes)
    if record.staleness is not None:
        found["staleness"] = float(record.staleness)
    return found
