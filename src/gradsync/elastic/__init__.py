"""Runs whose workers may die, join and leave: who takes part (membership), and how training goes on (recovery)."""
