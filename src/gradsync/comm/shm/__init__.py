"""The shared-memory transport, for ranks on one host."""
