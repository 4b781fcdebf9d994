"""Failure detection: heartbeats, and the guard that names the rank to blame when a collective fails."""
