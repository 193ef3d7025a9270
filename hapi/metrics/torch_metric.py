"""``torchmetrics`` metrics as hapi metrics. torchmetrics is optional: importing this does not import it."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hapi.metrics.base import Metric, Totals, _snake_case

__all__ = ["TorchMetric", "expand", "is_torch_collection", "is_torch_metric"]

_UPDATES = "#updates"  # '#' cannot be in the name of a torchmetrics state
_SHAPES = "#shapes"


def is_torch_metric(obj: Any) -> bool:
    """Whether ``obj`` is a ``torchmetrics.Metric``."""
    return _is_instance(obj, "Metric")


def is_torch_collection(obj: Any) -> bool:
    """Whether ``obj`` is a ``torchmetrics.MetricCollection``."""
    return _is_instance(obj, "MetricCollection")


def _is_instance(obj: Any, kind: str) -> bool:
    # Who has an instance has imported the package; a check must not.
    cls = getattr(sys.modules.get("torchmetrics"), kind, None)
    return cls is not None and isinstance(obj, cls)


class TorchMetric(Metric):
    """A ``torchmetrics.Metric`` that the engine synchronises, exactly and with its other metrics.

    torchmetrics' own synchronisation is switched off. Its object keeps its states and updates them; before
    a read the engine calls :meth:`flush`, which copies them to where hapi's states live, and
    :meth:`compute` lends the totals over all ranks to the object for the length of its ``compute()``. Sum,
    max and min states share the engine's buffers. Elements of list states arrive one by one in rank order,
    as if one process had seen all of them. Other states (mean, custom functions, none) are reduced as
    torchmetrics does, over the ranks that had data.

    Args:
        metric: The metric, which is reset. Wrappers and compositions of metrics work too.
        name: The name in logs; by default the class's in snake case. A metric whose result is a dict has
            one name per key, behind ``name_`` where a name is given.

    Raises:
        TypeError: Not a ``torchmetrics.Metric``; when read, a state or a result that is not made of tensors.
        ValueError: When read, a sum, max or min state whose shape changed.

    Example:
        >>> import torchmetrics
        >>> m = TorchMetric(torchmetrics.MeanAbsoluteError())
        >>> m.update(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
        >>> m.name(), m.accumulate()
        ('mean_absolute_error', 1.0)
    """

    def __init__(self, metric: Any, name: str | None = None) -> None:
        if not is_torch_metric(metric):
            raise TypeError(f"TorchMetric: metric={metric!r}; accepted: a torchmetrics.Metric instance")
        super().__init__(_snake_case(type(metric).__name__) if name is None else name)
        self.metric = metric
        from torchmetrics.utilities import data

        shared = {data.dim_zero_sum: "sum", data.dim_zero_max: "max", data.dim_zero_min: "min"}
        some_by_rank = False
        for member, path in self._members():
            # These decide whether torchmetrics starts collectives of its own.
            member.sync_on_compute = member._to_sync = member.dist_sync_on_step = False
            for state, default in member._defaults.items():
                reduction = member._reductions[state]
                if isinstance(default, list) or reduction is data.dim_zero_cat:
                    self.add_state(path + state, reduce="cat")
                    self.add_state(path + state + _SHAPES, reduce="cat")
                elif reduction in shared:
                    self.add_state(path + state, default.shape, reduce=shared[reduction])  # type: ignore[arg-type]
                else:
                    some_by_rank = True
                    self.add_state(path + state, default.shape, reduce=_by_rank, start=default)
        if some_by_rank:
            self.add_state(_UPDATES, reduce=_by_rank, start=torch.zeros((), dtype=torch.float64))
        else:
            self.add_state(_UPDATES)
        self._keys = _keys_of_result(metric)
        self._prefix = "" if name is None else f"{name}_"
        self.reset()

    def name(self) -> str | list[str]:
        """The name, or one per key of a result that is a dict."""
        return self._name if self._keys is None else [self._prefix + key for key in self._keys]

    def update(self, *args: Any) -> None:
        """Add a batch: ``metric.update(*outputs, *labels)``.

        Many torchmetrics metrics look at values to validate them, which waits for the device: construct
        them with ``validate_args=False`` where that matters.
        """
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if tensors and tensors[0].device != self.metric.device:
            self.metric.to(tensors[0].device)
        self.metric.update(*(arg.detach() if isinstance(arg, Tensor) else arg for arg in args))

    def flush(self) -> None:
        """Copy torchmetrics' states to ``self.state`` and ``self.lists``. Needed before these are read."""
        for member, path in self._members():
            for state, default in member._defaults.items():
                key, value = path + state, getattr(member, state)
                reduce = self.specs[key].reduce
                if reduce == "cat":
                    self._flush_rows(key, value if isinstance(value, (list, tuple)) else [value])
                elif callable(reduce):
                    self.state[key] = value.detach().clone()
                elif value.shape != default.shape:
                    raise ValueError(
                        f"{self._who()}: its state {key!r} changed its shape from {list(default.shape)} to "
                        f"{list(value.shape)}; accepted: states that keep it (often: pass num_outputs)"
                    )
                else:
                    # A start that is not 0 must count once, however many ranks there are.
                    self.state[key].copy_(value.double() - default.double() if reduce == "sum" else value)
        self.state[_UPDATES].fill_(self._updates())

    def saved_states(self) -> list[dict[str, Any]]:
        """The states of the metric and of those inside it, for a checkpoint."""
        return [
            {"states": copy.deepcopy(self._states(member)), "updates": member._update_count}
            for member, _ in self._members()
        ]

    def load_states(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take :meth:`saved_states` back."""
        for (member, _), entry in zip(self._members(), saved, strict=True):
            for state, value in entry["states"].items():
                setattr(member, state, value)
            member._update_count, member._computed = entry["updates"], None

    def _flush_rows(self, key: str, rows: Sequence[Any]) -> None:
        strange = next((row for row in rows if not isinstance(row, Tensor)), None)
        if strange is not None:
            raise TypeError(f"{self._who()}: its state {key!r} holds a {type(strange).__name__}; accepted: tensors")
        # Gathered rows come as one tensor. Where each of them ends may matter (a box list per image).
        self.lists[key][:] = [row.detach().flatten() for row in rows]
        self.lists[key + _SHAPES][:] = [torch.tensor([row.ndim, *row.shape]) for row in rows]

    def compute(self, totals: Totals) -> Any:
        """The metric's own result for the totals; with no data, its own result for that."""
        updates = totals[_UPDATES]
        live = [(member, self._states(member), member._update_count) for member, _ in self._members()]
        try:
            for member, path in self._members():
                for state in member._defaults:
                    setattr(member, state, self._total(path + state, totals, member, state, updates))
                # At least 1: torchmetrics warns before the first update, which a phase without data is.
                member._update_count = max(1, int(updates.sum()))
                member._computed = None
            result = self.metric.compute()
        finally:
            for member, states, count in live:
                for state, value in states.items():
                    setattr(member, state, value)
                member._update_count, member._computed = count, None
        return self._result(result)

    def _total(self, key: str, totals: Totals, member: Any, state: str, updates: Tensor) -> Any:
        default, device = member._defaults[state], member.device
        reduce, total = self.specs[key].reduce, totals[key]
        if reduce == "cat":
            rows = [row.to(device) for row in _split(total, totals[key + _SHAPES])]
            return rows if isinstance(default, list) else torch.cat(rows)
        if not callable(reduce):
            if reduce == "sum":
                total = total + default.cpu().double()
            return total.to(default.dtype).to(device)
        total = total[updates > 0].to(device)
        if len(total) == 0:
            return default.detach().clone().to(device)
        reduction = member._reductions[state]
        # One rank's state needs no reduction, and gets none from torchmetrics.
        if len(total) == 1:
            return total[0]
        return total if reduction is None else reduction(total)

    def _result(self, result: Any) -> Any:
        if isinstance(result, Mapping):
            if self._keys is None or set(result) != set(self._keys):
                raise TypeError(
                    f"{self._who()}: the result is a dict with the keys {list(result)}, which were not known "
                    "before the first batch; accepted: a number or an array (choose one in a hapi.Metric)"
                )
            return [_on_host(result[key]) for key in self._keys]
        if isinstance(result, (list, tuple)):
            return [_on_host(value) for value in result]
        return _on_host(result)

    def accumulate(self) -> Any:
        """The result over everything added on this process since :meth:`reset`."""
        self.flush()
        return super().accumulate()

    def reset(self) -> None:
        """Set every state back to its start."""
        for key, spec in self.specs.items():
            if callable(spec.reduce):
                self.state[key] = spec.initial()
        super().reset()
        self.metric.reset()
        for member, _ in self._members():
            member._update_count = 0  # a composition does not reset its own

    def restore(self, saved: TorchMetric) -> None:
        """Take the states of ``saved``, an earlier deep copy of this metric."""
        for (mine, _), (its, _) in zip(self._members(), saved._members(), strict=True):
            for state, value in self._states(its).items():
                setattr(mine, state, value)
            mine._update_count, mine._computed = its._update_count, None

    def _members(self) -> Iterator[tuple[Any, str]]:
        """The metric and those inside it, each with the prefix of its states."""
        for path, module in self.metric.named_modules():
            if is_torch_metric(module):
                yield module, f"{path}." if path else ""

    def _updates(self) -> int:
        # A wrapper may count for its members, or they for it.
        return max(int(member._update_count) for member, _ in self._members())

    @staticmethod
    def _states(member: Any) -> dict[str, Any]:
        return {state: getattr(member, state) for state in member._defaults}

    def _who(self) -> str:
        return f"TorchMetric {self._name!r} ({type(self.metric).__name__})"


def expand(collection: Any) -> Iterator[TorchMetric]:
    """One :class:`TorchMetric` per member of a ``torchmetrics.MetricCollection``, named as in its result.

    Members are updated one by one. Where the collection had already merged equal states of its members
    (compute groups), each gets its own copy.
    """
    for name, member in collection.items(keep_base=False, copy_state=True):
        yield TorchMetric(member, name)


def _by_rank(stacked: Tensor) -> Tensor:
    """Leave the ranks' values apart: ``compute`` reduces them, since it knows which ranks had data."""
    return stacked


def _split(total: Tensor, shapes: Tensor) -> list[Tensor]:
    """Undo ``flatten`` and ``cat``. ``shapes`` has each row's number of axes, followed by their lengths."""
    rows, header, at = [], shapes.tolist(), 0
    while header:
        ndim = int(header.pop(0))
        shape = [int(header.pop(0)) for _ in range(ndim)]
        size = torch.Size(shape).numel()
        rows.append(total[at : at + size].reshape(shape))
        at += size
    return rows


def _keys_of_result(metric: Any) -> list[str] | None:
    """The keys of the result where it is a dict, else None: tried without data, on a copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = copy.deepcopy(metric).compute()
        except Exception:  # many metrics refuse to compute without data
            return None
    return list(result) if isinstance(result, Mapping) else None


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return value.item() if value.numel() == 1 else value.numpy()
    return value
