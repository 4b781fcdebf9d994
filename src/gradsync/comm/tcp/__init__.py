"""TCP connections of our own between ranks: handshake, mesh, exchanges, and the transport made of them."""
