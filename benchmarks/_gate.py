"""A contender's side of a contest: where its process waits for its turn. Needs no framework, not even torch."""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

Order = dict[str, Any]
Report = dict[str, Any]
Result = tuple[float, float]  # loss and accuracy
Evaluate = Callable[[], Result]


class ClosedError(Exception):
    """Leaves a ``fit`` that has no end: the parent has no more turns of it."""


class Gate:
    """Where a process waits for its turn: at the top of the net's forward, the one place that all contenders pass.

    Args:
        channel: The connection to the parent.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.lines = channel.makefile("rw", encoding="utf-8")
        self.left = 0
        self.order: Order | None = None
        self.closed = False
        self.result: Result | None = None
        self.cpu, self.faults = 0.0, 0

    def __call__(self) -> None:
        if self.left == 0:
            self.left = self.turn()["steps"]
        self.left -= 1

    def turn(self) -> Order:
        """Report the turn that ends here, and wait for the next.

        Raises:
            ClosedError: The parent has no more turns of this task.
        """
        did: Report = {"cpu": time.process_time() - self.cpu, "faults": page_faults() - self.faults}
        if self.order is not None:
            did |= self.end(self.order)
        self.order = None
        order = self.exchange(did)
        if order.get("close"):
            self.closed = True
            raise ClosedError
        self.begin(order)
        self.order = order
        self.cpu, self.faults = time.process_time(), page_faults()
        return order

    def exchange(self, report: Report) -> Order:
        """Tell the parent, and wait for what it says; ends the process if the parent is gone or has no more turns."""
        try:
            self.lines.write(json.dumps(report) + "\n")
            self.lines.flush()
            line = self.lines.readline()
        except OSError:
            line = ""
        if not line:
            sys.stdout.flush()
            os._exit(0)
        order: Order = json.loads(line)
        return order

    def begin(self, order: Order) -> None:
        """Called before a turn's clock starts."""

    def end(self, order: Order) -> Report:
        """Called after a turn's clock has stopped; what it returns goes into the report."""
        return {} if self.result is None else {"loss": self.result[0], "acc": self.result[1]}


def serve(gate: Gate, fit: Callable[[Order], None], evaluation: Callable[[Order], Evaluate]) -> None:
    """Do what the parent asks, one task after the other, until it goes.

    Args:
        gate: Where turns are waited for.
        fit: Trains without end; the net passes the gate.
        evaluation: Makes a function that evaluates once; each turn calls it once.
    """
    while True:
        order = gate.exchange({"memory": peak_memory()})
        gate.closed, gate.left, gate.result = False, 0, None
        try:
            if order["task"] == "fit":
                fit(order)
            else:
                evaluate = evaluation(order)
                while True:
                    gate.turn()
                    gate.result = evaluate()
        except Exception:  # what ClosedError has become on its way through a framework
            if not gate.closed:
                raise
        gc.collect()


def page_faults() -> int:
    """Page faults of this process so far: nearly all are large buffers that malloc gave back and asks for again."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def peak_memory() -> float:
    """The most memory that this process has had, in MiB."""
    try:
        # Not ru_maxrss where it can be avoided: Linux counts the parent's memory before exec in it.
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 1024)
