"""TCP connections of our own between ranks: handshake, mesh, and all-to-all."""
