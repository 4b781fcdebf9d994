"""What must be the same on all ranks: checks at attach, copies of state, buffers, batches, and the step header."""
