"""Compiled code of the shared-memory transport: atomics, collectives and sums."""
