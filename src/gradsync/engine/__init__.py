"""The only code with autograd and optimizer hooks: it turns their events into calls of a strategy."""
