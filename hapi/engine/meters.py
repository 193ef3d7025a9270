"""All metric state of a phase: update on the device, read (one collective, one host wait), reset.

The sums of the losses and every ``sum`` state of every metric are views of one float64 buffer, so reading them
takes one all-reduce and one copy to the host. ``max`` and ``min`` states share a second buffer; lists are gathered.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hapi.data.batch import Batch
from hapi.distributed.collectives import all_gather_objects, all_reduce, gather_rows, stack_over_ranks
from hapi.distributed.environment import Environment
from hapi.engine.joining import Joining
from hapi.engine.loss import Count, LossFunction
from hapi.engine.plain import plain
from hapi.engine.state import Logs
from hapi.errors import add_note
from hapi.metrics._shapes import share_best_class
from hapi.metrics.adapters import ReferenceMetric
from hapi.metrics.base import Metric, cat_rows
from hapi.metrics.torch_metric import TorchMetric

__all__ = ["Meters", "RoutedMetric", "Window"]


class RoutedMetric:
    """A metric, and which output and label it gets (None: all of them)."""

    def __init__(self, metric: Metric | ReferenceMetric, route: int | str | None = None) -> None:
        self.metric = metric
        self.route = route
        given = metric.name()
        self.names = [given] if isinstance(given, str) else list(given)

    def arguments(self, outputs: Any, labels: tuple[Tensor, ...] | dict[str, Tensor]) -> tuple[Any, ...]:
        """Outputs followed by labels, as the metric's update takes them."""
        route = self.route
        if route is None:
            if isinstance(outputs, Mapping):
                first: tuple[Any, ...] = (next(iter(outputs.values())) if len(outputs) == 1 else outputs,)
            else:
                first = outputs if isinstance(outputs, tuple) else (outputs,)
            return (*first, *(labels.values() if isinstance(labels, dict) else labels))
        try:
            output = outputs[route]
            values = list(labels.values()) if isinstance(labels, dict) else labels
            if isinstance(route, str):
                label = labels[route] if isinstance(labels, dict) and route in labels else values[0]
            else:
                label = values[route if len(values) > 1 else 0]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"metric {self.names[0]!r} needs the output and label {route!r}") from None
        return output, label


class Meters:
    """Running sums of the losses and of all metrics.

    Args:
        loss: The model's losses, or None.
        metrics: The model's metrics.
        device: Where the sums live (the host, where the device has no float64).
        env: Which ranks to reduce over.
    """

    def __init__(
        self,
        loss: LossFunction | None,
        metrics: Sequence[RoutedMetric],
        device: torch.device,
        env: Environment,
    ) -> None:
        self.loss = loss
        self.metrics = tuple(metrics)
        self.env = env
        self.offload = device.type == "mps"
        self.device = torch.device("cpu") if self.offload else device
        self.terms = len(loss.terms) if loss else 0
        self.rows = 0
        self._counts = [0] * self.terms
        self._native = [m.metric for m in metrics if isinstance(m.metric, Metric)]
        self._stash: list[list[tuple[Tensor, ...]]] = [[] for _ in metrics]
        self._torch = [m for m in self._native if isinstance(m, TorchMetric)]
        self._warned: set[str] = set()
        joins = bool(metrics) and self.device.type == "cpu" and not self.offload
        joins = joins and all(vars(type(m.metric)).get("_counts_rows") and m.route is None for m in metrics)
        self._joining = Joining(self._update) if joins else None
        self.latest: dict[str, Tensor] = {}
        self.values: Logs = {}
        self._place()
        self.reset()

    @property
    def names(self) -> list[str]:
        """Names of all values that :meth:`read` gives: losses first."""
        return [*(self.loss.names if self.loss else ()), *(n for m in self.metrics for n in m.names)]

    def _place(self) -> None:
        """Lay out the buffers: per loss term its sum and its device-side count, the rows, then metric states."""
        sizes = {"sum": 2 * self.terms + 1, "max": 0, "min": 0}
        slots: list[tuple[Metric, str, str, int]] = []
        for metric in self._native:
            for name, spec in metric.specs.items():
                if isinstance(spec.reduce, str) and spec.reduce in sizes:
                    slots.append((metric, name, spec.reduce, sizes[spec.reduce]))
                    sizes[spec.reduce] += math.prod(spec.shape)
        self._buffers = {
            op: torch.zeros(size, dtype=torch.float64, device=self.device) for op, size in sizes.items() if size
        }
        self._slots = slots
        for metric in self._native:
            views = {
                name: self._view(self._buffers[op], metric, name, start)
                for owner, name, op, start in slots
                if owner is metric
            }
            for name, spec in metric.specs.items():
                if callable(spec.reduce):
                    views[name] = spec.initial().to(self.device)
            metric.bind(views)
        head = self._buffers["sum"]
        self._loss_slots = [(head[2 * i], head[2 * i + 1]) for i in range(self.terms)]

    @staticmethod
    def _view(buffer: Tensor, metric: Metric, name: str, start: int) -> Tensor:
        shape = metric.specs[name].shape
        return buffer[start : start + math.prod(shape)].view(shape)

    def reset(self) -> None:
        """Set everything back to the start of a phase."""
        for buffer in self._buffers.values():
            buffer.zero_()
        for routed in self.metrics:
            routed.metric.reset()
        if self.env.rank > 0:
            # A sum that does not start at 0 must be counted once, not once per rank.
            for metric, name, op, _ in self._slots:
                if op == "sum" and metric.specs[name].start is not None:
                    metric.state[name].zero_()
        for stash in self._stash:
            stash.clear()
        if self._joining is not None:
            self._joining.reset()
        self.rows = 0
        self._counts = [0] * self.terms

    def add_losses(self, parts: Sequence[tuple[Tensor, Count]], *, means: bool) -> None:
        """Add each term's value: a mean to be weighted by its count, or a sum."""
        for index, (value, count) in enumerate(parts):
            if value.requires_grad:
                value = value.detach()
            slot, count_slot = self._loss_slots[index]
            if isinstance(count, int):
                # A "sum" loss is the sum already, whichever form it comes in.
                if means and not self.loss.terms[index].is_sum:  # type: ignore[union-attr]
                    slot.add_(value, alpha=count)
                else:
                    slot.add_(value)
                self._counts[index] += count
            else:
                # A mean over nothing is NaN, and weighs nothing.
                slot.add_(torch.where(count > 0, value * count, 0.0) if means else value)
                count_slot.add_(count)

    def add_metrics(self, outputs: Any, batch: Batch) -> None:
        """Update every metric with a batch."""
        self.rows += batch.rows
        if self.metrics and not (self._joining is not None and self._joining.add(outputs, batch.labels)):
            self._update(outputs, batch.labels)

    def _update(self, outputs: Any, labels: Any) -> None:
        if self.offload:
            outputs, labels = _to_host(outputs), _to_host(labels)
        several = len(self._native) > 1
        if several:
            share_best_class(True)
        for index, routed in enumerate(self.metrics):
            metric = routed.metric
            try:
                if routed.route is None and type(outputs) is Tensor and type(labels) is tuple:
                    arguments: tuple[Any, ...] = (outputs, *labels)
                else:
                    arguments = routed.arguments(outputs, labels)
                if isinstance(metric, Metric):
                    metric.update(*arguments)
                elif self.env.world == 1:
                    metric.consume(metric.collect(*arguments))
                else:
                    self._stash[index].append(metric.collect(*arguments))
            except Exception as exc:
                share_best_class(False)
                add_note(exc, f"while updating the metric {routed.names[0]!r} ({type(metric).__name__})")
                raise
        if several:
            share_best_class(False)

    def read(self) -> Logs:
        """The values so far, over all ranks. Every rank must call it; the host waits for the device once."""
        self._settle()
        for torch_metric in self._torch:
            torch_metric.flush()
        host = self._reduced()
        head = host["sum"]
        logs = self._loss_logs(head) if self.loss else {}
        self.total_rows = int(head[2 * self.terms])
        views = self._views(host)
        for index, routed in enumerate(self.metrics):
            counter = routed.metric
            try:
                if isinstance(counter, Metric):
                    result = counter.compute(self._rest(counter, views[counter]))
                else:
                    result = self._consume(index, counter)
            except Exception as exc:
                add_note(exc, f"while computing the metric {routed.names[0]!r} ({type(counter).__name__})")
                raise
            logs.update(self._named(routed, result))
        self.latest, self.values = host, logs
        return logs

    def window(self) -> Window:
        """A reader of values since its last reading."""
        return Window(self)

    def difference(self, before: Tensor | None) -> Logs:
        """The values of what came between the sums ``before`` (None: the start of the phase) and the latest reading.

        A metric that is not made of sums has its value since the start of the phase.
        """
        now = self.latest["sum"]
        sums = now if before is None else now - before
        if before is not None:
            for metric, name, op, start in self._slots:
                if op == "sum" and metric.specs[name].start is not None:
                    self._view(sums, metric, name, start).add_(metric.specs[name].initial())
        logs = self._loss_logs(sums) if self.loss else {}
        views = self._views({**self.latest, "sum": sums})
        for routed in self.metrics:
            counter = routed.metric
            if isinstance(counter, Metric) and all(spec.reduce == "sum" for spec in counter.specs.values()):
                logs.update(self._named(routed, counter.compute(views[counter]), warn=False))
            else:
                logs.update({name: self.values[name] for name in routed.names})
        return logs

    def _views(self, host: dict[str, Tensor]) -> dict[Metric, dict[str, Any]]:
        views: dict[Metric, dict[str, Any]] = {metric: {} for metric in self._native}
        for metric, name, op, start in self._slots:
            views[metric][name] = self._view(host[op], metric, name, start)
        return views

    def _settle(self) -> None:
        if self._joining is not None:
            self._joining.settle()
        for metric in self._native:
            metric._settle()

    def _reduced(self) -> dict[str, Tensor]:
        """The buffers, reduced over ranks, on the host."""
        buffers = {op: buffer.clone() for op, buffer in self._buffers.items()}
        head = buffers["sum"]
        for index, count in enumerate(self._counts):
            if count:
                head[2 * index + 1] += count
        head[2 * self.terms] = self.rows
        if self.env.world > 1:
            all_reduce(head, group=self.env.group)
            extremes = [buffers[op] if op == "max" else -buffers[op] for op in ("max", "min") if op in buffers]
            if extremes:
                joined = all_reduce(torch.cat(extremes), "max", group=self.env.group)
                if "max" in buffers:
                    buffers["max"] = joined[: buffers["max"].numel()]
                if "min" in buffers:
                    buffers["min"] = -joined[joined.numel() - buffers["min"].numel() :]
        return {op: buffer.cpu() for op, buffer in buffers.items()}

    def _loss_logs(self, head: Tensor) -> Logs:
        assert self.loss is not None
        values = []
        for index in range(self.terms):
            total, count = head[2 * index].item(), head[2 * index + 1].item()
            values.append(total / count if count else math.nan)
        if self.terms == 1:
            return {"loss": values[0] * self.loss.scales[0]}
        logs = {"loss": sum(v * s for v, s in zip(values, self.loss.scales, strict=True))}
        logs.update({term.name: v for term, v in zip(self.loss.terms, values, strict=True)})
        return logs

    def _rest(self, metric: Metric, totals: dict[str, Any]) -> dict[str, Any]:
        """Add the states that are not in the buffers."""
        several = self.env.world > 1
        for name, spec in metric.specs.items():
            if spec.reduce == "cat":
                rows = metric.lists[name]
                totals[name] = cat_rows(gather_rows(rows, group=self.env.group) if several else rows)
            elif callable(spec.reduce):
                totals[name] = spec.reduce(stack_over_ranks(metric.state[name], group=self.env.group))
        return totals

    def _consume(self, index: int, metric: ReferenceMetric) -> Any:
        """On several ranks: give a host-side metric every rank's batches since the last read, in rank order."""
        if self.env.world > 1:
            local = [tuple(state.cpu() for state in states) for states in self._stash[index]]
            self._stash[index].clear()
            for part in all_gather_objects(local, group=self.env.group):
                for states in part:
                    metric.consume(states)
        return metric.accumulate()

    def _named(self, routed: RoutedMetric, result: Any, *, warn: bool = True) -> Logs:
        names = routed.names
        if len(names) == 1 and not (isinstance(result, (list, tuple)) and len(result) == 1):
            values: Sequence[Any] = [result]
        else:
            values = list(result) if isinstance(result, (list, tuple, np.ndarray, Tensor)) else [result]
        if len(values) != len(names):
            raise ValueError(
                f"metric {type(routed.metric).__name__} has {len(names)} names {names}, but gave {len(values)} values"
            )
        logs = {name: _number(value) for name, value in zip(names, values, strict=True)}
        for name, value in logs.items() if warn else ():
            if isinstance(value, float) and math.isnan(value) and name not in self._warned and self.rows:
                self._warned.add(name)
                warnings.warn(f"metric {name!r} is NaN", RuntimeWarning, stacklevel=2)
        return logs

    def _inner(self) -> list[Any]:
        inner = [m.metric.inner for m in self.metrics if not isinstance(m.metric, Metric)]
        return [held for held in inner if hasattr(held, "__dict__")]

    def _held(self) -> list[Any]:
        return [*self._inner(), *(m.metric for m in self._torch)]

    def saved_states(self) -> dict[str, Any]:
        """This rank's sums as tensors and plain containers, for :meth:`load_states`.

        Raises:
            TypeError: A metric on the host holds something else.
        """
        self._settle()
        return {
            "buffers": {op: buffer.cpu() for op, buffer in self._buffers.items()},
            "others": [{name: m.state[name].cpu() for name in _unshared(m)} for m in self._native],
            "lists": [{name: [row.cpu() for row in rows] for name, rows in m.lists.items()} for m in self._native],
            "torch": [m.saved_states() for m in self._torch],
            "inner": [plain(vars(held), f"metric {type(held).__name__}") for held in self._inner()],
            "rows": self.rows,
            "counts": list(self._counts),
        }

    def load_states(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Take back what every rank saved. On another number of ranks, rank 0 goes on with everybody's sums.

        Raises:
            ValueError: Another number of ranks, and a metric whose state cannot be added up.
        """
        if len(ranks) == self.env.world:
            self._load(ranks[self.env.rank])
            return
        if any(saved["torch"] or saved["inner"] for saved in ranks) or any(map(_unshared, self._native)):
            raise ValueError(
                "fit: resuming in the middle of an epoch on another number of ranks works with hapi's metrics; "
                "torchmetrics and host-side metrics keep one state per rank"
            )
        self.reset()
        if self.env.rank:
            return
        self._load(ranks[0])
        for saved in ranks[1:]:
            for op, buffer in saved["buffers"].items():
                mine, theirs = self._buffers[op], buffer.to(self.device)
                if op == "sum":
                    mine.add_(theirs)
                else:
                    mine.copy_(torch.maximum(mine, theirs) if op == "max" else torch.minimum(mine, theirs))
            for metric, lists in zip(self._native, saved["lists"], strict=True):
                for name, rows in lists.items():
                    metric.lists[name].extend(row.to(self.device) for row in rows)
            self.rows += saved["rows"]
            self._counts = [a + b for a, b in zip(self._counts, saved["counts"], strict=True)]

    def _load(self, saved: Mapping[str, Any]) -> None:
        self._settle()
        for op, buffer in saved["buffers"].items():
            self._buffers[op].copy_(buffer)
        for metric, others in zip(self._native, saved["others"], strict=True):
            metric.state.update({name: value.to(self.device) for name, value in others.items()})
        for metric, lists in zip(self._native, saved["lists"], strict=True):
            for name, rows in lists.items():
                metric.lists[name][:] = [row.to(self.device) for row in rows]
        for torch_metric, states in zip(self._torch, saved["torch"], strict=True):
            torch_metric.load_states(states)
        for held, values in zip(self._inner(), saved["inner"], strict=True):
            vars(held).update(values)
        self.rows = saved["rows"]
        self._counts = list(saved["counts"])

    def snapshot(self) -> dict[str, Any]:
        """A copy of everything, for :meth:`restore` (an evaluation in the middle of an epoch)."""
        self._settle()
        return {
            "buffers": {op: buffer.clone() for op, buffer in self._buffers.items()},
            "others": [{name: m.state[name].clone() for name in _unshared(m)} for m in self._native],
            "lists": [{name: list(rows) for name, rows in m.lists.items()} for m in self._native],
            # Objects that keep their own state: a copy of what they hold, since the user may hold them too.
            "objects": [copy.deepcopy(vars(held)) for held in self._held()],
            "stash": [list(stash) for stash in self._stash],
            "rows": self.rows,
            "counts": list(self._counts),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Put a :meth:`snapshot` back."""
        self._settle()  # what waits is not part of it, and is overwritten
        for op, buffer in saved["buffers"].items():
            self._buffers[op].copy_(buffer)
        for metric, others in zip(self._native, saved["others"], strict=True):
            metric.state.update(others)
        for metric, lists in zip(self._native, saved["lists"], strict=True):
            for name, rows in lists.items():
                metric.lists[name][:] = rows
        for held, values in zip(self._held(), saved["objects"], strict=True):
            vars(held).update(values)
        self._stash = saved["stash"]
        self.rows = saved["rows"]
        self._counts = saved["counts"]


class Window:
    """Values since they were last asked for: what a curve shows, where logs hold the mean since the epoch began.

    It works on the sums that the last :meth:`Meters.read` brought to the host, so it costs no collective and no wait.
    """

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._before: Tensor | None = None

    def reset(self) -> None:
        """Begin at the start of a phase."""
        self._before = None

    def read(self) -> Logs:
        """The values of what came since the last call, up to the last :meth:`Meters.read`."""
        logs = self._meters.difference(self._before)
        self._before = self._meters.latest["sum"]
        return logs

    def state_dict(self) -> dict[str, Any]:
        """The sums at the last call."""
        return {"before": None if self._before is None else self._before.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self._before = state_dict["before"]


def _unshared(metric: Metric) -> list[str]:
    """States that are in no buffer, since a function of the user's reduces them."""
    return [name for name, spec in metric.specs.items() if callable(spec.reduce)]


def _number(value: Any) -> Any:
    """A Python float where it is one number, else a numpy array."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype == object or array.dtype.kind in "US":
        raise TypeError(f"a metric gave {type(value).__name__}; accepted: numbers and arrays of numbers")
    return float(array.reshape(())) if array.size == 1 else array


def _to_host(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.cpu()
    if isinstance(tree, Mapping):
        return {key: _to_host(value) for key, value in tree.items()}
    return tuple(_to_host(value) for value in tree)
