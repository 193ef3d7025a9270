"""What users give as data -> a loader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from hapi.data.ahead import DeviceLoader
from hapi.data.gathered import GatheredLoader, draws_at_the_start, recognised
from hapi.data.loader import GatherLoader, Loader, MapLoader, StreamLoader, stream_loader
from hapi.data.memory import Gather, InMemory, Lending, Resident, accelerated, arrays_gather, dataset_gather
from hapi.data.sampler import BatchPlan
from hapi.data.shard import shard_dataloader, shard_iterable
from hapi.data.trees import describe, is_arrays, map_tree, tree_rows
from hapi.data.workers import choose_workers
from hapi.distributed.environment import Environment

__all__ = ["open_data", "split_arrays"]

ACCEPTED = (
    "tensors or numpy arrays (x, y), a dict of them, a Dataset, a DataLoader, or an iterable of batches "
    "(a list is a list of batches)"
)


def open_data(
    data: Any,
    what: str,
    env: Environment,
    *,
    batch: int,
    shuffle: bool,
    drop_last: bool,
    num_workers: int | str,
    seed: int,
    float_dtype: torch.dtype,
    resident: Resident | None = None,
    lend: bool = False,
) -> Loader:
    """Make the loader of ``data``.

    Args:
        data: See :data:`ACCEPTED`.
        what: What to call it in messages: ``"fit: train_data"``.
        env: This process's place, and the device that batches go to.
        batch: Rows of a global batch, where hapi forms the batches.
        shuffle: Shuffle, where hapi makes the order.
        drop_last: Leave out a last short batch, where hapi forms the batches.
        num_workers: Reader processes, where hapi reads samples; ``"auto"``: as many as pay.
        seed: Of the order.
        float_dtype: What float64 numpy arrays become.
        resident: Keeps data on the device; None keeps nothing.
        lend: Whether batches of in-memory data may be views of it; see :class:`Lending`.

    Raises:
        TypeError: The data is none of the accepted kinds.
        ValueError: It is empty, its arrays differ in length, or it cannot be kept on the device.
    """
    device = env.device or torch.device("cpu")
    resident = resident or Resident(False, device, what)

    def plan(samples: int) -> BatchPlan:
        if samples == 0:
            raise ValueError(f"{what} is empty")
        made = BatchPlan(samples, batch, env.rank, env.world, drop_last)
        if made.batches == 0:
            raise ValueError(
                f"{what} has {samples} samples, fewer than one batch of {batch}, and drop_last=True leaves none"
            )
        return made

    def gathered(gather: Gather, lying: InMemory | None, kept: InMemory | None, rows: int) -> Loader:
        order: dict[str, Any] = {"shuffle": shuffle, "seed": seed}
        cut = plan(rows)
        if kept is not None:
            return GatherLoader(kept.batch, cut, device=kept.device, **order)
        if lying is None or not accelerated(device):
            lending = None if lying is None or not lend else Lending.of(lying, what)
            return GatherLoader(gather, cut, ordered=None if lending is None else lending.batches, **order)
        far = lying.pinned if device.type == "cuda" else lying.unfinished
        return DeviceLoader(GatherLoader(far, cut, early=True, **order), device)

    if is_arrays(data):
        try:
            tensors = map_tree(lambda leaf: to_tensor(leaf, float_dtype), data)
        except TypeError as exc:
            raise TypeError(f"{what}: {exc}; it is {describe(data)}") from exc
        rows, lying = tree_rows(data, what), InMemory(tensors)
        return gathered(arrays_gather(tensors), lying, _kept(data, lying, resident, what), rows)
    if isinstance(data, (tuple, Mapping)):
        raise TypeError(f"{what} is {describe(data)}; accepted: {ACCEPTED}")
    if isinstance(data, DataLoader):
        return _dataloader(data, what, env, device, resident)
    found = InMemory.of(data)
    kept = _kept(data, found, resident, what)
    if isinstance(data, IterableDataset):
        return stream_loader(
            data,
            batch_size=-(-batch // env.world),
            drop_last=drop_last,
            num_workers=0 if isinstance(num_workers, str) else num_workers,
            pin_memory=device.type == "cuda",
            seed=seed,
            rank=env.rank,
            world=env.world,
        )
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (list, str, bytes)):
        gather = dataset_gather(data)
        if kept is not None:
            gather = kept.batch
        if gather is not None:
            return gathered(gather, found, kept, len(data))
        cut = plan(len(data))
        if isinstance(num_workers, str):
            num_workers = choose_workers(data, -(-batch // env.world), -(-len(data) // env.world), env.local_world)
        made = MapLoader(
            data, cut, shuffle=shuffle, seed=seed, num_workers=num_workers, pin_memory=device.type == "cuda"
        )
        return DeviceLoader(made, device) if accelerated(device) else made
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes)):
        if env.world > 1:
            return shard_iterable(data, env)
        return StreamLoader(_nonempty(data, what), f"the {type(data).__name__} of batches")
    raise TypeError(f"{what} is {describe(data)}; accepted: {ACCEPTED}")


def _kept(data: Any, lying: InMemory | None, resident: Resident, what: str) -> InMemory | None:
    """The data on an accelerator: where the user put it, or where it is kept."""
    if lying is not None and lying.device is not None and accelerated(lying.device):
        return lying if lying.chosen is None else lying.to(lying.device)
    return resident(data, lying, what)


def _dataloader(data: DataLoader[Any], what: str, env: Environment, device: torch.device, resident: Resident) -> Loader:
    if env.world > 1:
        resident(data, None, what)
        return shard_dataloader(data, what, env)
    loader = StreamLoader(_nonempty(data, what), "the DataLoader")
    lying = recognised(data)
    kept = resident(data, lying, what)
    if lying is not None:
        loader.source = GatheredLoader(data, device if accelerated(device) else None, kept)
        loader.early = kept is None and draws_at_the_start(data)
    return DeviceLoader(loader, device) if accelerated(device) and kept is None else loader


def _nonempty(data: Any, what: str) -> Any:
    try:
        empty = len(data) == 0
    except (TypeError, NotImplementedError):
        return data
    if empty:
        raise ValueError(f"{what} is empty")
    return data


def to_tensor(leaf: Tensor | np.ndarray[Any, Any], float_dtype: torch.dtype) -> Tensor:
    """A host tensor; float64 numpy data, numpy's default, becomes what the network computes in."""
    if isinstance(leaf, Tensor):
        return leaf
    array: np.ndarray[Any, Any] = leaf
    if array.dtype.kind in "OUSmM":
        raise TypeError(f"an array of dtype {array.dtype} cannot become a tensor")
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    tensor = torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
    return tensor.to(float_dtype) if tensor.dtype == torch.float64 else tensor


def split_arrays(data: Any, fraction: float, what: str) -> tuple[Any, Any]:
    """The first rows for training and the last ``fraction`` of them for evaluation.

    Raises:
        TypeError: The data is not arrays.
        ValueError: The fraction is out of range, or leaves one side without rows.
    """
    if not is_arrays(data):
        raise TypeError(f"validation_split works on tensors and arrays; {what} is {describe(data)}. Give eval_data")
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction < 1:
        raise ValueError(f"fit: validation_split must lie between 0 and 1, not {fraction!r}")
    rows = tree_rows(data, what)
    kept = rows - int(rows * fraction)
    if kept in (0, rows):
        raise ValueError(f"fit: validation_split={fraction} of {rows} rows leaves one side empty")
    return map_tree(lambda leaf: leaf[:kept], data), map_tree(lambda leaf: leaf[kept:], data)
