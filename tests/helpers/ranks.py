"""``run_ranks(fn, world, *args)``: run a function on several Gloo ranks of this machine and get its results.

The processes are started once and reused: importing torch costs seconds, a warm call milliseconds. A rank
that raises, dies or hangs takes the whole pool with it, so no state of a broken run reaches the next test.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from hapi.distributed._blame import Failure, culprit

SETTLE = 1.0  # seconds that the other ranks get to say what they saw after the first failure
Outcome = tuple[bool, Any]


class RankError(AssertionError):
    """A rank failed. The text names it and carries its traceback."""


class RankPool:
    """Worker processes that wait for work. Grows to the largest world asked for."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder: Path | None = None

    def run(
        self,
        fn: Callable[..., Any],
        world: int,
        *args: Any,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """See :func:`run_ranks`."""
        try:
            work = pickle.dumps((fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as exc:
            raise TypeError(f"run_ranks: {fn!r} and its arguments must be importable and picklable: {exc}") from exc
        if any(not worker.process.is_alive() for worker in self._workers):
            self.close()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        while len(self._workers) < world:
            self._workers.append(_Worker(self._folder / f"stacks.{len(self._workers)}"))
        # The parent hosts the store, so no port is chosen before it is taken; a new one, without old keys.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = self._workers[:world]
        for rank, worker in enumerate(ranks):
            worker.pipe.send_bytes(pickle.dumps((_environment(rank, world, store.port, env or {}), work)))
        outcomes = self._collect(ranks, timeout)
        failures = [outcome for rank, (good, outcome) in sorted(outcomes.items()) if not good]
        if not failures:
            return [outcomes[rank][1] for rank in range(world)]
        first = culprit(failures)
        others = sorted(failure.rank for failure in failures if failure is not first)
        also = f"\n(also failed: ranks {others})" if others else ""
        raise RankError(f"rank {first.rank} of {world} failed in {fn.__qualname__}\n{first.traceback}{also}")

    def _collect(self, ranks: list[_Worker], timeout: float) -> dict[int, Outcome]:
        deadline = time.monotonic() + timeout
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(ranks):
            waiting = {worker.pipe: rank for rank, worker in enumerate(ranks) if rank not in outcomes}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                outcomes[rank] = ranks[rank].receive(rank)
                if not outcomes[rank][0]:
                    deadline = min(deadline, time.monotonic() + SETTLE)
            if not ready:
                break
        broken = not all(good for good, _ in outcomes.values())
        if len(outcomes) < len(ranks) and not broken:
            stuck = [rank for rank in range(len(ranks)) if rank not in outcomes]
            stacks = "\n".join(f"--- rank {rank}\n{ranks[rank].stacks()}" for rank in stuck)
            self.close()
            raise RankError(f"ranks {stuck} of {len(ranks)} did not finish within {timeout:g} s:\n{stacks}")
        if broken:
            self.close()
        return outcomes

    def pids(self) -> list[int]:
        """The process ids of the warm workers."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def close(self) -> None:
        """End all workers and what they started."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class _Worker:
    def __init__(self, stacks_file: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._stacks_file = stacks_file
        # Not a daemon: daemons may not have children, and ranks use DataLoader workers.
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, str(stacks_file)))
        self.process.start()
        theirs.close()

    def receive(self, rank: int) -> Outcome:
        try:
            good, value, when = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode
            return False, Failure(rank=rank, exit_code=code, traceback=f"the process died with exit code {code}")
        return (True, value) if good else (False, Failure(rank, exit_code=1, traceback=value, time=when))

    def stacks(self) -> str:
        """The Python stacks of all threads of the worker."""
        with contextlib.suppress(OSError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            time.sleep(0.3)
            return self._stacks_file.read_text()
        return "(no stacks: the process is gone)"

    def kill(self) -> None:
        pid = self.process.pid
        if pid is not None and self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # its own session: this reaches its DataLoader workers too
            self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


def _environment(rank: int, world: int, port: int, extra: Mapping[str, str]) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        **extra,
    }


def _serve(pipe: Connection, stacks_file: str) -> None:
    """The life of a worker: receive (environment, work), send (good, result or traceback, time)."""
    os.setsid()
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    with open(stacks_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        while True:
            try:
                environment, work = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            with _replaced_environment(environment):
                message = _perform(work)
            pipe.send_bytes(message)


def _perform(work: bytes) -> bytes:
    try:
        torch.manual_seed(0)
        fn, args = pickle.loads(work)
        return pickle.dumps((True, fn(*args), time.time()))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc(), time.time()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()


@contextlib.contextmanager
def _replaced_environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


_pool = RankPool()
atexit.register(_pool.close)


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``fn(*args)`` on ``world`` ranks and return what each returned, in rank order.

    The ranks see the environment that a launcher gives (``RANK`` ... ``MASTER_PORT``), one torch thread, and
    seed 0.
    The process group that ``fn`` starts is destroyed after it.

    Args:
        fn: A top-level function of a test module. It and its arguments and results are pickled by value.
        world: Number of ranks.
        *args: Passed to ``fn``.
        timeout: Seconds; a run that takes longer fails with the stacks of the ranks that are stuck.
        env: More environment variables for the ranks.

    Raises:
        RankError: A rank raised, died or hung. The rank and its traceback are in the text.
    """
    return _pool.run(fn, world, *args, timeout=timeout, env=env)


def close_pool() -> None:
    """End the warm processes (the session's fixture calls this; leaving Python does too)."""
    _pool.close()
