"""Which ranks are on one host, and whether they can share memory there."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object
from gradsync.comm.shm.segment import host_identity
from gradsync.kernels.shm import futex


def survey_hosts(comm: Communicator) -> tuple[list[str], str]:
    """Each rank's host, and why ranks of one host can't share memory (empty if they can). Blocks: all ranks call it."""
    able = hasattr(os, "memfd_create") and futex.available()
    answers = all_gather_object(comm, [able, torch.accelerator.is_available(), "/".join(host_identity())])
    hosts = [str(answer[2]) for answer in answers]
    if any(answer[1] for answer in answers):
        return hosts, "there are GPUs, whose tensors torch.distributed moves"
    if not all(answer[0] for answer in answers):
        return hosts, "some system has no memfd, or its futex call is not known"
    return hosts, ""


def ranks_by_host(hosts: Sequence[Hashable]) -> list[list[int]]:
    """The ranks of each host in their order; the hosts in the order of their first ranks."""
    ranks: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return list(ranks.values())


def describe_hosts(ranks: Sequence[Sequence[int]]) -> str:
    """Say how many hosts there are, and how many ranks on each: "2 hosts x 4 ranks"."""
    sizes = [len(host) for host in ranks]
    count = f"{len(sizes)} host{'s' if len(sizes) > 1 else ''}"
    if len(set(sizes)) == 1:
        return f"{count} x {sizes[0]} rank{'s' if sizes[0] > 1 else ''}"
    return f"{count} with {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks"
