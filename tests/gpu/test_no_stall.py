"""No step makes the host wait for a GPU: codecs, reducers and the engine on fake CUDA tensors. See docs/gpu.md."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import gradsync
from gradsync import spec
from gradsync.buckets.bucket import BucketPlan, plan_buckets
from gradsync.codecs import Int8, Payload, Residual
from gradsync.codecs.base import Codec, Finite
from gradsync.comm import Communicator
from gradsync.comm.c10d.communicator import C10d
from gradsync.comm.failure.heartbeat import Progress
from gradsync.engine import engine as engine_module
from gradsync.engine.engine import Engine
from gradsync.reducers import Compressed, Reducer
from gradsync.reducers.base import Driver
from gradsync.strategies.gradient_sync import ReducerSync
from tests.contracts.test_codec_contract import ALL_CODECS
from tests.contracts.test_reducer import REDUCERS
from tests.support.fake_gpu import GPU, FakeGpu, FakeRanks, Stall, fake_gpu

# All ranks of a fake GPU have the same gradients, whose values are not known.
pytestmark = pytest.mark.filterwarnings("ignore::gradsync.errors.SameDataWarning")

DTYPES = [torch.float32, torch.float64]  # 16-bit gradients are encoded as float32
MORE_REDUCERS = [
    "compressed(codec=int8(rounding='stochastic'), min_numel=1)",
    "compressed(codec=chain(randomk, int8), min_numel=1)",
    "compressed(codec=int8, feedback='none')",
    "compressed(codec=topk, feedback='ef21')",
    "compressed(codec=dgc(clip_norm=1.0, warmup_steps=2), min_numel=1)",
    "compressed(codec=chain(topk, sign), min_numel=1)",
    "powersgd(start_step=2)",
]
ALL_REDUCERS = list(dict.fromkeys([*REDUCERS, *MORE_REDUCERS]))
SOME_REDUCERS = ["plain", "compressed(codec=int8)", "compressed(codec=topk)", "powersgd", "adasum"]
CHANGING = ("alternating", "warmup_steps", "start_step")  # their second step differs from the third


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadsValue(Int8):
    """A codec with a mistake: it reads a value on the host."""

    how: Callable[[Tensor], Any] = Tensor.item

    def encode(
        self, x: Tensor, payload: Payload, *, gain: float = 1.0, residual: Residual | None = None, key: int = 0
    ) -> None:
        self.how(x.abs().amax())
        super().encode(x, payload, gain=gain, residual=residual, key=key)


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as made:
        yield made


def make_params(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    shapes = [(3,), (80, 50), (64, 19), ()]
    return {f"p{at}": nn.Parameter(torch.zeros(shape, dtype=dtype, device=GPU)) for at, shape in enumerate(shapes)}


def walk_codec(gpu: FakeGpu, codec: Codec, dtype: torch.dtype, numel: int = 1500) -> None:
    """Call every method of a codec that a step may call, on the fake GPU."""

    def values() -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=GPU)

    def payload() -> Payload:
        return Payload(torch.zeros(codec.encoded_bytes(numel, dtype), dtype=torch.uint8, device=GPU))

    with gpu.watching():
        x, out, residual, sent = values(), values(), Residual(values(), values()), payload()
        codec.encode(x, sent)
        codec.encode(x, sent, gain=0.5, residual=residual, key=3)
        finite: list[Finite] = [
            codec.decode(sent, out, gain=2.0, key=3),
            codec.decode(sent, out, add=True, key=3),
            codec.decode_sum([sent, payload()], out, key=3),
            codec.merge(x, [sent, payload()], payload(), out=out, key=3),
            codec.merge(x, [sent], payload(), gain=0.5, residual=residual, key=3, out=out, out_gain=2.0),
        ]
        codec.magnitudes(sent, numel, dtype)
        if hasattr(codec, "erase"):
            codec.erase(sent, out, key=3)
    assert all(isinstance(one, Tensor) and one.device == GPU and one.numel() == 1 for one in finite)


def walk_reducer(
    gpu: FakeGpu,
    reducer: Reducer,
    dtype: torch.dtype,
    ranks: int | Communicator,
    *,
    steps: int = 2,
    scaled: bool = False,
) -> None:
    """Reduce buckets of the fake GPU for some steps, as ReducerSync does."""
    comm = FakeRanks(gpu, ranks) if isinstance(ranks, int) else ranks
    params = make_params(dtype)
    plan = BucketPlan(plan_buckets(list(params.items()), cap_bytes=1 << 14), [], params, comm)
    sync = ReducerSync(reducer)
    sync.attach(plan, comm, gradsync.profiling.interface.NOT_RECORDING)
    for step in range(steps):
        for bucket in plan.buckets:
            bucket.begin_step()
            bucket.loss_scale, bucket.may_overflow = (8.0, True) if scaled else (1.0, False)
            bucket.may_roll_back = bucket.may_overflow
            for slot in bucket.slots:
                slot.param.grad = torch.zeros_like(slot.param)
                slot.place(0.25)
        if step > 0:
            with gpu.watching():
                reduce_step(sync, plan, reducer, comm)
        else:  # the first makes buffers, which may copy from the host
            reduce_step(sync, plan, reducer, comm)


def reduce_step(sync: ReducerSync, plan: BucketPlan, reducer: Reducer, comm: Communicator) -> None:
    sync.settle()
    driver = sync._driver = Driver(reducer, comm, len(plan.buckets))
    for bucket in plan.buckets:
        bucket.finalize(0.25)
        driver.add(bucket)
    sync.finish()
    for bucket in plan.buckets:
        bucket.publish()


@pytest.mark.parametrize("text", ALL_CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codecs_do_not_wait_for_a_gpu(gpu: FakeGpu, text: str, dtype: torch.dtype) -> None:
    walk_codec(gpu, spec.parse(text, "codec"), dtype)


@pytest.mark.parametrize(
    ("text", "world_size"), [*((text, 3) for text in ALL_REDUCERS), *((text, 2) for text in SOME_REDUCERS)]
)
def test_reducers_do_not_wait_for_a_gpu(gpu: FakeGpu, text: str, world_size: int) -> None:
    steps = 3 if any(word in text for word in CHANGING) else 2
    walk_reducer(gpu, spec.parse(text, "reducer"), torch.float32, world_size, steps=steps)


@pytest.mark.parametrize("text", SOME_REDUCERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64], ids=str)
def test_reducers_do_not_wait_with_other_dtypes_and_a_loss_scale(gpu: FakeGpu, text: str, dtype: torch.dtype) -> None:
    walk_reducer(gpu, spec.parse(text, "reducer"), dtype, 3, scaled=True)


@pytest.mark.parametrize(
    "how",
    [
        Tensor.item,
        float,
        bool,
        lambda value: value.tolist(),
        Tensor.cpu,
        lambda value: value.to("cpu"),
        lambda value: value.view(1)[value.view(1) > 0],
        lambda value: value.view(1).nonzero(),
        lambda value: value.view(1).unique(),
        lambda value: torch.tensor([1.0], device=value.device),
        lambda value: torch.ones(2, device=value.device).mul_(3).add_(1, alpha=value),
    ],
    ids=["item", "float", "bool", "tolist", "cpu", "to", "mask", "nonzero", "unique", "tensor", "alpha"],
)
def test_fake_gpu_finds_a_read_that_is_planted_in_a_codec(gpu: FakeGpu, how: Callable[[Tensor], Any]) -> None:
    with pytest.raises(Stall):
        walk_codec(gpu, ReadsValue(how=how), torch.float32)


def test_fake_gpu_finds_a_read_in_a_reducer(gpu: FakeGpu) -> None:
    with pytest.raises(Stall):
        walk_reducer(gpu, Compressed(ReadsValue(), min_numel=1), torch.float32, 2)


class _AliveRanks:
    """Stands for a heartbeat: no rank is lost."""

    rank = 0

    def __init__(self) -> None:
        self.lost: dict[int, str] = {}
        self.left: dict[int, Progress] = {}
        self.progress = Progress()


@pytest.fixture
def c10d() -> Iterator[C10d]:
    """torch.distributed with torch's fake backend, which accepts collectives of any device and does nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    group: Any = dist.group.WORLD
    heartbeat: Any = _AliveRanks()
    yield C10d(group, range(3), heartbeat, timeout_s=5.0, why="")
    dist.destroy_process_group()


@pytest.mark.parametrize("text", SOME_REDUCERS)
def test_c10d_does_not_wait_for_a_gpu(gpu: FakeGpu, c10d: C10d, text: str) -> None:
    walk_reducer(gpu, spec.parse(text, "reducer"), torch.float32, c10d)


def test_c10d_waits_on_the_stream(gpu: FakeGpu, c10d: C10d) -> None:
    rows, row = torch.zeros(3, 8, device=GPU), torch.zeros(8, device=GPU)
    with gpu.watching():
        works = [
            c10d.all_reduce(row),
            c10d.all_gather(row, out=rows),
            c10d.reduce_scatter(rows, out=row),
            c10d.all_to_all(rows, out=torch.zeros_like(rows)),
        ]
        for work in works:
            work.done()
            work.wait()


# -- the engine --------------------------------------------------------------------------------------------------------


class Loop:
    """A model on the fake GPU and its engine. Autograd has no fake GPU, so ``backward`` calls the engine's hooks."""

    def __init__(self, gpu: FakeGpu, patch: pytest.MonkeyPatch, strategy: str, **options: Any) -> None:
        self.gpu = gpu
        self._callbacks: list[Callable[[], None]] = []
        self._task = 0
        patch.setattr(engine_module, "queue_callback", self._callbacks.append)
        patch.setattr(torch._C, "_current_graph_task_id", lambda: self._task)
        self.model = nn.Sequential(nn.Linear(70, 80), nn.BatchNorm1d(80), nn.Linear(80, 30)).to(GPU)
        options.setdefault("lr", 0.1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=options.pop("lr"), foreach=False)
        self.sync = gradsync.synchronize(
            self.model, self.optimizer, strategy, comm=FakeRanks(gpu, 2), first_bucket_bytes=1 << 14, **options
        )

    @property
    def engine(self) -> Engine:
        return self.sync._engine

    def backward(self, *, unused: str = "") -> None:
        self._task += 1
        for name, param in reversed(list(self.model.named_parameters())):
            if name != unused:
                grad = torch.zeros_like(param)
                self.engine.guard(self.engine._on_incoming, (grad,))
                param.grad = grad if param.grad is None else param.grad.add_(grad)
                self.engine.guard(self.engine._on_gradient, name)
        while self._callbacks:
            self._callbacks.pop()()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def loop(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Loop]]:
    loops: list[Loop] = []

    def make(strategy: str = "allreduce", **options: Any) -> Loop:
        loops.append(Loop(gpu, monkeypatch, strategy, **options))
        return loops[-1]

    yield make
    for made in loops:
        made.sync.close()


STRATEGIES = [
    "allreduce",
    "allreduce(codec=fp16)",
    "allreduce(codec=int8)",
    "allreduce(codec=topk)",
    "allreduce(reducer=powersgd)",
    "allreduce(reducer=adasum)",
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_do_not_wait_for_a_gpu(loop: Callable[..., Loop], strategy: str) -> None:
    run = loop(strategy)
    run.step()
    run.step()  # afterwards the plan follows the order of the gradients
    with run.gpu.watching():
        for _ in range(6):  # longer than the gradients are compared between the ranks
            run.step()
    run.sync.state_dict()


def test_steps_with_a_scaler_read_the_scale_once_and_later(loop: Callable[..., Loop]) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler._scale = torch.zeros((), device=GPU)  # GradScaler("cuda") refuses to be used without a GPU
    scaler._growth_tracker = torch.zeros((), dtype=torch.int32, device=GPU)
    run = loop("allreduce(codec=int8)", scaler=scaler)
    run.step()
    run.step()
    for _ in range(6):
        run.gpu.log.clear()
        with run.gpu.watching():
            run.step()
            scaler.update(4.0)
    outcome, scale = "start to read", "start to read"
    assert [entry for entry in run.gpu.log if "read" in entry] == ["read", "read", outcome, scale]
    assert run.gpu.log[-1] == scale  # by update(); the next backward reads it


def test_steps_with_a_learning_rate_on_the_gpu_read_it_later(loop: Callable[..., Loop]) -> None:
    rate = torch.zeros((), device=GPU)
    run = loop(lr=rate)
    for _ in range(7):
        run.step()
    reads = []
    for rate_changes in (False, True, False):
        if rate_changes:
            rate.fill_(0.01)
        run.gpu.log.clear()
        with run.gpu.watching():
            run.backward()
        reads.append([entry for entry in run.gpu.log if "read" in entry])
        run.optimizer.step()  # SGD itself reads it
        run.optimizer.zero_grad()
    assert reads == [[], ["start to read"], ["read"]]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulation_does_not_wait_for_a_gpu(loop: Callable[..., Loop], accumulate: int) -> None:
    run = loop("allreduce(codec=int8)", accumulate=accumulate)
    for _ in range(2 * accumulate):
        run.step()
    with run.gpu.watching():
        for _ in range(2):
            if accumulate == 1:
                with run.sync.no_sync():
                    run.backward()
                    run.backward()
            else:
                run.backward()
                run.backward()
            run.step()


def test_dropped_gradients_are_found_by_looking_at_them(loop: Callable[..., Loop]) -> None:
    run = loop()
    run.step()
    with run.sync.no_sync():
        run.backward()
        run.optimizer.zero_grad(set_to_none=False)
        with run.gpu.watching(), pytest.raises(Stall):
            run.backward()


def test_a_parameter_without_a_gradient_makes_the_host_wait(loop: Callable[..., Loop]) -> None:
    run = loop()
    run.step()
    run.step()
    with run.gpu.watching(), pytest.raises(Stall):
        run.backward(unused="0.weight")


def test_step_enqueues_copies_collectives_and_waits_in_order(loop: Callable[..., Loop]) -> None:
    run = loop("allreduce(codec=int8)")
    for _ in range(7):
        run.step()
    run.gpu.log.clear()
    run.step()
    assert len(run.engine.plan.buckets) == 2
    waits = ["stream waits for all_to_all"] * 2
    assert run.gpu.log == ["read", "all_to_all", "all_to_all", *waits, "start to read"]


def test_no_compiled_kernel_is_reached() -> None:
    """Numba is imported when the first kernel is needed: it never is."""
    program = "import tests.gpu.test_no_stall as test, sys; test.walk_all(); assert 'numba' not in sys.modules"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def walk_all() -> None:
    with fake_gpu() as gpu:
        for text in ALL_CODECS:
            walk_codec(gpu, spec.parse(text, "codec"), torch.float32)
        for text in SOME_REDUCERS:
            walk_reducer(gpu, spec.parse(text, "reducer"), torch.float32, 3)
