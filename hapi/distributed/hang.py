"""The hang report: when a rank does not come on, all of them say where they are, and end.

Stuck ranks cannot speak for themselves, so each has a thread that watches where its own loop stands. Where that does
not change within the timeout, the thread tells the others through the store; every rank answers with its place and its
Python stacks, each prints the table, and the processes end with :data:`EXIT_CODE`. The loop pays one assignment per
place. The store is torch's own, over a connection of its own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

from torch import distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

__all__ = ["EXIT_CODE", "HangWatch", "Place"]

EXIT_CODE = 70
"""What a rank ends with after a hang report (EX_SOFTWARE of sysexits.h)."""

_GATHER_SECONDS = 5.0


class Place:
    """Where a rank's loop stands. The loop assigns a new tuple; the watch compares identities.

    Attributes:
        now: ``("reading batch", 12)``; None outside of ``fit``, ``evaluate`` and ``predict``.
    """

    def __init__(self) -> None:
        self.now: tuple[Any, ...] | None = None


class HangWatch:
    """The thread of one rank.

    Args:
        place: What it watches.
        rank: This rank.
        world: Number of ranks.
        timeout: Seconds in one place that count as a hang.
        store: The group's store; the thread uses a connection of its own.
    """

    def __init__(self, place: Place, rank: int, world: int, timeout: float, store: Store) -> None:
        self.place = place
        self.rank = rank
        self.world = world
        self.timeout = timeout
        self.poll = max(0.05, min(1.0, timeout / 20))
        self._origin = store
        self._store = PrefixStore("hapi/hang", store.clone())  # type: ignore[attr-defined]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hapi-hang-watch", daemon=True)
        self._thread.start()

    def alive_for(self, store: Store) -> bool:
        """Whether this watch belongs to the group of ``store`` and still runs."""
        return self._origin is store and self._thread.is_alive()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=2 * self.poll + 1)

    def _watch(self) -> None:
        seen, since = self.place.now, time.monotonic()
        while not self._stop.wait(self.poll):
            if self.place.now is not seen:
                seen, since = self.place.now, time.monotonic()
            if not dist.is_initialized():
                return
            if seen is None:
                continue
            stalled = time.monotonic() - since > self.timeout
            try:
                if stalled:
                    self._store.set("stalled", str(self.rank))
                elif not self._store.check(["stalled"]):
                    continue
            except Exception:
                # The store's host is gone. If it failed, the launcher ends us; if not, there is no one to tell.
                if not stalled:
                    continue
            if not self._stop.is_set():
                self._report(time.monotonic() - since)

    def _report(self, seconds: float) -> None:
        reports = self._exchange(seconds)
        lines = []
        for rank, report in sorted(reports.items()):
            lines += [f"--- stacks of rank {rank}", report["stacks"].rstrip()]
        # The table last: it is what one reads first, and what a launcher repeats.
        lines.append(f"hapi: no rank made progress for {self.timeout:g} s (HAPI_TIMEOUT); this is where they are:")
        for rank in range(self.world):
            known = reports.get(rank)
            if known is None:
                lines.append(f"  rank {rank}: no sign of life (stopped, or in code that holds the interpreter)")
            else:
                who = f"rank {rank} on {known['host']} (pid {known['pid']})"
                lines.append(f"  {who}: {known['where']}, {known['seconds']:.0f} s")
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()
        sys.stdout.flush()
        # Leave time for the others to read ours; then nothing but an exit ends a thread stuck in a collective.
        time.sleep(1.0)
        os._exit(EXIT_CODE)

    def _exchange(self, seconds: float) -> dict[int, dict[str, Any]]:
        mine: dict[str, Any] = {
            "where": describe_place(self.place.now),
            "seconds": seconds,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "stacks": _stacks(),
        }
        reports = {self.rank: mine}
        deadline = time.monotonic() + _GATHER_SECONDS
        try:
            self._store.set(str(self.rank), json.dumps(mine))
            while len(reports) < self.world and time.monotonic() < deadline:
                for rank in range(self.world):
                    if rank not in reports and self._store.check([str(rank)]):
                        reports[rank] = json.loads(self._store.get(str(rank)))
                time.sleep(0.05)
        except Exception as exc:
            mine["where"] += f" (the others cannot be asked: {exc})"
        return reports


def describe_place(now: tuple[Any, ...] | None) -> str:
    """``("reading batch", 12)`` as ``reading batch 12``."""
    return "outside of fit, evaluate and predict" if now is None else " ".join(map(str, now))


def _stacks() -> str:
    """The Python stacks of all threads but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            stack = "".join(traceback.format_stack(frame))
            parts.append(f"thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)
