"""On the CPU: keep freed memory for the next step, instead of giving it back to the kernel and faulting it in again.

glibc maps every buffer above a threshold anew and unmaps it when it is freed. A training step frees and asks for the
same large buffers each time, so it pays for a thousand page faults. Higher thresholds change no number.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_OPT_OUT = "HAPI_MALLOC"
_USERS_OWN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
_OTHERS = ("jemalloc", "tcmalloc", "mimalloc")

_lock = threading.Lock()
_raised: dict[int, bool] = {}  # by process: a forked one decides anew


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds. Decided and done once per process; returns whether they are raised.

    Nothing is done where malloc is not glibc's, where the user has set its thresholds (``MALLOC_MMAP_THRESHOLD_``,
    ``GLIBC_TUNABLES`` ...), or with ``HAPI_MALLOC=default`` in the environment.
    """
    pid = os.getpid()
    with _lock:
        if pid not in _raised:
            _raised[pid] = _wanted() and _raise_thresholds()
        return _raised[pid]


def _raise_thresholds() -> bool:
    libc = ctypes.CDLL(None)
    # Older versions take no more than half of their heaps' size.
    raised = any(libc.mallopt(_M_MMAP_THRESHOLD, size) for size in (1 << 30, 32 << 20))
    return raised and bool(libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))


def _wanted() -> bool:
    if not sys.platform.startswith("linux") or os.environ.get(_OPT_OUT) == "default":
        return False
    if any(name in os.environ for name in _USERS_OWN) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return False  # musl and others
    try:
        loaded = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return False
    return not any(name in loaded for name in _OTHERS)
