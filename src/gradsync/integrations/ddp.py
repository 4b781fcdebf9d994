"""gradsync's reducers as a communication hook of ``DistributedDataParallel``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradsync import spec
from gradsync.buckets.bucket import BucketPlan
from gradsync.comm.base import Communicator
from gradsync.comm.connect import connect
from gradsync.errors import GradSyncError, NonFiniteGradient
from gradsync.reducers import Compressed, Driver, Reducer
from gradsync.reducers.background import make_driver
from gradsync.reducers.codec_rules import CodecRule

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

LAYOUT_FINAL_AFTER = 2  # backwards: DDP rebuilds its buckets after the first


def comm_hook(
    model: DistributedDataParallel,
    *,
    codec: CodecRule | None = None,
    reducer: Reducer | str | None = None,
    comm: Communicator | None = None,
) -> CommHook:
    """Average a DDP model's gradients by one of gradsync's reducers. Returns the hook, which holds the reducer's state.

    The first two backwards are exact, because DDP rebuilds its buckets in them. ``comm``: a communicator over DDP's
    ranks; default: that of :func:`gradsync.connect`, over all ranks of the run. Save ``hook.state_dict()`` on each rank
    with the rest of a checkpoint.

    >>> import gradsync, torch
    >>> from gradsync.integrations import comm_hook
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
    >>> hook = comm_hook(model, codec="int8")
    >>> model(torch.randn(2, 100)).sum().backward()
    >>> hook.steps
    1
    >>> torch.distributed.destroy_process_group()
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"comm_hook requires a DistributedDataParallel; got {type(model).__name__}. For a model of your own call "
            "gradsync.synchronize(model, optimizer)."
        )
    if (codec is None) == (reducer is None):
        raise ValueError(f"give either codec= or reducer=; got {codec=} {reducer=}.")
    chosen = Compressed(codec) if codec is not None else spec.resolve(reducer, "reducer")
    hook = CommHook(model.module, chosen, (connect() if comm is None else comm).unchecked().clone())
    # DDP inspects the annotations, and accepts none or the class itself, not its name.
    model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    return hook


class CommHook:
    """The hook that :func:`comm_hook` registers: a reducer over DDP's buckets. Its collectives keep one fixed order.

    >>> import torch
    >>> from gradsync.integrations import comm_hook
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
    >>> hook = comm_hook(model, codec="int8")
    >>> for _ in range(3):                                  # the third backward is the first one with the codec
    ...     model(torch.randn(2, 100)).sum().backward()
    >>> hook.load_state_dict(hook.state_dict())             # saved and restored on each rank
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, module: torch.nn.Module, reducer: Reducer, comm: Communicator) -> None:
        self.steps = 0
        self._reducer = reducer
        self._comm = comm
        self._params = dict(module.named_parameters())
        self._names = {id(param): name for name, param in self._params.items()}
        self._buckets: list[GradBucket] = []  # of this backward so far
        self._futures: list[torch.futures.Future[Tensor]] = []
        self._plan: BucketPlan | None = None  # DDP's layout, once it is final
        self._driver: Driver | None = None
        self._loaded: dict[str, Any] | None = None
        self._settled = True  # the reducer knows the outcome of the last backward

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce one of DDP's buckets. The future gets its mean once the last bucket of this backward is done."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._buckets.append(bucket)
        self._futures.append(future)
        if self._plan is None:
            bucket.buffer().div_(self._comm.world_size)
            self._comm.all_reduce(bucket.buffer()).wait()
        else:
            self._reduce(bucket, self._plan)
        if bucket.is_last():
            self._finish()
        return future

    def _reduce(self, bucket: GradBucket, plan: BucketPlan) -> None:
        index = bucket.index()
        if index >= len(plan.layout) or plan.layout[index] != self._layout_of(bucket):
            raise GradSyncError(
                f"DDP has rebuilt bucket {index} at backward {self.steps}; expected this only after the first. "
                "Register the hook on a model whose trainable parameters stay the same."
            )
        if self._driver is None:
            self._settle()
            on_cpu = bucket.buffer().device.type == "cpu"
            self._driver = make_driver(self._reducer, self._comm, len(plan.buckets), on_cpu=on_cpu)
        ours = plan.buckets[index]
        ours.begin_step()
        ours.factor = 1.0 / self._comm.world_size
        for slot, grad in zip(ours.slots, bucket.gradients(), strict=True):
            torch.mul(grad, ours.factor, out=slot.view)
        ours.flags.fill_(1.0)
        self._driver.add(ours)

    def _finish(self) -> None:
        """After the last bucket of a backward: wait for all, and hand the means to DDP."""
        if self._driver is not None and self._plan is not None:
            self._driver.drain()
            self._driver = None
            for bucket in self._buckets:
                for slot, grad in zip(self._plan.buckets[bucket.index()].slots, bucket.gradients(), strict=True):
                    grad.copy_(slot.view)
            self._settled = False
            if self._reducer.outcome.is_known:
                self._settle()
            else:
                self._reducer.outcome.start_reading()
        self.steps += 1
        if self.steps == LAYOUT_FINAL_AFTER:
            self._adopt_layout()
        done = list(zip(self._buckets, self._futures, strict=True))
        self._buckets, self._futures = [], []
        for bucket, future in done:
            future.set_result(bucket.buffer())

    def _settle(self) -> None:
        """Read the outcome of the last backward. On a GPU it is read at the next one: see comm/readback.py."""
        if self._settled:
            return
        self._settled = True
        spoilt = self._reducer.nonfinite
        self._reducer.end_step(finite=not spoilt)
        if spoilt:
            raise NonFiniteGradient(f"the gradient of {spoilt[0]} has NaN or inf on some rank.")

    def _adopt_layout(self) -> None:
        ordered = sorted(self._buckets, key=lambda bucket: bucket.index())
        self._plan = BucketPlan([self._layout_of(bucket) for bucket in ordered], [], self._params, self._comm)
        self._reducer.attach(self._plan, self._comm)
        if self._loaded is not None:
            self._reducer.load_state_dict(self._loaded)
            self._loaded = None

    def _layout_of(self, bucket: GradBucket) -> list[str]:
        return [self._names[id(param)] for param in bucket.parameters()]

    def state_dict(self) -> dict[str, Any]:
        """The reducer's state on this rank, by parameter name. Save it on every rank."""
        self._settle()
        waiting = self._loaded  # loaded, but not yet given to the reducer
        return {"rank": self._comm.rank, "reducer": self._reducer.state_dict() if waiting is None else waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned. In a new process it takes effect at the third backward."""
        if state["rank"] != self._comm.rank:
            raise ValueError(f"the state is that of rank {state['rank']}; this is rank {self._comm.rank}.")
        if self._plan is None:
            self._loaded = state["reducer"]
        else:
            if not self._settled:
                self._settled = True
                self._reducer.end_step(finite=False)
            self._reducer.load_state_dict(state["reducer"])
