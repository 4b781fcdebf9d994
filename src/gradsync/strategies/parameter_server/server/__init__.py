"""The server: ``server`` reads sockets, ``shard_service`` serves workers, ``shard`` holds parameters and optimizer."""
