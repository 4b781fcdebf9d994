"""The advisor: from a few recorded steps and a measured network to what every choice would cost, and which to take.

``measurement``, ``network`` and ``costs`` describe what was measured. ``comm_pattern`` says what a strategy sends and
when, ``cost_model`` and ``simulate`` predict its step time, ``convergence`` holds what is known of its effect on the
loss, and ``advise`` compares the choices.
"""

from __future__ import annotations

from gradsync.advisor.advise import Advice, Row, advise, default_choices, scaling
from gradsync.advisor.cost_model import CannotPredict, Compute, Prediction, calibrate, predict
from gradsync.advisor.costs import Cost, Costs, measure_costs
from gradsync.advisor.measurement import Choice, Gradient, Measurement
from gradsync.advisor.network import Network, measure_network

__all__ = [
    "Advice",
    "CannotPredict",
    "Choice",
    "Compute",
    "Cost",
    "Costs",
    "Gradient",
    "Measurement",
    "Network",
    "Prediction",
    "Row",
    "advise",
    "calibrate",
    "default_choices",
    "measure_costs",
    "measure_network",
    "predict",
    "scaling",
]
