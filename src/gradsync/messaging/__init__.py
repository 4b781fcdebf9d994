"""ZeroMQ messages for parameter servers and gossip: format, schema, endpoints and keys."""
