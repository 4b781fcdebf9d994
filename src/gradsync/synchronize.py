"""The one verb, :func:`synchronize`, and the :class:`Synchronizer` that it returns."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from gradsync import spec
from gradsync.buckets.bucket import FIRST_BUCKET_BYTES
from gradsync.comm import Communicator, connect
from gradsync.elastic.membership import ON_PARTITION, OnPartition
from gradsync.elastic.session import Change, Session
from gradsync.engine import saved_state
from gradsync.engine.engine import Engine, EngineSettings
from gradsync.engine.observers import announce
from gradsync.engine.scaler import ScalerGuard
from gradsync.engine.step_block import StepBlock
from gradsync.engine.survival import Survival
from gradsync.profiling.recorder import Recorder
from gradsync.profiling.start import start as start_recording
from gradsync.replicas.agreement import check_agreement, copy_tensors, describe, plain_name
from gradsync.replicas.batch_context import BatchNumber, batch_source
from gradsync.replicas.batchnorm import check_movable
from gradsync.replicas.buffers import BufferMode, BufferSync
from gradsync.replicas.training import Training
from gradsync.replicas.validation import check_model, find_sparse, is_compiled_whole
from gradsync.strategies import Strategy, resolve_strategy

log = logging.getLogger("gradsync")


def synchronize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | str = "allreduce",
    *,
    comm: Communicator | None = None,
    accumulate: int = 1,
    accumulation: Literal["mean", "sum"] = "mean",
    bucket_bytes: int | None = None,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    buffers: BufferMode = "broadcast",
    scaler: torch.amp.GradScaler | None = None,
    scheduler: LRScheduler | Sequence[LRScheduler] = (),
    sparse: Sequence[str] = (),
    on_partition: OnPartition = "pause",
    timeout_s: float | None = None,
    mirror_residuals: bool = False,
) -> Synchronizer:
    """Keep this model in step with its replicas on all other ranks, from now until ``close()``.

    It works in place: the model is not wrapped, and the training loop stays as it is. First all ranks are checked to
    hold the same model and settings (:class:`gradsync.OutOfStep` names the first difference), then rank 0's parameters
    and buffers are copied to all. From then on, when ``loss.backward()`` returns, every ``.grad`` is the mean over the
    ranks.

    Args:
        model: the user's module. Its ``.grad`` become views into gradsync's buckets.
        optimizer: any ``torch.optim`` optimizer over the model's parameters, except LBFGS.
        strategy: when workers communicate, and about what: a name, a spec such as ``"diloco(every=50)"``, or an object.
        comm: the ranks to be in step with; default: ``gradsync.connect()``.
        accumulate: synchronize at every k-th backward; the gradient is then the mean over the k. In between ``.grad``
            is None, so that ``optimizer.step()`` and clipping pass over it.
        accumulation: "mean" over the backwards of a window (weighted, see ``set_weight``); "sum" multiplies by their
            number, for loops that divide the loss themselves, as they must with DDP.
        bucket_bytes: size of a bucket; default: 25 MiB, between hosts 4 MiB, with a codec 9 MiB. The last buckets are
            smaller. Larger => fewer collectives; smaller => they start earlier.
        first_bucket_bytes: size of the first one.
        buffers: "broadcast" rank 0's after each synchronizing backward, take their "mean", or "none".
        scaler: the ``GradScaler`` in use, if any.
        scheduler: learning-rate schedules that step with every batch: a rank that runs out of data before the others
            misses steps of its schedules, and receives their state with the rest.
        sparse: names of parameters with sparse gradients, in addition to those of ``Embedding(sparse=True)``.
        on_partition: in an elastic run on several nodes, what happens when the network splits. "pause": only the side
            with a majority of the workers goes on. "diverge": every side goes on by itself, and they are merged when
            they meet again, weighted by the samples that each has trained; only for strategies whose replicas may
            differ. `gradsync run --on-partition` overrides it.
        timeout_s: how long to wait for a silent peer before it is given up.
        mirror_residuals: in an elastic run with a codec, each worker gives a copy of its error-feedback residuals to
            its neighbour after every step, so that they are not lost when it dies. In other runs it does nothing.

    >>> import gradsync, torch
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> sync = gradsync.synchronize(model, optimizer)
    >>> for batch in torch.randn(3, 8, 4):
    ...     optimizer.zero_grad()
    ...     model(batch).square().mean().backward()
    ...     optimizer.step()
    >>> sync.stats()["step"]
    3
    >>> sync.close()
    """
    chosen = resolve_strategy(strategy)
    settings = EngineSettings(
        accumulate=accumulate,
        accumulation=accumulation,
        bucket_bytes=chosen.bucket_bytes if bucket_bytes is None else bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
        buffers=buffers,
    )
    check_model(model, optimizer)
    sparse_names = find_sparse(model, sparse)
    if comm is None:
        comm = connect(timeout_s=timeout_s)
    elif timeout_s is not None:
        raise ValueError("timeout_s belongs to the communicator: pass it to gradsync.connect(), not beside comm=.")
    session = Session.current if comm.members_may_change else None
    if session is not None:
        on_partition = session.chosen_on_partition(on_partition)
    _check_on_partition(on_partition, chosen)
    if bucket_bytes is None and session is None:
        settings = dataclasses.replace(settings, bucket_bytes=chosen.bucket_bytes_on(comm))
    agreed = {
        "strategy": spec.render(chosen),
        **vars(settings),
        "sparse": sorted(sparse_names),
        "scaler": scaler is not None,
        **({} if session is None else {"on_partition": on_partition}),
    }
    training = Training(
        model=model,
        optimizer=optimizer,
        params={plain_name(name): param for name, param in model.named_parameters()},
        buffers=BufferSync(model, settings.buffers, comm),
        scaler=scaler,
        schedules=[scheduler] if isinstance(scheduler, LRScheduler) else list(scheduler),
    )

    def make_engine(own: Communicator, plan: dict[str, Any] | None) -> Engine:
        fitting = settings
        if bucket_bytes is None:  # a newcomer of an elastic run learns only here which transport it is on
            fitting = dataclasses.replace(settings, bucket_bytes=chosen.bucket_bytes_on(own))
        training.buffers.move_to(own)
        recorder = start_recording(
            own,
            training.params,
            strategy=spec.render(chosen),
            sent=chosen.bytes_per_step,
            bucket_bytes=bucket_bytes,
            slot=None if session is None else session.membership.slot,
        )
        try:
            return Engine(
                training,
                chosen,
                own,
                fitting,
                sparse=sparse_names,
                recorder=recorder,
                plan=plan,
                undoable=session is not None,
            )
        except BaseException:
            own.close()
            raise

    if session is not None:
        chosen.elastic_session = session
        _check_elastic(chosen, model, session)
        session.prepare_for_partition(on_partition)
        survival = Survival(
            session,
            training,
            make_engine,
            lambda only: describe(
                model, optimizer, agreed | {"mirror_residuals": mirror_residuals}, structure_only=only
            ),
            mirror_residuals=mirror_residuals,
        )
        engine = survival.start()
    else:
        own = comm.unchecked().clone()  # its calls follow the plan, on which all ranks agree
        check_agreement(own, describe(model, optimizer, agreed))
        copy_tensors(own, [*model.parameters(), *model.buffers()], src=0)
        engine = make_engine(own, None)
    if is_compiled_whole(model):
        log.info(
            "the model is compiled as a whole, so all its gradients come at the end of backward and nothing overlaps; "
            "compile it block by block to keep the overlap"
        )
    sync = Synchronizer(engine, comm)
    announce(sync)
    return sync


def _check_elastic(strategy: Strategy, model: nn.Module, session: Session) -> None:
    """Refuse what can't go on when a worker of an elastic run is lost."""
    check_movable(model)
    if obstacle := strategy.elastic_obstacle():
        raise ValueError(f"{spec.render(strategy)} can't be used in an elastic run: {obstacle}.")
    if session.has_synchronizer:
        raise ValueError(
            "an elastic run has one synchronizer: with two models, a lost worker could leave one of them a step ahead "
            "of the other. Put both models into one module, or run without --elastic."
        )
    session.has_synchronizer = True


def _check_on_partition(on_partition: OnPartition, strategy: Strategy) -> None:
    if on_partition not in ON_PARTITION:
        raise ValueError(f"on_partition must be one of {', '.join(ON_PARTITION)}; got {on_partition!r}.")
    if on_partition == "diverge" and (obstacle := strategy.diverge_obstacle()):
        raise ValueError(
            f"on_partition='diverge' is not possible with {spec.render(strategy)}: {obstacle}. "
            "Use on_partition='pause', or a strategy whose replicas may differ."
        )


class Synchronizer:
    """What :func:`synchronize` returns: a model that is kept in step, until ``close()``.

    Also a context manager that closes at its end.

    >>> import gradsync, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> with gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1)) as sync:
    ...     sync.rank, sync.world_size
    (0, 1)
    """

    def __init__(self, engine: Engine, comm: Communicator) -> None:
        self._engine = engine
        self._source = batch_source(comm)
        self._guard = ScalerGuard(engine) if engine.training.scaler is not None else None
        self._unsubscribe = self._source.subscribe(engine.join)
        self._closed = False

    @property
    def rank(self) -> int:
        return self._engine.comm.rank

    @property
    def world_size(self) -> int:
        return self._engine.comm.world_size

    @property
    def synchronized(self) -> bool:
        """Whether the last backward was a synchronizing one: False within an accumulation.

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> sync = gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2)
        >>> for _ in range(2):
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     print(sync.synchronized)
        False
        True
        """
        return self._engine.synchronized

    @property
    def discarded(self) -> bool:
        """Whether the last step was rolled back, because an elastic run has lost a worker; its batch comes again.

        It is False again from the next backward on, or from the next ``with sync.step():``.

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1)) as sync:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     sync.discarded
        False
        """
        return self._engine.discarded

    def step(self) -> StepBlock:
        """Around the body of a step, where more than ``backward()`` communicates: a model with SyncBatchNorm.

        In an elastic run a peer may be lost anywhere in the body. The rest of the body is then skipped, the step is
        rolled back, the run goes on with the others, and ``sync.discarded`` is True; with :func:`gradsync.shard` the
        batch comes again. Blocks at its end for as long as that takes. One block holds at most one synchronizing
        backward. In a run that is not elastic it changes nothing.

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sync = gradsync.synchronize(model, optimizer)
        >>> for batch in gradsync.shard(torch.randn(12, 2), global_batch_size=4):
        ...     with sync.step():
        ...         optimizer.zero_grad()
        ...         model(batch).square().mean().backward()
        ...         optimizer.step()
        >>> sync.stats()["step"], sync.discarded
        (3, False)
        >>> sync.close()
        """
        return StepBlock(self._engine, self._source)

    def set_weight(self, weight: float | torch.Tensor) -> None:
        """Set how many samples or tokens the mean loss of the next backward covers; default: 1. It applies once.

        The gradient becomes Σ w·g / Σ w over ranks and over the backwards of an accumulation. With
        :func:`gradsync.shard` the weight is the number of samples; a weight that is set here takes precedence.

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> sync = gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2)
        >>> for value, weight in ((1.0, 1), (4.0, 3)):
        ...     sync.set_weight(weight)
        ...     (value * model.weight).sum().backward()
        >>> model.weight.grad.item()                        # (1·1 + 3·4) / (1 + 3)
        3.25
        """
        value = float(weight)
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"a weight is a count of samples or tokens: finite, and not below 0; got {value}.")
        self._engine.set_weight(value)

    def set_batch(self, number: int) -> None:
        """Set which batch the next backward is of: ranks with different numbers raise :class:`gradsync.OutOfStep`.

        :func:`gradsync.shard` sets it by itself. With a loader of your own it lets gradsync find a rank that has
        skipped a batch; else the ranks would go on with different batches.

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1)) as sync:
        ...     for number, batch in enumerate(torch.randn(3, 8, 2)):
        ...         sync.set_batch(number)
        ...         model(batch).sum().backward()
        """
        if number < 0:
            raise ValueError(f"a batch's number is 0 or more; got {number}.")
        self._engine.batch.user_number = BatchNumber(-1, int(number))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backwards only accumulate gradients; the first one outside synchronizes them all.

        The result is the mean over the backwards (see ``accumulation`` of :func:`synchronize`).

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> sync = gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with sync.no_sync():
        ...     (1.0 * model.weight).sum().backward()
        >>> (3.0 * model.weight).sum().backward()
        >>> model.weight.grad.item()
        2.0
        """
        self._engine.enter_no_sync()
        try:
            yield
        finally:
            self._engine.leave_no_sync()

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop whose ranks may run out of data at different times.

        A rank that leaves the loop goes on taking part in the others' steps, with weight zero, until no rank has data;
        then all have the same parameters, buffers and optimizer state. Blocks at the end. Not needed with
        :func:`gradsync.shard`.

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(1, 1)
        >>> sync = gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with sync.join():
        ...     for x in torch.ones(3, 1):
        ...         model(x).sum().backward()
        """
        with self._source.joining(self._engine.join_at_end):
            yield

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients of the model down to a norm of at most ``max_norm``; returns the norm that they had.

        Like ``torch.nn.utils.clip_grad_norm_``, which it is under most strategies. Under ``sharded``, where each rank
        has a slice of the gradients, the norm is taken over all ranks: all of them call it, after each backward.

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> sync = gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> (5.0 * model.weight).sum().backward()
        >>> sync.clip_grad_norm_(1.0).item(), round(model.weight.grad.item(), 3)
        (5.0, 1.0)
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type must be above 0, or inf; got {norm_type=}.")
        params = list(self._engine.training.params.values())
        return self._engine.strategy.clip_grad_norm(
            params, float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite
        )

    def settle(self) -> None:
        """Bring the replicas together now: before evaluating, saving, or at the end of training. Blocks.

        All ranks call it, between steps. Afterwards they hold the same parameters. Under ``allreduce`` they always do,
        and this does nothing; under strategies that communicate less often, or later, what is pending is exchanged.

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> sync = gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> sync.settle()
        """
        engine = self._engine
        if engine.survival is None:
            engine.guard(engine.strategy.settle)
        else:  # if a worker is lost meanwhile, the others settle
            engine.run_exchange(engine.strategy.settle, again=engine.strategy.retry_exchange)

    def stats(self) -> dict[str, Any]:
        """What synchronizes the model, and what it costs, as plain data.

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> sync = gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> stats = sync.stats()
        >>> stats["strategy"], stats["transport"], stats["bytes_per_step"]
        ('allreduce', 'solo', 0)

        ``breakdown``: where the time of a step goes, averaged over the last steps, in seconds that add up (see
        docs/how_to/profiling.md). ``busy_s``: each rank's own time for a step; the ``straggler`` needed the most.
        """
        engine = self._engine
        return {
            "strategy": spec.render(engine.strategy),
            "transport": engine.comm.transport,
            "why": engine.comm.why,
            "rank": self.rank,
            "world_size": self.world_size,
            "step": engine.step,
            "bucket_bytes": [bucket.num_bytes for bucket in engine.plan.buckets],
            "codecs": engine.strategy.codecs(),
            "bytes_per_step": engine.strategy.bytes_per_step(),
            "exposed_s": engine.exposed_s,
            **(engine.recorder.stats() if isinstance(engine.recorder, Recorder) else {}),
            **engine.strategy.stats(),
            **({"elastic": engine.survival.session.stats()} if engine.survival is not None else {}),
        }

    def on_new_epoch(self, callback: Callable[[Change], None]) -> None:
        """In an elastic run: call ``callback`` after every change of the members, in the training thread.

        For loops with a data loader of their own, which must then split the data among ``sync.world_size`` ranks, and
        repeat the batch of a step that was rolled back (``change.discarded``). With :func:`gradsync.shard` both happen
        by themselves. In a run that is not elastic it is never called.

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1)) as sync:
        ...     sync.on_new_epoch(lambda change: print(change.cause, sync.rank, sync.world_size))
        """
        if self._engine.survival is not None:
            self._engine.survival.on_new_epoch(callback)

    @property
    def record(self) -> Recorder:
        """The records of the last steps on this rank: see :class:`gradsync.profiling.Recorder`.

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1)) as sync:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     [step.parts.waiting_s for step in sync.record.steps()]
        [0.0]
        """
        recorder = self._engine.recorder
        if not isinstance(recorder, Recorder):
            raise ValueError("nothing is recorded here: set_recording(enabled=False) was called before synchronize().")
        return recorder

    def state_dict(self) -> dict[str, Any]:
        """What the synchronizer needs to continue bit for bit: clock, plan, strategy state, by parameter name.

        Between steps of exact training it is the same on every rank. What is this rank's alone (a codec's residuals,
        gradients of an open accumulation) is under ``own``, by rank: save what all ranks have, by
        :meth:`gather_state_dict`, by ``torch.distributed.checkpoint``, or in a file a rank.

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with gradsync.synchronize(model, optimizer) as sync:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     saved = sync.state_dict()
        >>> with gradsync.synchronize(model, optimizer) as sync:
        ...     sync.load_state_dict(saved)
        ...     sync.stats()["step"]
        1
        """
        strategy = self._engine.strategy
        tree = {**self._engine.state_dict(), "strategy_state": strategy.state_dict()}
        return saved_state.pack(tree, strategy, rank=self.rank, world_size=self.world_size)

    def gather_state_dict(self, dst: int | None = 0) -> dict[str, Any]:
        """A ``state_dict`` with the own parts of all ranks, for one file: on rank ``dst`` alone. Blocks.

        All ranks call it, between steps. The other ranks send theirs one after the other, and get an empty dict. With
        ``dst=None`` every rank gets all of it, which takes as much memory on each. ``load_state_dict`` takes it with
        any number of ranks.

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> sync = gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), "allreduce(codec=int8)")
        >>> list(sync.gather_state_dict()["own"])
        ['rank0']
        >>> sync.close()
        """
        comm = self._engine.comm
        if dst is not None and not 0 <= dst < comm.world_size:
            raise ValueError(f"dst must be a rank, 0 to {comm.world_size - 1}, or None for all; got {dst=}.")
        return saved_state.gather(self.state_dict(), comm, dst)

    def optimizer_state_dict(self, dst: int | None = 0) -> dict[str, Any]:
        """What ``optimizer.state_dict()`` would return in one process: the whole state, on rank ``dst`` alone. Blocks.

        All ranks call it, between steps. Under ``sharded`` the other ranks get an empty dict, or with ``dst=None`` the
        same; ``optimizer.load_state_dict`` takes it on any number of ranks, before ``synchronize`` or after it. Under
        all other strategies every rank gets its own ``optimizer.state_dict()``, and nothing is sent.

        >>> import gradsync, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> with gradsync.synchronize(model, optimizer, "sharded") as sync:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        ...     sorted(sync.optimizer_state_dict()["state"][0])
        ['exp_avg', 'exp_avg_sq', 'step']
        """
        engine = self._engine
        if dst is not None and not 0 <= dst < self.world_size:
            raise ValueError(f"dst must be a rank, 0 to {self.world_size - 1}, or None for all; got {dst=}.")
        state: dict[str, Any] = engine.guard(engine.strategy.optimizer_state_dict, engine.training.optimizer, dst)
        return state

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Load what ``state_dict`` returned, on every rank.

        Given what *all* ranks have saved, by ``gather_state_dict`` or as a list, each takes its own. With another
        number of ranks the codecs' residuals are redistributed, those of old rank q to rank q mod ``world_size``.
        """
        chosen = saved_state.own_state(state, self._engine.strategy, rank=self.rank, world_size=self.world_size)
        self._engine.load_state_dict(chosen)
        self._engine.strategy.load_state_dict(chosen["strategy_state"])

    def close(self) -> None:
        """Remove all hooks: the model is as it was, with gradients of its own. Does not wait for peers."""
        if self._closed:
            return
        self._closed = True
        self._unsubscribe()
        if self._guard is not None:
            self._guard.remove()
        if self._engine.survival is not None:
            self._engine.survival.close()
        self._engine.close()
        self._engine.comm.close()

    def __enter__(self) -> Synchronizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Synchronizer({spec.render(self._engine.strategy)!r}, rank {self.rank} of {self.world_size})"
