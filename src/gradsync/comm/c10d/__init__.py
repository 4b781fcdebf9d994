"""torch.distributed as a transport: Gloo for CPU tensors, NCCL for CUDA ones."""
