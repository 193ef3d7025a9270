"""Start a script on all cards of one machine or many, on torch's elastic engine.

The front end is :mod:`hapi.launch`. This file has the options, what they mean on this machine, and the
report; ``_agent`` watches the ranks, ``_rendezvous`` joins machines, ``_bootstrap`` runs in a rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from hapi.distributed import _bootstrap
from hapi.distributed._agent import POLL, Agent, RankLogs
from hapi.distributed._blame import Failure
from hapi.distributed._devices import choose_devices, usable_cpus
from hapi.distributed._logs import tell
from hapi.distributed._rendezvous import (
    LaunchError,
    Rendezvous,
    Watchdog,
    is_local,
    open_store,
    own_address,
)

__all__ = ["LaunchError", "LaunchOptions", "Plan", "run"]

DEFAULT_PORT = 29500
_RULER = "-" * 80


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What to launch, and where. The names are those of the command line.

    Attributes:
        target: Path of a script, or name of a module.
        args: The script's own arguments.
        module: Whether ``target`` is a module, as after ``python -m``.
        devices: GPU numbers as ``"0,1"``, ``"cpu"`` to hide the GPUs, or None for all that are visible.
        nproc: Processes on this machine; None for one per GPU, or one on the CPU.
        ips: The machines, by address; each runs the same command. The first is the master.
        nnodes: Number of machines ``"2"``, or ``"MIN:MAX"`` for a number that may change; None for ``ips``.
        master: ``"host:port"`` of the machine where the launchers meet.
        master_port: Port for ``ips``, or where ``master`` has none.
        node_rank: This machine's place; None for the order of ``ips``, or of joining.
        log_dir: Folder of ``workerlog.RANK``.
        max_restarts: How often all ranks are started again after a failure.
        backend: ``"gloo"``, ``"nccl"`` or ``"auto"``.
        grace: Seconds that the ranks get after SIGTERM or Ctrl-C.
        timeout: Seconds to wait for the other machines at the start.
        peer_timeout: Seconds of silence after which another machine counts as lost.
        dry_run: Only print what would be done.

    Raises:
        ValueError: A value makes no sense, or two of them contradict each other.
    """

    target: str
    args: tuple[str, ...] = ()
    module: bool = False
    devices: str | None = None
    nproc: int | None = None
    ips: tuple[str, ...] = ()
    nnodes: str | None = None
    master: str | None = None
    master_port: int | None = None
    node_rank: int | None = None
    log_dir: str = "log"
    max_restarts: int = 0
    backend: str = "auto"
    grace: float = 30.0
    timeout: float = 300.0
    peer_timeout: float = 60.0
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Check the values against each other."""
        if self.nproc is not None and self.nproc < 1:
            raise ValueError(f"--nproc {self.nproc}: at least 1 process is needed")
        if self.max_restarts < 0:
            raise ValueError(f"--max_restarts {self.max_restarts}: 0 or more")
        if self.grace < 0 or self.timeout <= 0 or self.peer_timeout <= 0:
            raise ValueError("--grace must be 0 or more seconds, --timeout and --peer_timeout more than 0")
        if self.backend not in ("auto", "gloo", "nccl"):
            raise ValueError(f"--backend {self.backend!r}; accepted: 'auto', 'gloo', 'nccl'")
        if self.ips and (self.master or self.nnodes not in (None, str(len(self.ips)))):
            raise ValueError(
                f"--ips {','.join(self.ips)} says how many machines there are and which is the master; leave "
                "out --nnodes and --master (a port goes into --master_port)"
            )
        low, high = self.machines
        if high > 1 and not self.ips and not self.master:
            raise ValueError(
                f"--nnodes {self.nnodes} needs --master host:port, the same on every machine (host: the "
                "machine with --node_rank 0), or name the machines with --ips a,b"
            )
        if self.node_rank is not None and not 0 <= self.node_rank < high:
            raise ValueError(f"--node_rank {self.node_rank} is not in 0..{high - 1} of {low}:{high} machines")
        if high > 1:
            self._endpoint()

    @property
    def machines(self) -> tuple[int, int]:
        """Fewest and most machines."""
        if self.ips:
            return len(self.ips), len(self.ips)
        low, _, high = (self.nnodes or "1").partition(":")
        if not low.isdigit() or not (high or low).isdigit():
            raise ValueError(f"--nnodes {self.nnodes!r}; accepted: N or MIN:MAX, for example 2 or 2:4")
        bounds = int(low), int(high or low)
        if not 1 <= bounds[0] <= bounds[1]:
            raise ValueError(f"--nnodes {self.nnodes!r}: 1 <= MIN <= MAX is needed")
        return bounds

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the master; port 0 for a free one, on one machine."""
        return self._endpoint() if self.machines[1] > 1 else ("127.0.0.1", 0)

    def _endpoint(self) -> tuple[str, int]:
        default = DEFAULT_PORT if self.master_port is None else self.master_port
        host, port = (self.ips[0], default) if self.ips else _split(self.master or "", default)
        if not host or not 0 < port < 65536:
            raise ValueError(f"--master {self.master!r}, port {port}; accepted: host:port, port 1 to 65535")
        return host, port


def _split(endpoint: str, default: int) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        return endpoint.strip("[]"), default
    if not port.isdigit():
        raise ValueError(f"--master {endpoint!r}; accepted: host:port")
    return host.strip("[]"), int(port)


@dataclass(frozen=True)
class Plan:
    """What the options mean on this machine.

    Attributes:
        command: What each rank runs.
        nproc: Ranks on this machine.
        environment: The variables that the launcher adds for each rank.
        serve: Whether this machine is the master.
        address: This machine's address, as the others see it.
        place: Its place among the machines, where the user gave one.
    """

    command: tuple[str, ...]
    nproc: int
    environment: Mapping[str, str]
    serve: bool
    address: str
    place: int | None

    @classmethod
    def of(cls, options: LaunchOptions) -> Plan:
        """Look at the script, the GPUs and the addresses of this machine.

        Raises:
            ValueError: The script or a GPU does not exist.
            LaunchError: No address in ``--ips`` is this machine's, or a host is unknown.
        """
        _check_target(options)
        nproc, environment = choose_devices(options.devices, options.nproc, options.backend)
        serve, address, place = _find_oneself(options)
        environment.update(_interfaces(address, alone=options.machines[1] == 1))
        environment.setdefault("HAPI_BACKEND", options.backend)
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, usable_cpus() // nproc))
        bootstrap = str(Path(_bootstrap.__file__).resolve())
        how = "--module" if options.module else "--script"
        command = (sys.executable, "-u", bootstrap, how, options.target, *options.args)
        return cls(command, nproc, environment, serve, address, place)


def _check_target(options: LaunchOptions) -> None:
    if not options.module:
        if not os.path.isfile(options.target):
            raise ValueError(f"script {options.target!r} is not a file (working directory {os.getcwd()})")
        return
    package = options.target.partition(".")[0]
    found = any(os.path.exists(name) for name in (package, f"{package}.py"))
    if not found and importlib.util.find_spec(package) is None:
        raise ValueError(f"module {options.target!r} is not found (working directory {os.getcwd()})")


def _find_oneself(options: LaunchOptions) -> tuple[bool, str, int | None]:
    """Whether this machine is the master, its address, and its place."""
    host, port = options.endpoint
    if options.machines[1] == 1:
        return True, host, None
    if options.ips:
        place = options.node_rank
        if place is None:
            own = [index for index, ip in enumerate(options.ips) if is_local(ip)]
            if len(own) != 1:
                what = "none" if not own else f"{len(own)}"
                raise LaunchError(
                    f"{what} of --ips {','.join(options.ips)} is an address of this machine "
                    f"({socket.gethostname()}); list each machine once, by an address that it has itself, "
                    "or give --node_rank"
                )
            place = own[0]
        return place == 0, options.ips[place], place
    serve = is_local(host) if options.node_rank is None else options.node_rank == 0
    return serve, host if serve else own_address(host, port), options.node_rank


def _interfaces(address: str, *, alone: bool) -> dict[str, str]:
    """Name the network interface to Gloo, NCCL and TensorPipe: by themselves they may resolve to loopback."""
    libraries = ("GLOO", "TP") if alone else ("GLOO", "NCCL", "TP")
    name = _interface_of(address)
    names = [f"{library}_SOCKET_IFNAME" for library in libraries]
    return {variable: name for variable in names if name and variable not in os.environ}


def _interface_of(address: str) -> str | None:
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        wanted = socket.inet_aton(socket.gethostbyname(address))
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24] == wanted:  # SIOCGIFADDR
                    return name
    return None


def run(options: LaunchOptions) -> int:
    """Launch, wait, and report.

    The ranks' output goes to ``log_dir``, rank 0's also to the console. When a rank fails, all end, and the
    last thing printed is the traceback of the one that failed first. SIGTERM and Ctrl-C are passed on to the
    ranks; what has not ended after ``grace`` seconds, or at a second signal, is killed.

    Args:
        options: What to launch.

    Returns:
        0, or the exit code of the rank that failed first, 128 + n if signal n killed it.

    Raises:
        ValueError: The options do not fit this machine, or ``log_dir`` cannot be made.
        LaunchError: The machines do not find each other.
    """
    plan = Plan.of(options)
    _banner(options, plan)
    if options.dry_run:
        return 0
    try:
        Path(options.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ValueError(f"--log_dir {options.log_dir!r} cannot be made: {exc.strerror}") from exc
    _quiet_elastic()
    launch_id = uuid.uuid4().hex
    with _signals_raise(), _guarded(launch_id):
        try:
            return _launch(options, plan, launch_id)
        except SignalException as exc:  # before the ranks started: there is nobody to ask
            tell(f"hapi.launch: stopped by {exc.sigval.name}")
            return 128 + int(exc.sigval)


def _launch(options: LaunchOptions, plan: Plan, launch_id: str) -> int:
    host, port = options.endpoint
    store = open_store(host, port, serve=plan.serve, timeout=options.timeout, read_timeout=options.peer_timeout)

    def lost() -> None:
        tell(f"hapi.launch: master {host}:{port} has not answered for {options.peer_timeout:g} s")
        _bootstrap.kill_marked(launch_id)
        os._exit(1)

    watchdog = Watchdog(options.peer_timeout, lost)
    rendezvous = Rendezvous(
        store,
        serve=plan.serve,
        min_nodes=options.machines[0],
        max_nodes=options.machines[1],
        address=plan.address,
        place=plan.place,
        timeout=options.timeout,
        peer_timeout=options.peer_timeout,
        watchdog=watchdog,
    )
    outer = os.environ.get(_bootstrap.LAUNCH_ID)
    environment = {
        **plan.environment,
        _bootstrap.LAUNCH_ID: f"{outer}:{launch_id}" if outer else launch_id,
        "HAPI_LAUNCHER_PID": str(os.getpid()),
        "HAPI_MERGE_STDERR": "1",
    }
    logs = RankLogs(Path(options.log_dir), environment, lambda ranks: _show_first(ranks, options.log_dir))
    spec = WorkerSpec(
        role="worker",
        local_world_size=plan.nproc,
        entrypoint=plan.command[0],
        args=plan.command[1:],
        rdzv_handler=rendezvous,
        max_restarts=options.max_restarts,
        monitor_interval=POLL,
        local_addr=plan.address,
    )
    agent = Agent(spec, logs, rendezvous, launch_id=launch_id, grace=options.grace, report=_report)
    try:
        agent.run()
    except SignalException as exc:
        logs.stop()
        tell(f"hapi.launch: stopped by {exc.sigval.name}; exit code {agent.status}")
    except (RendezvousError, DistError) as exc:
        raise LaunchError(_explain(exc, options)) from exc
    finally:
        logs.close()
        with contextlib.suppress(RendezvousError, DistError):
            rendezvous.shutdown()
        watchdog.close()
    return agent.status


def _explain(exc: Exception, options: LaunchOptions) -> str:
    host, port = options.endpoint
    kind = type(exc).__name__
    if kind == "RendezvousTimeoutError":
        low, _ = options.machines
        return f"fewer than {low} machines came to {host}:{port} within {options.timeout:g} s (--timeout)"
    if kind == "RendezvousClosedError":
        return f"the launch on {host}:{port} has ended already"
    return f"the connection to the launcher on master {host}:{port} is lost: {str(exc).splitlines()[0]}"


@contextlib.contextmanager
def _guarded(launch_id: str) -> Iterator[None]:
    """A process that kills what is left of the ranks when this one is gone, also by ``kill -9``."""
    command = [sys.executable, "-I", "-S", _bootstrap.__file__, "--guard", launch_id]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and its like raise, as elastic has it once the ranks run; restored at the end."""

    def handle(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number)
        raise SignalException(f"the launcher got {name.name}", name)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _quiet_elastic() -> None:
    """Elastic logs each step of an end that is told here once, in order. LOGLEVEL brings it back."""
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)


def _banner(options: LaunchOptions, plan: Plan) -> None:
    lines = ["-----------  Configuration Arguments -----------"]
    for field in fields(options):
        value = getattr(options, field.name)
        if value != field.default or field.name in ("target", "log_dir"):
            shown = " ".join(value) if field.name == "args" else value
            lines.append(f"{field.name}: {','.join(shown) if isinstance(shown, tuple) else shown}")
    lines.append("-" * 48)
    cards = plan.environment.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    where = f"GPUs {cards or 'all'}" if torch.cuda.is_available() and cards != "" else "CPU"
    lines.append(f"{plan.nproc} process{'es' if plan.nproc > 1 else ''} on this machine ({where})")
    if options.dry_run:
        lines += [f"{name}={value}" for name, value in sorted(plan.environment.items())]
        lines.append(" ".join(plan.command))
    tell("\n".join(lines))


def _show_first(ranks: Mapping[int, Mapping[str, str]], log_dir: str) -> None:
    first, last = ranks[0], ranks[len(ranks) - 1]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    shown = "  ".join(f"{name}={first[name]}" for name in (*names, "OMP_NUM_THREADS") if name in first)
    files = f"{log_dir}/workerlog.{first['RANK']}"
    if len(ranks) > 1:
        files += f" to {log_dir}/workerlog.{last['RANK']}"
    note = ", rank 0 also here" if first["RANK"] == "0" else ""
    tell(f"hapi.launch: first process: {shown}\n{' ' * 13}output: {files}{note}")


def _report(failure: Failure, restarts_left: int) -> None:
    """The last thing that the user reads."""
    who = f"rank {failure.rank}" if failure.rank >= 0 else "launch"
    again = f"; starting all ranks again ({restarts_left} left)" if restarts_left else ""
    what = failure.traceback.rstrip() or "(it wrote nothing)"
    kind = "" if failure.raised or failure.rank < 0 else "last lines of its output:\n"
    tell(f"{_RULER}\n{who} on host {failure.host} failed ({failure.how}){again}\n{kind}{what}")
