"""The parameter server: workers push gradients to servers, and pull parameters from them.

``strategy`` is what users name; ``session`` and ``client`` are the worker's side, ``server`` the other one; ``job`` and
``messages`` are what both agree on.
"""
