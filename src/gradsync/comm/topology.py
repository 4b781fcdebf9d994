"""Which ranks are on one host, and whether they can share memory there."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object
from gradsync.comm.shm.segment import host_identity
from gradsync.kernels.shm import futex


@dataclass(frozen=True)
class HostSurvey:
    """Each rank's host, whether any rank has a GPU, and why ranks of one host can't share memory ("": they can)."""

    hosts: list[str]
    has_gpu: bool
    obstacle: str


def survey_hosts(comm: Communicator) -> HostSurvey:
    """Ask all ranks. Blocks: all ranks call it."""
    able = hasattr(os, "memfd_create") and futex.available()
    answers = all_gather_object(comm, [able, torch.accelerator.is_available(), "/".join(host_identity())])
    has_gpu = any(answer[1] for answer in answers)
    obstacle = ""
    if has_gpu:
        obstacle = "there are GPUs, whose tensors torch.distributed moves"
    elif not all(answer[0] for answer in answers):
        obstacle = "some system has no memfd, or its futex call is not known"
    return HostSurvey([str(answer[2]) for answer in answers], has_gpu, obstacle)


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
