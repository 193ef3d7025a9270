"""Run a function on several processes of this machine, from a script or from a notebook."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

from hapi.distributed import _bootstrap
from hapi.distributed._blame import Failure, culprit
from hapi.distributed._devices import choose_devices, usable_cpus
from hapi.distributed._logs import Tail
from hapi.errors import suggest

__all__ = ["SpawnContext", "SpawnError", "notebook_launch", "spawn"]

_OPTIONS = ("start_method", "backend", "master_port", "started_port", "selected_devices")
_REFUSED = {
    "ips": "spawn runs on one machine; use python -m hapi.launch --ips",
    "cluster_node_ips": "spawn runs on one machine; use python -m hapi.launch --ips",
    "node_ip": "spawn runs on one machine; use python -m hapi.launch --ips",
    "use_paddlecloud": "spawn runs on one machine; python -m hapi.launch runs on several",
    "xpus": "choose cards with gpus",
    "print_config": "print what you need in the function",
}
_SETTLE = 1.0  # seconds that the other ranks get to end on their own after the first failure
_STOP = 3.0  # seconds between SIGTERM and SIGKILL


class SpawnError(RuntimeError):
    """A rank failed. The text has its number, how it ended, and its traceback.

    Attributes:
        rank: The rank that failed first.
        exit_code: Negative for a signal, as ``subprocess`` has it.
        traceback: Text of its exception; empty when it raised none.
    """

    def __init__(self, rank: int, exit_code: int, traceback: str, text: str) -> None:
        super().__init__(text)
        self.rank = rank
        self.exit_code = exit_code
        self.traceback = traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.exit_code, self.traceback, str(self))


class SpawnContext:
    """The processes that :func:`spawn` started.

    Attributes:
        processes: One per rank.
        results: What each rank's function returned, in rank order; empty until all have been joined.
    """

    def __init__(
        self, processes: Sequence[BaseProcess], folder: Path, store: TCPStore, tail: Tail | None = None
    ) -> None:
        self.processes = list(processes)
        self.results: list[Any] = []
        self._folder = folder
        self._store: TCPStore | None = store
        self._tail = tail
        self._joined = False

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the ranks.

        Args:
            timeout: Seconds; None for as long as it takes.

        Returns:
            Whether all ranks have ended. False when the time is over: call again.

        Raises:
            SpawnError: A rank failed. The others have been ended.
        """
        if self._joined:
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while running := [process for process in self.processes if process.is_alive()]:
                if any(process.exitcode for process in self.processes):
                    break
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                wait([process.sentinel for process in running], left)
            if any(process.exitcode for process in self.processes):
                raise self._failed()
            self.results = [_result(self._folder / f"result.{rank}") for rank in range(len(self.processes))]
        except BaseException:
            self.close()
            raise
        self.close()
        return True

    def pids(self) -> list[int]:
        """Process ids, in rank order."""
        return [process.pid or 0 for process in self.processes]

    def close(self) -> None:
        """End what still runs, and remove what this object holds."""
        if self._joined:
            return
        self._joined = True
        for process in self.processes:
            _kill_session(process)
            process.join()
        if self._tail is not None:
            self._tail.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._store = None  # closes the port

    def _failed(self) -> SpawnError:
        _join_all(self.processes, _SETTLE)
        stopped = {rank for rank, process in enumerate(self.processes) if process.is_alive()}
        for process in self.processes:
            process.terminate()
        _join_all(self.processes, _STOP)
        for process in self.processes:
            _kill_session(process)
            process.join()
        failures = [
            _failure(self._folder / f"error.{rank}", rank, process.exitcode, stopped=rank in stopped)
            for rank, process in enumerate(self.processes)
            if process.exitcode
        ]
        first = culprit(failures)
        trace = first.traceback if first.raised else ""
        text = f"rank {first.rank} of {len(self.processes)} on host {socket.gethostname()} failed ({first.how})"
        return SpawnError(first.rank, first.exit_code or 0, trace, f"{text}\n\n{trace}".rstrip())


def spawn(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    gpus: str | Sequence[int] | None = None,
    **options: Any,
) -> SpawnContext:
    """Run ``func(*args)`` on ``nprocs`` processes of this machine, each a rank.

    A ``Model`` used in ``func`` finds its place as under the launcher, also one that was built at module level.
    Call it under ``if __name__ == "__main__":``, since each process imports the script.

    Args:
        func: A function at the top level of a module.
        args: Its arguments; they are pickled.
        nprocs: Number of ranks; -1 for one per GPU, or per CPU where there is no GPU.
        join: Whether to wait for the ranks. If not, call ``join()`` on the result.
        daemon: Whether the processes end with this one. They may not have children then (DataLoader workers).
        gpus: GPU numbers as ``"4,5"`` or ``[4, 5]``, of those that ``CUDA_VISIBLE_DEVICES`` shows; ``"cpu"``
            hides all; None for the first ``nprocs`` that are visible.
        **options: ``start_method`` (``"spawn"``, ``"fork"`` or ``"forkserver"``), ``backend`` (``"auto"``,
            ``"gloo"`` or ``"nccl"``), ``master_port`` (0, a free one; also called ``started_port``).

    Returns:
        The context; after ``join``, ``results`` has what the ranks returned.

    Raises:
        SpawnError: A rank failed; only when ``join`` is true, else from the context's ``join``.
        ValueError: An option is unknown, or the GPUs are not there.
        TypeError: ``func`` or ``args`` cannot be sent to another process.

    Example:
        >>> def train(lr):
        ...     return hapi.distributed.detect().rank
        >>> spawn(train, args=(0.1,), nprocs=2).results  # doctest: +SKIP
        [0, 1]
    """
    call = (_named_call, _pickled(func, tuple(args)))
    return _start(call, nprocs, gpus, daemon=daemon, join=join, options=options, show=False)


def notebook_launch(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = -1,
    gpus: str | Sequence[int] | None = None,
    **options: Any,
) -> list[Any]:
    """:func:`spawn` for notebooks: the function may be defined in a cell, and rank 0's output is shown here.

    The function and what it uses are sent by value with cloudpickle. CUDA may be in use already: the processes
    are started anew, not forked.

    Args:
        func: Any function.
        args: Its arguments.
        nprocs: See :func:`spawn`.
        gpus: See :func:`spawn`.
        **options: ``backend`` and ``master_port``, see :func:`spawn`.

    Returns:
        What each rank returned, in rank order.

    Raises:
        ModuleNotFoundError: cloudpickle is not installed (``pip install hapi[notebook]``).
        SpawnError: A rank failed.

    Example:
        >>> notebook_launch(lambda: hapi.distributed.detect().rank, nprocs=2)  # doctest: +SKIP
        [0, 1]
    """
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ModuleNotFoundError as exc:
        raise ModuleNotFoundError(
            "notebook_launch sends functions by value with cloudpickle; pip install hapi[notebook]"
        ) from exc
    if options.get("start_method", "spawn") != "spawn":
        raise ValueError(f"notebook_launch: start_method={options['start_method']!r}; only 'spawn' works here")
    call = (_valued_call, cloudpickle.dumps((func, tuple(args))))
    return _start(call, nprocs, gpus, daemon=False, join=True, options=options, show=True).results


def _start(
    call: tuple[Callable[[bytes], Any], bytes],
    nprocs: int,
    gpus: str | Sequence[int] | None,
    *,
    daemon: bool,
    join: bool,
    options: Mapping[str, Any],
    show: bool,
) -> SpawnContext:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A child that imports the script runs it to here; torch would answer with a page on freeze_support.
        sys.stderr.write('hapi: spawn is called at import; put the call under `if __name__ == "__main__":`\n')
        sys.stderr.flush()
        os._exit(1)
    options = _checked(options)
    if "selected_devices" in options:
        if gpus is not None:
            raise ValueError("spawn: gpus and selected_devices are the same; give gpus only")
        warnings.warn("spawn(selected_devices=...) is now gpus=...", DeprecationWarning, stacklevel=3)
        gpus = options["selected_devices"]
    method = options.get("start_method", "spawn")
    if method == "fork" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ValueError("spawn: start_method='fork' after CUDA was used here breaks it; use 'spawn'")
    backend = options.get("backend", "auto")
    world, visible = _world(nprocs, gpus, backend)
    folder = Path(tempfile.mkdtemp(prefix="hapi-spawn-"))
    try:
        store = _store(options.get("master_port", options.get("started_port", 0)))
        common = {
            **visible,
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process holds the store: its port is never free
            "HAPI_BACKEND": backend,
        }
        if "GLOO_SOCKET_IFNAME" not in os.environ and sys.platform == "linux":
            common["GLOO_SOCKET_IFNAME"] = "lo"
        if "OMP_NUM_THREADS" not in os.environ:
            common["OMP_NUM_THREADS"] = str(max(1, usable_cpus() // world))
        # The kernel's signal comes when the starting thread ends, so only the main thread may ask for it.
        bound = method == "forkserver" or threading.current_thread() is threading.main_thread()
        parent = None if not bound else 0 if method == "forkserver" else os.getpid()
        # Before they start, too: CUDA and OpenMP may read their variables when torch is imported.
        with _environment({key: common[key] for key in (*visible, "OMP_NUM_THREADS") if key in common}):
            context = start_processes(  # type: ignore[no-untyped-call]
                _run_rank,
                (call, str(folder), common, parent, show),
                nprocs=world,
                join=False,
                daemon=daemon,
                start_method=method,
            )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    tail = Tail(folder / "output").start() if show else None
    result = SpawnContext(context.processes, folder, store, tail)
    if join:
        result.join()
    return result


def _checked(options: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in options:
        if name in _REFUSED:
            raise ValueError(f"spawn: {name} is not supported; {_REFUSED[name]}")
        if name not in _OPTIONS:
            accepted = ", ".join(("gpus", *_OPTIONS))
            raise ValueError(
                f"spawn: unknown option {name!r}{suggest(name, ('gpus', *_OPTIONS))}; accepted: {accepted}"
            )
    for name, accepted_values in (
        ("start_method", ("spawn", "fork", "forkserver")),
        ("backend", ("auto", "gloo", "nccl")),
    ):
        if name in options and options[name] not in accepted_values:
            raise ValueError(f"spawn: {name}={options[name]!r}; accepted: {', '.join(accepted_values)}")
    return options


def _world(nprocs: int, gpus: str | Sequence[int] | None, backend: str) -> tuple[int, dict[str, str]]:
    if nprocs != -1 and nprocs < 1:
        raise ValueError(f"spawn: nprocs={nprocs}; accepted: 1 or more, or -1 for all")
    devices = gpus if gpus is None or isinstance(gpus, str) else ",".join(str(gpu) for gpu in gpus)
    asked = None if nprocs == -1 else nprocs
    world, visible = choose_devices(devices, asked, backend, cpu_default=usable_cpus())
    count = len(visible["CUDA_VISIBLE_DEVICES"].split(",")) if visible.get("CUDA_VISIBLE_DEVICES") else world
    if count != world:
        raise ValueError(f"spawn: nprocs={nprocs}, but gpus={devices!r} names {count}")
    return world, visible


def _store(port: Any) -> TCPStore:
    if not isinstance(port, int) or not 0 <= port < 65536:
        raise ValueError(f"spawn: master_port={port!r}; accepted: 0 (a free one) to 65535")
    try:
        return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    except RuntimeError as exc:
        raise ValueError(f"spawn: master_port={port} cannot be used: {str(exc).splitlines()[0]}") from exc


def _pickled(func: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((func, args))
    except (pickle.PicklingError, AttributeError, TypeError) as exc:
        raise TypeError(
            f"spawn: {getattr(func, '__qualname__', func)!r} or its arguments cannot be sent to another "
            f"process ({exc}); define the function at the top level of a module, or use notebook_launch"
        ) from exc


# In the rank's process.


def _run_rank(
    rank: int,
    call: tuple[Callable[[bytes], Any], bytes],
    folder: str,
    common: Mapping[str, str],
    parent: int | None,
    show: bool,
) -> None:
    if parent is not None:
        _bootstrap.die_with_parent(parent or os.getppid())  # the fork server ends when this session's main does
    os.setsid()  # its children can be ended with it, and Ctrl-C reaches the parent only, which ends all
    os.environ.update(common, RANK=str(rank), LOCAL_RANK=str(rank))
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    if show:
        _redirect_output(folder if rank == 0 else None)
    try:
        perform, payload = call
        result = perform(payload)
        try:
            data = pickle.dumps(result)
        except (pickle.PicklingError, AttributeError, TypeError) as exc:
            raise TypeError(f"the return value of rank {rank}, a {type(result).__name__}, cannot be pickled") from exc
        Path(folder, f"result.{rank}").write_bytes(data)
    except SystemExit:
        raise
    except BaseException as exc:
        _bootstrap.trim(exc, __file__)
        _bootstrap.write_error_file(exc, os.path.join(folder, f"error.{rank}"))
        sys.exit(1)


def _named_call(payload: bytes) -> Any:
    func, args = pickle.loads(payload)
    return func(*args)


def _valued_call(payload: bytes) -> Any:
    func, args = importlib.import_module("cloudpickle").loads(payload)
    return func(*args)


def _redirect_output(folder: str | None) -> None:
    """Rank 0's output into a file that the parent shows; the others' nowhere, as under the launcher's console."""
    target = os.devnull if folder is None else os.path.join(folder, "output")
    with open(target, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


# In the parent.


def _result(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None  # none after sys.exit(0)


def _failure(path: Path, rank: int, exit_code: int, *, stopped: bool) -> Failure:
    try:
        report = json.loads(path.read_text())["message"]["extraInfo"]
    except (OSError, ValueError):
        return Failure(rank, exit_code, raised=False, stopped=stopped)
    return Failure(rank, max(exit_code, 1), report["py_callstack"], report["time"])


def _join_all(processes: Sequence[BaseProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _kill_session(process: BaseProcess) -> None:
    """Kill a rank, if it lives, and the children that it left in its session's process group."""
    if process.is_alive():
        process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
