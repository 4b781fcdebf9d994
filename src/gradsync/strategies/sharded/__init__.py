"""The optimizer sharded over the ranks: each steps its own slice of every bucket. See ``strategy.py``."""
