"""Buckets: flat buffers whose views are the gradients, one slot per parameter, and the bucket plan."""
