"""The size of the gradients."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from hapi.callbacks.base import Callback
from hapi.callbacks.checks import flag, number, whole
from hapi.engine.state import Logs

__all__ = ["GradientMonitor"]

_NAMED = 5


class GradientMonitor(Callback):
    """Add the norm of the gradients to the logs, and warn of gradients that are too small, too large or not numbers.

    The gradients are those of a whole optimizer step: over its micro-batches and over all ranks, without the
    scale of mixed precision, before clipping. One step is measured in each interval between log points, the
    first; the others cost nothing, and nothing waits for the device before the log point.

    The logs get ``grad_norm``, the norm over all parameters, and with ``per_layer`` a ``grad_norm/<parameter>``
    for each; at the end of an epoch the means of its measurements. List the callback before those that shall see
    its values, such as a CSVLogger.

    Each kind of warning comes once per ``fit``, and says which parameters, in which epoch and step. With float16
    mixed precision single steps with infinite gradients are usual, and are skipped.

    Args:
        log_freq: Batches between log points. Default: those of ``fit``.
        per_layer: Add the norms of the parameters.
        norm_type: 2 is the Euclidean norm, 1 the sum of absolute values, ``math.inf`` the largest of them.
        vanishing: Warn where the norm of a parameter's gradient is below this. None: never.
        exploding: Warn where the norm of a parameter's gradient is above this. None: never.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An argument out of range.

    Example:
        >>> model.fit(train, callbacks=GradientMonitor(vanishing=1e-7, exploding=1e3))
    """

    def __init__(
        self,
        log_freq: int | None = None,
        per_layer: bool = False,
        norm_type: float = 2.0,
        vanishing: float | None = None,
        exploding: float | None = None,
    ) -> None:
        owner = "GradientMonitor"
        self.log_freq = None if log_freq is None else whole(owner, "log_freq", log_freq, 1)
        self.per_layer = flag(owner, "per_layer", per_layer)
        self.norm_type = math.inf if norm_type == math.inf else number(owner, "norm_type", norm_type, 0)
        if self.norm_type == 0:
            raise ValueError(f"{owner}: norm_type={norm_type!r}; accepted: a number > 0, such as 2 or math.inf")
        self.vanishing = None if vanishing is None else number(owner, "vanishing", vanishing, 0)
        self.exploding = None if exploding is None else number(owner, "exploding", exploding, 0)
        self._begin()

    def _begin(self) -> None:
        self._due = True
        self._measured: _Measured | None = None
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._warned: set[str] = set()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget earlier runs."""
        self._begin()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begin new means."""
        self._due, self._measured = True, None
        self._sums, self._counts = {}, {}

    def on_before_optimizer_step(self, step: int, logs: Logs | None = None) -> None:
        """Measure the first step of the interval, on the device."""
        if self._due:
            self._due = False
            self._measured = _Measured(self.run.gradients(), self.norm_type, self._where(step))

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Add the values at log points."""
        if logs is not None and "lr" in logs:
            logs.update(self._read())

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the means of the epoch's measurements."""
        self._read()
        if logs is not None:
            logs.update({name: value / self._counts[name] for name, value in self._sums.items()})

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Let go of what was measured."""
        self._measured = None

    def _where(self, step: int) -> str:
        progress = self.run.progress
        epoch = progress.epoch - progress.first_epoch + 1
        return f"epoch {epoch}, batch {step + 1} (global step {progress.global_step + 1})"

    def _read(self) -> dict[str, float]:
        """The values of the measured step, if there is a new one."""
        measured, self._measured = self._measured, None
        self._due = True
        norms = {} if measured is None else measured.norms()
        if measured is None or not norms:
            return {}
        self._judge(norms, measured.where)
        values = {"grad_norm": _total(list(norms.values()), self.norm_type)}
        if self.per_layer:
            values |= {f"grad_norm/{name}": norm for name, norm in norms.items()}
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1
        return values

    def _judge(self, norms: dict[str, float], where: str) -> None:
        low = -math.inf if self.vanishing is None else self.vanishing
        high = math.inf if self.exploding is None else self.exploding
        finite = {name: norm for name, norm in norms.items() if math.isfinite(norm)}
        self._warn("are not finite", {n: norm for n, norm in norms.items() if n not in finite}, where)
        self._warn(f"vanish (norm below {low:g})", {n: norm for n, norm in finite.items() if norm < low}, where)
        self._warn(f"explode (norm above {high:g})", {n: norm for n, norm in finite.items() if norm > high}, where)

    def _warn(self, what: str, norms: dict[str, float], where: str) -> None:
        if not norms or what in self._warned:
            return
        self._warned.add(what)
        names = ", ".join(f"{name} ({norm:.3g})" for name, norm in list(norms.items())[:_NAMED])
        more = f" and {len(norms) - _NAMED} more" if len(norms) > _NAMED else ""
        warnings.warn(f"GradientMonitor: gradients {what} in {where}: {names}{more}", RuntimeWarning)


class _Measured:
    """The norms of a step's gradients, on the devices where they are.

    Args:
        gradients: By name.
        norm_type: The order of the norm.
        where: The step, for messages.
    """

    def __init__(self, gradients: list[tuple[str, Tensor]], norm_type: float, where: str) -> None:
        self.where = where
        self._names = [name for name, _ in gradients]
        groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        for name, gradient in gradients:
            # The rows of a sparse gradient add up only when it is coalesced; the rest of it is zero.
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if values.numel():
                groups.setdefault((values.device, values.dtype), {})[name] = values
        self._norms: list[tuple[list[str], Tensor]] = []
        for (_, dtype), group in groups.items():
            # Squares overflow in float16 where the norm itself would not.
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
            norms = torch._foreach_norm(list(group.values()), norm_type, dtype=wide)
            self._norms.append((list(group), torch.stack(list(norms))))

    def norms(self) -> dict[str, float]:
        """The norms by name, in the network's order. Waits for the device."""
        found = {name: norm for names, norms in self._norms for name, norm in zip(names, norms.tolist(), strict=True)}
        return {name: found[name] for name in self._names if name in found}


def _total(norms: list[float], norm_type: float) -> float:
    """The norm of all, from the norms of the parts."""
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    largest = max(norms)
    if norm_type == math.inf or largest == 0 or math.isinf(largest):
        return largest
    # Relative to the largest, so that no power leaves the range of a float.
    return float(largest * sum((norm / largest) ** norm_type for norm in norms) ** (1 / norm_type))
