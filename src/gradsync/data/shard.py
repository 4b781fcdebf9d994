"""``shard``: reads what the user has (a dataset, tensors, a DataLoader, a stream) and makes a ShardedLoader of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from gradsync.comm.base import Communicator
from gradsync.comm.connect import connect
from gradsync.data.balance import Balance
from gradsync.data.loader import MapSource, ShardedLoader, StreamSource
from gradsync.data.order import BatchSplit, EvenShares, Order, ReplacementOrder, SamplerOrder, SeededOrder, Shares
from gradsync.data.stream import CollateLocal, LocalStream

# Options of a DataLoader that the DataLoader within a ShardedLoader takes over.
_TAKEN_OVER = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)

Source = DataLoader[Any] | Dataset[Any] | Sequence[Any] | Tensor | tuple[Tensor, ...]


def shard(
    data: Source,
    *,
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool | None = None,
    balance: bool = False,
    comm: Communicator | None = None,
    **loader_options: Any,
) -> ShardedLoader:
    """Give each rank its own part of every epoch of ``data``, in an order that is the same at any number of ranks.

    Step t takes the next samples of the epoch's order, and each rank a contiguous part of them, so nothing is padded or
    read twice. A last, smaller step is split as evenly as can be. The synchronizers of ``comm`` get the number
    of samples of each batch, and are joined at the end if the ranks' numbers of batches differ: the gradient is that of
    the joined batch, with nothing else to do. (The weight is that of the batch last handed out: a loop that takes
    batches ahead of their backward calls ``sync.set_weight`` itself.)

    Every rank makes the same call.

    Args:
        data: a map-style dataset, a sequence of samples, a tensor (its rows), a tuple of tensors (rows in parallel), a
            DataLoader (its dataset, batch size, collate function, workers and kind of order are taken over; what
            another sampler than torch's ``RandomSampler`` yields is drawn on rank 0, as the epoch needs it), or an
            IterableDataset (every rank reads the whole stream, in the same order, and keeps its part; at most one
            loader worker).
        batch_size: samples of one rank in a step; more ranks => larger steps.
        global_batch_size: samples of all ranks in a step; the very same steps at any number of ranks. One of the two,
            or neither for a DataLoader, whose own batch size is that of a rank.
        shuffle: a new order each epoch, made from ``seed`` and the epoch. Default: as the DataLoader, else True; a
            stream can't be shuffled.
        seed: which orders; the same on all ranks.
        drop_last: leave out a last step that is smaller than the others. Default: as the DataLoader, else False.
        balance: let each rank's part of a step follow its measured speed, so that a slow rank delays no other. The
            samples of a step stay the same ones, and each part is weighted by its samples: the result is as exact as
            with even parts. Each rank keeps at least one sample.
        comm: whose ranks share the data; default: :func:`gradsync.connect`.
        loader_options: more options of ``torch.utils.data.DataLoader``: ``num_workers=2, pin_memory=True``, ...

    >>> import gradsync, torch
    >>> images, labels = torch.zeros(10, 3, 8, 8), torch.arange(10)
    >>> loader = gradsync.shard((images, labels), batch_size=4, seed=1)
    >>> for image, label in loader:
    ...     print(tuple(image.shape), len(label))
    (4, 3, 8, 8) 4
    (4, 3, 8, 8) 4
    (2, 3, 8, 8) 2
    """
    comm = comm if comm is not None else connect()
    options = _checked_options(loader_options)
    if isinstance(data, DataLoader):
        _check_loader(data)
        if batch_size is None and global_batch_size is None:
            batch_size = data.batch_size
        if drop_last is None:
            drop_last = data.drop_last
        options = {**{name: getattr(data, name) for name in _TAKEN_OVER}, **options}
        dataset = data.dataset
    else:
        dataset = _as_dataset(data)
    if not options.get("in_order", True):
        raise ValueError("in_order must be True: batches in another order have no position; got in_order=False.")
    if comm.members_may_change and balance:
        raise ValueError("balance=True needs the same ranks for the whole run; this one is elastic. Leave balance out.")
    cut = BatchSplit(
        global_batch_size=_global_batch_size(batch_size, global_batch_size, comm.world_size),
        world_size=comm.world_size,
        rank=comm.rank,
        drop_last=bool(drop_last),
    )
    shares = _balance(dataset, cut, comm, options) if balance else EvenShares(cut)
    if isinstance(dataset, IterableDataset):
        return ShardedLoader(_stream_source(dataset, cut, shares, shuffle, options), shares, comm)
    order = _order(data, dataset, shuffle=shuffle, seed=seed, comm=comm)
    if cut.drop_last and isinstance(order, SeededOrder | ReplacementOrder) and cut.num_steps(order.num_samples()) == 0:
        raise ValueError(
            f"drop_last=True leaves no step: one takes {cut.global_batch_size} samples over {comm.world_size} ranks, "
            f"and the data has {order.num_samples()}. Take a smaller batch size, or drop_last=False."
        )
    return ShardedLoader(MapSource(dataset, order, cut, shares, options), shares, comm)


def _as_dataset(data: Any) -> Any:
    if isinstance(data, ShardedLoader):
        raise TypeError("expected a dataset or a DataLoader; got a ShardedLoader, which is sharded already.")
    if isinstance(data, IterableDataset):
        return data
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
        data = TensorDataset(*data)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise TypeError(
            "expected a DataLoader, an IterableDataset, or data with len() and an index; "
            f"got {type(data).__name__}. Make a list of it, or wrap it into a torch.utils.data.IterableDataset."
        )
    if len(data) == 0:
        raise ValueError(f"a dataset to shard must have at least one sample; this {type(data).__name__} is empty.")
    return data


def _check_loader(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            raise ValueError(
                "a DataLoader to shard must have a batch_size; got batch_size=None. "
                "Pass its dataset to shard(dataset, batch_size=...) instead."
            )
        return
    if isinstance(loader.sampler, DistributedSampler):
        raise ValueError(
            "this DataLoader is sharded already: it has a DistributedSampler, and would be split twice. "
            "Use it as it is, or make it without the sampler (shuffle=True) and pass it to shard()."
        )
    if loader.batch_size is None:
        raise ValueError(
            "a DataLoader to shard needs a batch_size and at most a sampler; this one has a batch_sampler, or makes "
            "no batches. Make it with batch_size=... and sampler=..., or pass its dataset: shard(dataset, ...)."
        )
    _as_dataset(loader.dataset)


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in _TAKEN_OVER:
            raise TypeError(
                f"unknown option {name!r}. Of DataLoader's options shard() takes {', '.join(_TAKEN_OVER)}. "
                "For a sampler of your own, pass DataLoader(dataset, batch_size=..., sampler=...) to shard()."
            )
    return options


def _global_batch_size(batch_size: int | None, global_batch_size: int | None, world_size: int) -> int:
    if (batch_size is None) == (global_batch_size is None):
        raise ValueError(
            "expected batch_size (samples of each rank in a step) or global_batch_size (of all ranks), not both; "
            f"got {batch_size=} {global_batch_size=}."
        )
    if batch_size is not None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more; got {batch_size=}.")
        return batch_size * world_size
    assert global_batch_size is not None
    if global_batch_size < world_size:
        raise ValueError(
            f"global_batch_size must be at least the number of ranks, or some would never have a sample; got "
            f"{global_batch_size=} on {world_size} ranks. Try global_batch_size={world_size}."
        )
    return global_batch_size


def _balance(dataset: Any, cut: BatchSplit, comm: Communicator, options: dict[str, Any]) -> Shares:
    num_workers = options.get("num_workers") or 0
    if isinstance(dataset, IterableDataset) and num_workers > 0:
        raise ValueError(
            "num_workers must be 0 for an IterableDataset with balance=True: the worker cuts steps where the ranks' "
            f"speeds are not known; got {num_workers=}. Leave it out, or use a dataset with an index."
        )
    if comm.world_size == 1:
        return EvenShares(cut)
    if cut.global_batch_size == cut.world_size:
        raise ValueError(
            "balance=True needs more samples in a step than ranks, or every rank has its one sample whatever its "
            f"speed; got {cut.global_batch_size} samples on {cut.world_size} ranks. Take a larger batch size."
        )
    # A DataLoader's own default is 2 a worker.
    return Balance(cut, comm, num_ahead=num_workers * (options.get("prefetch_factor") or 2))


def _order(data: Any, dataset: Any, *, shuffle: bool | None, seed: int, comm: Communicator) -> Order:
    sampler = data.sampler if isinstance(data, DataLoader) else None
    permutes = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset)
    if sampler is None or permutes or type(sampler) is SequentialSampler:
        if shuffle is None:
            shuffle = sampler is None or permutes
        return SeededOrder(len(dataset), shuffle=shuffle, seed=seed)
    if shuffle is not None:
        raise ValueError(
            f"shuffle can't be set for a DataLoader whose {type(sampler).__name__} gives the order; got {shuffle=}. "
            "Leave it out, or pass the dataset."
        )
    if type(sampler) is RandomSampler and sampler.replacement:
        return ReplacementOrder(len(dataset), sampler.num_samples, seed=seed)
    if comm.members_may_change:
        raise ValueError(
            f"a {type(sampler).__name__} draws its order on one worker, which may be lost in an elastic run. Let "
            "gradsync draw it, from a seed that every worker knows: shard(dataset, shuffle=True, seed=...)."
        )
    return SamplerOrder(sampler, comm)


def _stream_source(
    stream: IterableDataset[Any], cut: BatchSplit, shares: Shares, shuffle: bool | None, options: dict[str, Any]
) -> StreamSource:
    if shuffle:
        raise ValueError(
            "shuffle must be off for an IterableDataset, which has no order to change; got shuffle=True. "
            "Shuffle within the stream, by a seed that is the same on all ranks."
        )
    if options.get("num_workers", 0) > 1:
        raise ValueError(
            "num_workers must be 0 or 1 for an IterableDataset: several would each read the whole stream; got "
            f"num_workers={options['num_workers']}."
        )
    collate = options.get("collate_fn") or default_collate
    part = LocalStream(stream, cut, shares)
    loader: DataLoader[Any] = DataLoader(part, batch_size=None, **{**options, "collate_fn": CollateLocal(collate)})
    return StreamSource(part, loader, cut)
