"""Whatever is accepted as a metric, as one of two forms: a ``Metric`` or a ``ReferenceMetric``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hapi.errors import suggest
from hapi.metrics.auc import Auc
from hapi.metrics.base import Metric
from hapi.metrics.classification import Accuracy
from hapi.metrics.confusion import F1, Precision, Recall
from hapi.metrics.mean import FunctionMetric, Mean
from hapi.metrics.perplexity import Perplexity
from hapi.metrics.regression import MAE, MSE, R2
from hapi.metrics.torch_metric import TorchMetric, expand, is_torch_collection, is_torch_metric

__all__ = ["ReferenceMetric", "as_metric", "by_name", "expand", "is_reference_style"]

_ACCEPTED = (
    "a hapi metric, an object with update, accumulate, reset and name, a torchmetrics.Metric or "
    "MetricCollection, or a function of outputs and labels"
)

_BY_NAME: dict[str, Callable[[], Metric]] = {
    "acc": Accuracy,
    "accuracy": Accuracy,
    "auc": Auc,
    "f1": F1,
    "mae": MAE,
    "mean": Mean,
    "mse": MSE,
    "perplexity": Perplexity,
    "precision": Precision,
    "r2": R2,
    "recall": Recall,
}


class ReferenceMetric:
    """A metric in the reference's style: it counts on the host, a batch at a time.

    Per batch the reference calls ``states = compute(*outputs, *labels)`` (tensors, on the device; without a
    ``compute``, its arguments) and then ``update(*states)`` with numpy arrays. These are :meth:`collect` and
    :meth:`consume` here, so that several ranks can exchange what the first gave before the second sees it.
    Each batch waits for the device; a :class:`hapi.Metric` does not.

    Args:
        inner: The object. It has ``update``, ``accumulate``, ``reset`` and ``name``, and may have
            ``compute``.

    Raises:
        TypeError: A method is missing; a state is not a tensor, an array or a number.

    Example:
        >>> class Mistakes:
        ...     def __init__(self):
        ...         self.reset()
        ...     def compute(self, output, label):
        ...         return (output.argmax(1) != label).sum()
        ...     def update(self, mistakes):
        ...         self.total += int(mistakes)
        ...     def accumulate(self):
        ...         return self.total
        ...     def reset(self):
        ...         self.total = 0
        ...     def name(self):
        ...         return "mistakes"
        >>> m = ReferenceMetric(Mistakes())
        >>> m.consume(m.collect(torch.tensor([[0.1, 0.9]]), torch.tensor([0])))
        >>> m.accumulate()
        1
    """

    def __init__(self, inner: Any) -> None:
        missing = _missing(inner)
        if missing:
            raise TypeError(
                f"{type(inner).__name__} is no metric: it has no {', '.join(missing)}; accepted: {_ACCEPTED}"
            )
        self.inner = inner

    def collect(self, *args: Any) -> tuple[Tensor, ...]:
        """On the device: the states of a batch."""
        compute = getattr(self.inner, "compute", None)
        # Metric.compute takes totals; who did not replace it relies on the reference's default.
        if compute is None or getattr(type(self.inner), "compute", None) is Metric.compute:
            states: Any = args
        else:
            states = compute(*args)
        if not isinstance(states, (list, tuple)):
            states = (states,)
        return tuple(self._as_tensor(state) for state in states)

    def consume(self, states: tuple[Tensor, ...]) -> Any:
        """On the host: add the states of one batch. Returns what ``update`` returns."""
        return self.inner.update(*(_as_array(state) for state in states))

    def accumulate(self) -> Any:
        """The result since :meth:`reset`."""
        return self.inner.accumulate()

    def reset(self) -> None:
        """Forget everything."""
        self.inner.reset()

    def name(self) -> str | list[str]:
        """The name of the result, or one per value."""
        name = self.inner.name()
        names = [name] if isinstance(name, str) else name
        if not isinstance(names, (list, tuple)) or not names or not all(isinstance(n, str) for n in names):
            raise TypeError(f"{type(self.inner).__name__}.name() gave {name!r}; accepted: a str or a list of str")
        return name if isinstance(name, str) else list(names)

    def __repr__(self) -> str:
        return f"ReferenceMetric({self.inner!r})"

    def _as_tensor(self, state: Any) -> Tensor:
        if isinstance(state, Tensor):
            return state.detach()
        try:
            return torch.as_tensor(state)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"{type(self.inner).__name__}.compute gave a {type(state).__name__}; "
                "accepted: tensors, arrays and numbers, or a tuple of them"
            ) from None


def _as_array(state: Tensor) -> NDArray[Any]:
    # A copy also on the host: an update that writes to its argument must not write to the data set.
    host = state.to("cpu", copy=True)
    return np.asarray((host.float() if host.dtype is torch.bfloat16 else host).numpy())


def is_reference_style(obj: Any) -> bool:
    """Whether ``obj`` counts on the host, by ``compute``, ``update``, ``accumulate``, ``reset`` and ``name``.

    A subclass of :class:`hapi.Metric` does where it has its own ``accumulate`` and declares no states.
    """
    if isinstance(obj, type):
        return False
    if isinstance(obj, Metric):
        return type(obj).accumulate is not Metric.accumulate and not getattr(obj, "specs", None)
    return not _missing(obj)


def _missing(obj: Any) -> list[str]:
    methods = ("update", "accumulate", "reset", "name")
    return [method for method in methods if not callable(getattr(obj, method, None))]


def as_metric(obj: Any) -> list[Metric | ReferenceMetric]:
    """The metrics that ``obj`` stands for: one, or each member of a ``torchmetrics.MetricCollection``.

    Args:
        obj: A hapi metric, an object in the reference's style, a ``torchmetrics.Metric`` or
            ``MetricCollection``, or a function of outputs and labels (see :class:`FunctionMetric`).

    Raises:
        TypeError: Anything else.

    Example:
        >>> as_metric(torch.nn.functional.l1_loss)
        [FunctionMetric(name='l1_loss')]
    """
    if isinstance(obj, type):
        raise TypeError(f"{obj.__name__} is a class; give an instance: {obj.__name__}(...)")
    if isinstance(obj, ReferenceMetric):
        return [obj]
    if is_reference_style(obj):
        return [ReferenceMetric(obj)]
    if isinstance(obj, Metric):
        if not hasattr(obj, "specs"):
            raise TypeError(f"{type(obj).__name__}.__init__ must call super().__init__() before it declares states")
        return [obj]
    if is_torch_collection(obj):
        return list(expand(obj))
    if is_torch_metric(obj):
        return [TorchMetric(obj)]
    if callable(obj):
        return [FunctionMetric(obj)]
    raise TypeError(f"{obj!r} is no metric; accepted: {_ACCEPTED}")


def by_name(word: str) -> Metric:
    """The metric called ``word``, with its default options.

    Args:
        word: accuracy (or acc), auc, f1, mae, mean, mse, perplexity, precision, r2 or recall, in either case.

    Raises:
        ValueError: An unknown name.

    Example:
        >>> by_name("accuracy").name()
        'acc'
    """
    make = _BY_NAME.get(word.lower())
    if make is None:
        raise ValueError(f"no metric is called {word!r}; accepted: {', '.join(_BY_NAME)}{suggest(word, _BY_NAME)}")
    return make()
