"""Several ranks on each of several hosts: shared memory within a host, torch.distributed between hosts."""
