"""torch's elastic agent, taught who is to blame, to end ranks with their children, and to tell its peers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException, SubprocessContext

from hapi.distributed import _bootstrap
from hapi.distributed._blame import Failure, culprit
from hapi.distributed._logs import Tail, last_lines
from hapi.distributed._rendezvous import Rendezvous

__all__ = ["Agent", "RankLogs"]

POLL = 0.1  # seconds between two looks at the ranks
SETTLE = 1.0  # seconds that the other ranks get to end on their own after the first failure
STOP = 3.0  # seconds between SIGTERM and SIGKILL once a rank has failed: there is nothing left to save
LINGER = 5.0  # seconds a rank may take to exit after it reported an exception


class RankLogs(LogsSpecs):
    """One file per rank, stdout and stderr together, and rank 0's on the console.

    Args:
        folder: Where the files go, as ``workerlog.RANK``.
        environment: Variables that every rank gets.
        on_start: Called with the variables of this machine's ranks, by local rank, before they start.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        on_start: Callable[[Mapping[int, Mapping[str, str]]], None],
    ) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._environment = dict(environment)
        self._on_start = on_start
        self._starts = 0
        self._tail: Tail | None = None
        self._errors = tempfile.TemporaryDirectory(prefix="hapi-launch-")
        self.files: dict[int, Path] = {}
        self.error_files: dict[int, str] = {}

    @property
    def root_log_dir(self) -> str:
        """The folder."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name the files of the ranks that are about to start, and complete their variables."""
        self.stop()
        if not self._starts and all(int(variables["WORLD_SIZE"]) == len(envs) for variables in envs.values()):
            self._remove_older()
        destination = LogsDest()
        self.files, self.error_files = {}, {}
        for local_rank, variables in envs.items():
            file = self._folder / f"workerlog.{variables['RANK']}"
            if self._starts and file.exists():
                file.rename(f"{file}.attempt{self._starts - 1}")
            error_file = os.path.join(self._errors.name, f"{self._starts}.{local_rank}.json")
            variables.update(self._environment)
            variables["TORCHELASTIC_ERROR_FILE"] = error_file
            self.files[local_rank] = file
            self.error_files[local_rank] = error_file
            destination.stdouts[local_rank] = str(file)
            destination.stderrs[local_rank] = ""  # the bootstrap points it at stdout
            if variables["RANK"] == "0":
                file.unlink(missing_ok=True)  # the tail must not show the lines of an older run
                self._tail = Tail(file).start()
        destination.error_files.update(self.error_files)
        self._on_start(envs)
        self._starts += 1
        return destination

    def _remove_older(self) -> None:
        """Drop an older run's files: with more ranks or restarts it would seem to be this one's.

        Only when all ranks are here: several machines may share the folder.
        """
        for file in self._folder.glob("workerlog.*"):
            if re.fullmatch(r"workerlog\.\d+(\.attempt\d+)?", file.name):
                file.unlink()

    def stop(self) -> None:
        """Show the rest of rank 0's file."""
        if self._tail is not None:
            self._tail.stop()
            self._tail = None

    def close(self) -> None:
        """:meth:`stop`, and remove the error files."""
        self.stop()
        self._errors.cleanup()


class Agent(LocalElasticAgent):
    """Starts, watches and ends the ranks of one machine.

    Args:
        spec: What to run.
        logs: Where their output goes.
        rendezvous: How machines meet.
        launch_id: The mark that all processes of this launch carry.
        grace: Seconds between a signal to the launcher, which the ranks get too, and their end.
        report: Called with the culprit and the restarts left whenever the ranks failed.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: RankLogs,
        rendezvous: Rendezvous,
        *,
        launch_id: str,
        grace: float,
        report: Callable[[Failure, int], None],
    ) -> None:
        super().__init__(spec, logs)
        self._logs = logs
        self._rendezvous_handler = rendezvous
        self._launch_id = launch_id
        self._grace = grace
        self._report = report
        self._host = socket.gethostname()
        self._ends: dict[int, float] = {}  # local rank -> when it was seen to have ended
        self.status = 0

    # What the elastic engine calls.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._ends, self.status = {}, 0
        pids: dict[int, Any] = super()._start_workers(worker_group)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        trouble = self._peers_trouble()
        if not trouble and not self._failed_ranks():
            result: RunResult = super()._monitor_workers(worker_group)
            return result
        self._wait(SETTLE)
        failures = self._end_badly(signal.SIGTERM, STOP)
        if trouble and trouble != "failed":
            failures.insert(0, Failure(-1, 1, trouble, time=0.0, host=self._host, raised=False))
        self._conclude(failures)
        return RunResult(state=WorkerState.FAILED)

    def _exit_barrier(self) -> None:
        """Wait for the other machines' ranks, however long they take; elastic gives up after five minutes."""
        peers = self._rendezvous_handler.peers
        assert peers is not None
        while not peers.done():
            trouble = peers.trouble()
            if trouble:
                mine = [Failure(-1, 1, trouble, host=self._host, raised=False)]
                self._conclude(mine if trouble != "failed" else [])
                return
            time.sleep(POLL)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        """End the ranks: called after a signal, before a restart, and at the end, when none is left."""
        ranks = self._running()
        if ranks:
            asked = death_sig if death_sig == signal.SIGINT else signal.SIGTERM
            failures = self._end_badly(asked, self._grace)
            self.status = _status_after_signal(failures, death_sig)
            with contextlib.suppress(Exception):  # the machines may be unreachable: we are leaving anyway
                self._tell_stopped(death_sig)
        elif self._handlers():
            _bootstrap.kill_marked(self._launch_id)
        super()._shutdown(signal.SIGKILL)

    # Our own.

    def _peers_trouble(self) -> str | None:
        peers = self._rendezvous_handler.peers
        return peers.trouble() if peers is not None else None

    def _conclude(self, failures: list[Failure]) -> None:
        """Exchange failures with the other machines, find the culprit and report it."""
        peers = self._rendezvous_handler.peers
        assert peers is not None
        everyones = peers.exchange(failures)
        self._logs.stop()
        unknown = Failure(-1, 1, "another machine failed, and did not say how", host=self._host, raised=False)
        first = culprit(everyones or [unknown])
        self.status = first.status or 1
        self._report(first, self._remaining_restarts)

    def _tell_stopped(self, death_sig: signal.Signals) -> None:
        peers = self._rendezvous_handler.peers
        if peers is not None and self.status:
            text = f"the launcher on {self._host} was stopped by {signal.Signals(death_sig).name}"
            peers.exchange([Failure(-1, self.status, text, host=self._host, raised=False)], patience=0)

    def _handlers(self) -> dict[int, Any]:
        context = self._pcontext
        return dict(context.subprocess_handlers) if isinstance(context, SubprocessContext) else {}

    def _running(self) -> list[int]:
        return [rank for rank, handler in self._handlers().items() if handler.proc.poll() is None]

    def _failed_ranks(self) -> list[int]:
        """Local ranks that ended badly, or reported an exception and do not get to their end."""
        failed = []
        for local_rank, handler in self._handlers().items():
            code = handler.proc.poll()
            if code is not None:
                self._ends.setdefault(local_rank, time.time())
            reported = _modified(self._logs.error_files[local_rank])
            if code or (code is None and reported and time.time() - reported > LINGER):
                failed.append(local_rank)
        return failed

    def _wait(self, seconds: float) -> None:
        """Give the ranks time to end."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._running():
            self._failed_ranks()  # notes the times
            time.sleep(POLL / 4)

    def _end_badly(self, first: signal.Signals, grace: float) -> list[Failure]:
        """End the ranks that still run, and all children. Returns how the ranks failed, stopped ones too.

        Only the rank itself is asked: its DataLoader workers must live while it finishes its batch.
        """
        handlers = self._handlers()
        stopped, asked = self._running(), time.time()
        for local_rank in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(handlers[local_rank].proc.pid, first)
        with contextlib.suppress(SignalException):  # asked twice: no more grace
            self._wait(grace)
        for local_rank in self._running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(handlers[local_rank].proc.pid, signal.SIGKILL)
        _bootstrap.kill_marked(self._launch_id)
        for handler in handlers.values():
            with contextlib.suppress(Exception):  # stuck in the kernel: nothing can be done about it
                handler.proc.wait(2)
        return [
            failure
            for local_rank in handlers
            if (failure := self._failure(local_rank, asked if local_rank in stopped else None)) is not None
        ]

    def _failure(self, local_rank: int, asked: float | None) -> Failure | None:
        """How a rank that has ended failed; None if it did not. ``asked``: when it was told to stop."""
        code = self._handlers()[local_rank].proc.poll()
        rank = self._worker_group.workers[local_rank].global_rank
        report = _read_report(self._logs.error_files[local_rank])
        if not code and not report:
            return None
        if report:
            info = report.get("message", {}).get("extraInfo", {})
            text, when = str(info.get("py_callstack", "")), float(info.get("time", info.get("timestamp", 0)))
            # A signal after the exception says nothing: Gloo aborts at exit, or we killed what did not exit.
            code = 1 if code is None or code < 0 else code
        else:
            text, when = last_lines(self._logs.files[local_rank]), self._ends.get(local_rank, time.time())
        stopped = asked is not None and (not report or when > asked)
        return Failure(rank, code, text, when, self._host, raised=bool(report), stopped=stopped)


def _status_after_signal(failures: list[Failure], death_sig: signal.Signals) -> int:
    """A rank's own exit code if one has it; 0 if all ended well when asked; else as killed by the signal."""
    own = [dataclasses.replace(one, stopped=False) for one in failures if (one.exit_code or 0) > 0]
    if own:
        return culprit(own).status  # not that of a rank which only lost its connection to one that had ended
    return 128 + death_sig if failures else 0


def _modified(path: str) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


def _read_report(path: str) -> dict[str, Any]:
    try:
        with open(path) as file:
            report = json.load(file)
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) and isinstance(report.get("message"), dict) else {}
