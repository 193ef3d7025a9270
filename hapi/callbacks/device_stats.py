"""How much of the machine training takes."""

from __future__ import annotations

import os
import sys
import time
import warnings

import torch

from hapi.callbacks.base import Callback
from hapi.callbacks.checks import whole
from hapi.engine.state import Logs

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = ["DeviceStats"]

_GIB = float(1 << 30)


class DeviceStats(Callback):
    """Add the memory and the load of rank 0's process and GPU to the logs, at log points.

    ==================== ===================================================================================
    ``gpu_mem_gib``      the most memory that tensors took since the last report, in GiB (2^30 bytes)
    ``gpu_reserved_gib`` what torch's allocator holds now, in GiB
    ``gpu_util_percent`` percent of the last moments in which the GPU ran anything, as the driver says; with
                         ``pip install nvidia-ml-py`` only
    ``cpu_percent``      processor time of this process over the time since the last report; 100 is one core.
                         Worker processes of a DataLoader do not count
    ``cpu_mem_gib``      memory of this process in GiB: now, or the most so far where that is all the system
                         tells (macOS)
    ==================== ===================================================================================

    An epoch's logs have the largest memory and the mean load of its reports. Values that the machine cannot
    tell are left out. ``gpu_mem_gib`` resets torch's peak counter (``torch.cuda.max_memory_allocated``).

    Args:
        log_freq: Batches between log points. Default: those of ``fit``.

    Raises:
        ValueError: ``log_freq`` is below 1.

    Example:
        >>> model.fit(train, epochs=2, callbacks=[DeviceStats(), CSVLogger("log.csv")])
    """

    def __init__(self, log_freq: int | None = None) -> None:
        self.log_freq = None if log_freq is None else whole("DeviceStats", "log_freq", log_freq, 1)
        self._gpu: torch.device | None = None
        self._tells_load = False
        self._before = (0.0, 0.0)
        self._reports: dict[str, list[float]] = {}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Find the device, and what can be asked."""
        device = self.run.meters.device
        self._gpu = device if device.type == "cuda" else None
        self._tells_load = self._gpu is not None and _load(self._gpu) is not None
        if self._gpu is not None:
            torch.cuda.reset_peak_memory_stats(self._gpu)
        self._before = _times()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Forget the last epoch's reports."""
        self._reports = {}

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Add the values at log points."""
        if logs is not None and "lr" in logs:
            logs.update(self._report())

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the epoch's values; its last report covers the evaluation."""
        self._report()
        if logs is not None:
            for name, values in self._reports.items():
                logs[name] = max(values) if name.endswith("_gib") else sum(values) / len(values)

    def _report(self) -> dict[str, float]:
        values: dict[str, float] = {}
        gpu = self._gpu
        if gpu is not None:
            values["gpu_mem_gib"] = torch.cuda.max_memory_allocated(gpu) / _GIB
            values["gpu_reserved_gib"] = torch.cuda.memory_reserved(gpu) / _GIB
            torch.cuda.reset_peak_memory_stats(gpu)
            load = _load(gpu) if self._tells_load else None
            if load is not None:
                values["gpu_util_percent"] = load
        now = _times()
        busy, passed = now[0] - self._before[0], now[1] - self._before[1]
        self._before = now
        if passed > 0:
            values["cpu_percent"] = 100 * busy / passed
        memory = _process_memory()
        if memory is not None:
            values["cpu_mem_gib"] = memory / _GIB
        for name, value in values.items():
            self._reports.setdefault(name, []).append(value)
        return values


def _times() -> tuple[float, float]:
    """Processor seconds of all threads of this process, and seconds on the wall."""
    # os.times has the same in hundredths of a second, too coarse for short intervals.
    return time.process_time(), time.perf_counter()


def _process_memory() -> int | None:
    """Bytes of this process in memory: now on Linux, the most so far elsewhere, None where there is no way."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    getrusage = getattr(resource, "getrusage", None)
    if getrusage is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, the others KiB
    return int(getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def _load(gpu: torch.device) -> float | None:
    """Percent of time in which the GPU was in use, or None where the driver's library cannot be asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import of an older library may say that it is old
        try:
            return float(torch.cuda.utilization(gpu))
        except Exception:
            # No library, no permission, not supported by the card: each has a type of its own.
            return None
