"""gradsync's reducers as a communication hook of ``DistributedDataParallel``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradsync import spec
from gradsync.bucket import BucketPlan
from gradsync.comm.base import Communicator
from gradsync.comm.connect import connect
from gradsync.errors import GradSyncError, NonFiniteGradient
from gradsync.reducers import Compressed, Driver, Reducer
from gradsync.reducers.background import drive
from gradsync.reducers.rules import CodecRule

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

LAID_OUT_AFTER = 2  # backwards: DDP lays its buckets out anew after the first


def comm_hook(
    model: DistributedDataParallel,
    *,
    codec: CodecRule | None = None,
    reducer: Reducer | str | None = None,
    comm: Communicator | None = None,
) -> CommHook:
    """Have a DDP model average its gradients by one of gradsync's reducers. Returns the hook, which holds its state.

    The first two backwards are exact: DDP lays its buckets out in them. ``comm``: DDP's ranks by a transport of your
    choice; by default all ranks of the run, as :func:`gradsync.connect` connects them. Save ``hook.state_dict()`` on
    each rank with the rest.

    >>> import gradsync, torch
    >>> from gradsync.compat import comm_hook
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
            f"comm_hook goes with DistributedDataParallel; got {type(model).__name__}. For a model of your own call "
            "gradsync.synchronize(model, optimizer)."
        )
    if (codec is None) == (reducer is None):
        raise ValueError(f"give either codec= or reducer=; got {codec=} {reducer=}.")
    chosen = Compressed(codec) if codec is not None else spec.resolve(reducer, "reducer")
    hook = CommHook(model.module, chosen, (connect() if comm is None else comm).clone())
    # DDP looks at the annotations, and wants none or the class itself, not its name.
    model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    return hook


class CommHook:
    """A reducer in DDP's place for a hook: what :func:`comm_hook` returns. Its collectives keep to one fixed order.

    >>> from gradsync.compat import CommHook
    >>> CommHook.__name__
    'CommHook'
    """

    def __init__(self, module: torch.nn.Module, reducer: Reducer, comm: Communicator) -> None:
        self.steps = 0
        self._reducer = reducer
        self._comm = comm
        self._params = dict(module.named_parameters())
        self._names = {id(param): name for name, param in self._params.items()}
        self._buckets: list[GradBucket] = []  # of this backward so far
        self._promises: list[torch.futures.Future[Tensor]] = []
        self._plan: BucketPlan | None = None  # DDP's layout, once it stays
        self._driver: Driver | None = None
        self._loaded: dict[str, Any] | None = None

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Take one of DDP's buckets; the future has its mean once the last bucket of this backward is done."""
        promise: torch.futures.Future[Tensor] = torch.futures.Future()
        self._buckets.append(bucket)
        self._promises.append(promise)
        if self._plan is None:
            bucket.buffer().div_(self._comm.world_size)
            self._comm.all_reduce(bucket.buffer()).wait()
        else:
            self._reduce(bucket, self._plan)
        if bucket.is_last():
            self._finish()
        return promise

    def _reduce(self, bucket: GradBucket, plan: BucketPlan) -> None:
        index = bucket.index()
        if index >= len(plan.layout) or plan.layout[index] != self._layout_of(bucket):
            raise GradSyncError(
                f"DDP has laid out bucket {index} anew at backward {self.steps}, which it does only after the first. "
                "Register the hook on a model whose trainable parameters stay the same."
            )
        if self._driver is None:
            on_cpu = bucket.buffer().device.type == "cpu"
            self._driver = drive(self._reducer, self._comm, len(plan.buckets), on_cpu=on_cpu)
        ours = plan.buckets[index]
        ours.open()
        ours.factor = 1.0 / self._comm.world_size
        for slot, grad in zip(ours.slots, bucket.gradients(), strict=True):
            torch.mul(grad, ours.factor, out=slot.view)
        ours.flags.fill_(1.0)
        self._driver.add(ours)

    def _finish(self) -> None:
        """The last bucket of a backward: wait for all, and hand the means to DDP."""
        if self._driver is not None and self._plan is not None:
            self._driver.drain()
            self._driver = None
            for bucket in self._buckets:
                for slot, grad in zip(self._plan.buckets[bucket.index()].slots, bucket.gradients(), strict=True):
                    grad.copy_(slot.view)
            spoilt = self._reducer.nonfinite
            self._reducer.end_step(finite=not spoilt)
            if spoilt:
                raise NonFiniteGradient(f"the gradient of {spoilt[0]} has NaN or inf on some rank.")
        self.steps += 1
        if self.steps == LAID_OUT_AFTER:
            self._lay_out()
        done = list(zip(self._buckets, self._promises, strict=True))
        self._buckets, self._promises = [], []
        for bucket, promise in done:
            promise.set_result(bucket.buffer())

    def _lay_out(self) -> None:
        ordered = sorted(self._buckets, key=lambda bucket: bucket.index())
        self._plan = BucketPlan([self._layout_of(bucket) for bucket in ordered], [], self._params, self._comm)
        self._reducer.attach(self._plan, self._comm)
        if self._loaded is not None:
            self._reducer.load_state_dict(self._loaded)
            self._loaded = None

    def _layout_of(self, bucket: GradBucket) -> list[str]:
        return [self._names[id(param)] for param in bucket.parameters()]

    def state_dict(self) -> dict[str, Any]:
        """What the reducer keeps, by parameter name: this rank's own. Save it on every rank."""
        waiting = self._loaded  # loaded, and not yet in use
        return {"rank": self._comm.rank, "reducer": self._reducer.state_dict() if waiting is None else waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave. In a new process it comes into force at the third backward."""
        if state["rank"] != self._comm.rank:
            raise ValueError(f"the state is that of rank {state['rank']}; this is rank {self._comm.rank}.")
        if self._plan is None:
            self._loaded = state["reducer"]
        else:
            self._reducer.load_state_dict(state["reducer"])
