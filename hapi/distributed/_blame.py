"""Which rank failed first, when several report a failure: the others usually die of its death."""

from __future__ import annotations

import signal
import time as clock
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Failure", "culprit"]

# What a rank says when a peer is gone, by Gloo, NCCL, TCPStore and the DataLoader's pipes.
_TORN = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "broken_pipe",
    "distnetworkerror",
    "diststoreerror",
    "distbackenderror",
    "nccl error",
    "nccl communicator was aborted",
    "connectfullmesh",
    "gloo/transport",
    "socket timeout",
    "failed to recv",
    "failed to send",
    "remote process exited",
)


@dataclass(frozen=True)
class Failure:
    """How a rank ended badly.

    Attributes:
        rank: Global rank.
        exit_code: As ``subprocess`` gives it: negative for a signal; None when it is not known.
        traceback: Text of its exception, or what is known instead; may be empty.
        time: When, in seconds since the epoch.
        host: Name of its machine; empty for this one.
        raised: Whether ``traceback`` is that of an exception which the rank itself reported.
        stopped: Whether it was running well until it was told to stop.
    """

    rank: int
    exit_code: int | None = None
    traceback: str = ""
    time: float = field(default_factory=clock.time)
    host: str = ""
    raised: bool = True
    stopped: bool = False

    @property
    def status(self) -> int:
        """The exit code as a shell shows it: 128 + n for signal n."""
        if self.exit_code is None:
            return 1
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code

    @property
    def how(self) -> str:
        """``"exit code 3"`` or ``"killed by SIGKILL"``."""
        if self.exit_code is None or self.exit_code >= 0:
            return f"exit code {self.status}"
        try:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"killed by signal {-self.exit_code}"


def culprit(failures: Sequence[Failure]) -> Failure:
    """The failure that most likely caused the others.

    Order of suspicion: killed by somebody else's signal, an exception of its own, an exit without an
    exception, a torn connection to another rank, stopped by us. Within a class the earliest.

    Args:
        failures: At least one.
    """
    return min(failures, key=lambda failure: (_innocence(failure), failure.time, failure.rank))


def _innocence(failure: Failure) -> int:
    if failure.stopped:
        return 4
    if failure.raised and failure.traceback:  # whatever signal ended it then, as Gloo's abort at exit does
        return 3 if _is_torn_connection(failure.traceback) else 1
    return 0 if failure.exit_code is not None and failure.exit_code < 0 else 2


def _is_torn_connection(traceback: str) -> bool:
    # Only the exception itself, which is the last paragraph: the frames above may mention anything.
    lines = traceback.rstrip().splitlines()
    start = max((i for i, line in enumerate(lines) if line.startswith((" ", "\t"))), default=-1)
    message = "\n".join(lines[start + 1 :]) or traceback
    return any(sign in message.lower() for sign in _TORN)
