"""A window: the backwards whose gradients are accumulated before they are synchronized once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Window:
    """The weights of the backwards since the last synchronization.

    The result must be Σ w·g / Σ w over backwards and ranks. Autograd adds gradients up as they are, so each backward's
    must already be weighted when they arrive. With equal weights, the usual case, nothing is multiplied: gradients are
    accumulated in units of the first weight, Σ (w/unit)·g, and the rest, unit / Σ w, is multiplied once before the sum
    over ranks.

    >>> from gradsync.engine.window import Window
    >>> window = Window()
    >>> window.add(4.0), window.add(4.0), window.add(2.0)
    (1.0, 1.0, 0.5)
    >>> window.weight, window.unit
    (10.0, 4.0)
    """

    weight: float = 0.0  # Σ w of this rank
    num_backwards: int = 0  # accumulated so far
    unit: float = 0.0  # the first weight that is not zero
    position: int = 0  # of the last backward in its accumulation, from 1; the same on all ranks, whatever their data

    def add(self, weight: float) -> float:
        """Count one more backward; returns the factor for its gradients when they arrive."""
        self.num_backwards += 1
        self.position += 1
        self.weight += weight
        if weight == 0.0:
            return 0.0
        if self.unit == 0.0:
            self.unit = weight
        return weight / self.unit
