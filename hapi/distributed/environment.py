"""Which launcher started this process, and what its place in the group is."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Environment", "detect", "resolve_device"]

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Environment:
    """A process's place in its group. Written once, read by everyone.

    Attributes:
        rank: Global index of this process, 0-based.
        world: Number of processes in the group.
        local_rank: Index among the processes of this machine.
        local_world: Number of processes on this machine.
        master_addr: Host where rank 0 listens; None on one process.
        master_port: Port of that; None on one process.
        launcher: What was detected: ``"none"``, ``"torch"``, ``"paddle"``, ``"openmpi"``, ``"mpich"``,
            ``"jsrun"`` or ``"slurm"``.
        role: ``"worker"`` (parameter servers will be ``"server"``).
        device: Where this rank computes; None until resolved.
        group: The process group; None for the default one.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    launcher: str = "none"
    role: str = "worker"
    device: torch.device | None = None
    group: Any = None


def detect(environ: Mapping[str, str] | None = None) -> Environment:
    """Read the place of this process from what its launcher left in the environment.

    The first launcher that is recognised wins: hapi.launch, torchrun and Kubernetes' PyTorchJob (``RANK``
    ...), ``PADDLE_*``, Open MPI, MPICH and its relatives (Intel MPI, MVAPICH, PALS), jsrun, SLURM (only
    inside a step that ``srun`` started: a batch script or an interactive shell carries the same variables,
    but is one process). A world of one is no launcher: the result is then ``Environment()``.

    Args:
        environ: The variables; None for ``os.environ``. Nothing else is looked at, and nothing is started.

    Returns:
        The environment, with ``device`` and ``group`` left None.

    Raises:
        ValueError: A value makes no sense, or the master's address cannot be told. The text says what to set.

    Example:
        >>> detect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}).rank
        1
    """
    values = os.environ if environ is None else environ
    for recognise in _LAUNCHERS:
        found = recognise(values)
        if found is not None:
            return found if found.world > 1 else Environment()
    if "RANK" in values and "WORLD_SIZE" in values and _integer(values, "WORLD_SIZE") > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in values]
        raise ValueError(
            f"RANK={values['RANK']} of WORLD_SIZE={values['WORLD_SIZE']} without {' and '.join(missing)}; "
            "set them to the host of rank 0 and a free port there, or unset RANK and WORLD_SIZE to run alone"
        )
    return Environment()


def resolve_device(
    env: Environment,
    device: str | torch.device | None = None,
    environ: Mapping[str, str] | None = None,
) -> torch.device:
    """The device on which a rank computes.

    Args:
        env: The rank's environment.
        device: ``"cuda"`` (this rank's card), ``"cuda:1"``, ``"cpu"``, a ``torch.device``; None for the
            rank's card where CUDA is available, else xpu, else mps (one process only), else cpu.
        environ: The variables; None for ``os.environ``.

    Raises:
        ValueError: The card does not exist; the text gives the counts.

    Example:
        >>> resolve_device(Environment(), "cpu")
        device(type='cpu')
    """
    values = os.environ if environ is None else environ
    if device is None:
        if torch.cuda.is_available():
            return _own_cuda_card(env, values)
        if torch.xpu.is_available():
            return torch.device("xpu", env.local_rank)
        if env.world == 1 and torch.backends.mps.is_available():
            return torch.device("mps")
        return torch.device("cpu")
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as exc:
        raise ValueError(f"device={device!r}; accepted: 'cuda', 'cuda:1', 'cpu' ..., a torch.device or None") from exc
    if wanted.type != "cuda":
        return wanted
    if not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}, but torch {torch.__version__} sees no CUDA device here")
    if str(wanted) == "cuda":
        return _own_cuda_card(env, values)
    if wanted.index >= torch.cuda.device_count():
        raise ValueError(f"device={str(device)!r}, but {_visible_cards(values)}")
    return wanted


def _own_cuda_card(env: Environment, values: Mapping[str, str]) -> torch.device:
    count = torch.cuda.device_count()
    index = env.local_rank
    visible = _listed(values.get("CUDA_VISIBLE_DEVICES", ""))
    if env.launcher == "paddle" and values.get("FLAGS_selected_gpus"):
        # Physical numbers, one per process: its place among the visible cards is what torch counts.
        chosen = _listed(values["FLAGS_selected_gpus"])[0]
        index = visible.index(chosen) if chosen in visible else int(chosen)
    elif env.launcher in ("slurm", "openmpi", "mpich", "jsrun") and count == len(visible) == 1:
        index = 0  # the scheduler gave each task a card of its own
    if index >= count:
        raise ValueError(
            f"rank {env.rank} is process {index} of {env.local_world} on this machine, but "
            f"{_visible_cards(values)}; start one process per card, or choose device='cpu'"
        )
    return torch.device("cuda", index)


def _visible_cards(values: Mapping[str, str]) -> str:
    mask = values.get("CUDA_VISIBLE_DEVICES")
    because = "" if mask is None else f" (CUDA_VISIBLE_DEVICES={mask!r})"
    count = torch.cuda.device_count()
    return f"{count} CUDA device{'s are' if count != 1 else ' is'} visible{because}"


# One function per launcher. Each returns None where its own variables are absent.


def _from_torch(values: Mapping[str, str]) -> Environment | None:
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= values.keys():
        return None
    local_rank = _integer(values, "LOCAL_RANK", 0)  # PyTorchJob without torchrun: one process per pod
    return _environment(
        "torch",
        rank=_integer(values, "RANK"),
        world=_integer(values, "WORLD_SIZE"),
        local_rank=local_rank,
        local_world=_integer(values, "LOCAL_WORLD_SIZE", local_rank + 1),
        addr=values["MASTER_ADDR"],
        port=_integer(values, "MASTER_PORT"),
    )


def _from_paddle(values: Mapping[str, str]) -> Environment | None:
    if not {"PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"} <= values.keys():
        return None
    if values.get("TRAINING_ROLE", "TRAINER").upper() != "TRAINER":
        raise ValueError(f"TRAINING_ROLE={values['TRAINING_ROLE']!r}: only 'TRAINER' processes train a model")
    rank, world = _integer(values, "PADDLE_TRAINER_ID"), _integer(values, "PADDLE_TRAINERS_NUM")
    if world <= 1:
        return Environment()
    endpoints = _listed(values.get("PADDLE_TRAINER_ENDPOINTS", ""))
    hosts = [_split_endpoint(endpoint, "PADDLE_TRAINER_ENDPOINTS")[0] for endpoint in endpoints]
    if hosts and (len(hosts) != world or not 0 <= rank < world):
        raise ValueError(
            f"PADDLE_TRAINER_ID={rank}, PADDLE_TRAINERS_NUM={world}, but PADDLE_TRAINER_ENDPOINTS has "
            f"{len(hosts)}: {','.join(endpoints)}"
        )
    name = "PADDLE_LOCAL_RANK" if "PADDLE_LOCAL_RANK" in values else "PADDLE_RANK_IN_NODE"
    local_rank = _integer(values, name, hosts[:rank].count(hosts[rank]) if hosts else 0)
    local_world = _integer(values, "PADDLE_LOCAL_SIZE", hosts.count(hosts[rank]) if hosts else local_rank + 1)
    master = values.get("PADDLE_MASTER") or (endpoints[0] if endpoints else "")
    if not master:
        raise ValueError(
            f"PADDLE_TRAINER_ID={rank} of {world} without a master; set PADDLE_MASTER=host:port or "
            "PADDLE_TRAINER_ENDPOINTS=host:port,host:port,..."
        )
    addr, port = _split_endpoint(master, "PADDLE_MASTER")
    return _environment(
        "paddle",
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        addr=addr,
        port=port,
    )


def _from_openmpi(values: Mapping[str, str]) -> Environment | None:
    return _from_mpi(values, "openmpi", "OMPI_COMM_WORLD", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PRTE_JOBID"))


def _from_mvapich(values: Mapping[str, str]) -> Environment | None:
    return _from_mpi(values, "mpich", "MV2_COMM_WORLD", ("PMI_JOBID", "PMI_ID"))


def _from_mpich(values: Mapping[str, str]) -> Environment | None:
    if not {"PMI_RANK", "PMI_SIZE"} <= values.keys():
        return None
    local = next((name for name in ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID") if name in values), None)
    if local is None and "SLURM_STEP_ID" in values:
        return None  # srun speaks PMI too; Hydra, which also runs under srun, gives a local rank
    rank, world = _integer(values, "PMI_RANK"), _integer(values, "PMI_SIZE")
    if local is None:
        local_rank, local_world = 0, 1
    else:
        local_rank = _integer(values, local)
        local_world = _integer(values, "MPI_LOCALNRANKS", local_rank + 1)
    addr, port = _mpi_master(values, "mpich", world, local_world, ("PMI_JOBID", "PALS_APID"))
    return _environment(
        "mpich",
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        addr=addr,
        port=port,
    )


def _from_jsrun(values: Mapping[str, str]) -> Environment | None:
    return _from_mpi(values, "jsrun", "JSM_NAMESPACE", ("LSB_JOBID",))


def _from_slurm(values: Mapping[str, str]) -> Environment | None:
    if not {"SLURM_PROCID", "SLURM_STEP_ID"} <= values.keys():
        return None
    # The batch script, salloc and "extern" steps have numbers from 0xfffffff0 up; srun --pty is a shell.
    special = _integer(values, "SLURM_STEP_ID") >= 0xFFFFFFF0
    if special or "SLURM_PTY_PORT" in values or values.get("SLURM_JOB_NAME") == "interactive":
        return None
    world_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in values else "SLURM_NTASKS"
    rank, world, local_rank = (
        _integer(values, "SLURM_PROCID"),
        _integer(values, world_name, 1),
        _integer(values, "SLURM_LOCALID", 0),
    )
    if world <= 1:
        return Environment()
    per_node = _tasks_per_node(values.get("SLURM_STEP_TASKS_PER_NODE", values.get("SLURM_TASKS_PER_NODE", "")))
    node = _integer(values, "SLURM_NODEID", 0)
    local_world = per_node[node] if node < len(per_node) else local_rank + 1
    nodes = values.get("SLURM_STEP_NODELIST") or values.get("SLURM_NODELIST") or ""
    addr = values.get("MASTER_ADDR") or (_first_host(nodes) if nodes else "")
    if not addr:
        raise ValueError(
            "srun step without SLURM_STEP_NODELIST; set MASTER_ADDR to the host of rank 0 in the batch script"
        )
    job = f"{values.get('SLURM_JOB_ID', '')}.{values['SLURM_STEP_ID']}"
    return _environment(
        "slurm",
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        addr=addr,
        port=_integer(values, "MASTER_PORT", _port_of(job)),
    )


_LAUNCHERS: tuple[Callable[[Mapping[str, str]], Environment | None], ...] = (
    _from_torch,
    _from_paddle,
    _from_openmpi,
    _from_mvapich,
    _from_mpich,
    _from_jsrun,
    _from_slurm,
)


def _from_mpi(values: Mapping[str, str], launcher: str, prefix: str, job_ids: tuple[str, ...]) -> Environment | None:
    if not {f"{prefix}_RANK", f"{prefix}_SIZE"} <= values.keys():
        return None
    world = _integer(values, f"{prefix}_SIZE")
    local_rank = _integer(values, f"{prefix}_LOCAL_RANK", 0)
    local_world = _integer(values, f"{prefix}_LOCAL_SIZE", local_rank + 1)
    addr, port = _mpi_master(values, launcher, world, local_world, job_ids)
    return _environment(
        launcher,
        rank=_integer(values, f"{prefix}_RANK"),
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        addr=addr,
        port=port,
    )


def _mpi_master(
    values: Mapping[str, str], launcher: str, world: int, local_world: int, job_ids: tuple[str, ...]
) -> tuple[str, int]:
    addr = values.get("MASTER_ADDR") or ("127.0.0.1" if local_world == world else "")
    if not addr:
        raise ValueError(
            f"{launcher} started {world} processes, {local_world} of them on this machine, and none of its "
            "variables names the host of rank 0; give it to all: mpirun -x MASTER_ADDR=host (Open MPI) or "
            "-genv MASTER_ADDR host (MPICH), or set MASTER_ADDR before the launch"
        )
    job = next((values[name] for name in job_ids if values.get(name)), None)
    return addr, _integer(values, "MASTER_PORT", DEFAULT_PORT if job is None else _port_of(job))


def _environment(
    launcher: str, *, rank: int, world: int, local_rank: int, local_world: int, addr: str, port: int
) -> Environment:
    """The checked result."""
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"{launcher}: rank {rank} is outside its world of {world} processes")
    if local_world > world or not 0 <= local_rank < local_world:
        raise ValueError(
            f"{launcher}: local rank {local_rank} of {local_world} processes on this machine does not fit a "
            f"world of {world}"
        )
    if not addr or not 0 < port < 65536:
        raise ValueError(f"{launcher}: the master must be a host and a port from 1 to 65535, not {addr!r}:{port}")
    return Environment(rank, world, local_rank, local_world, addr, port, launcher)


def _integer(values: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = values.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name}={text!r}; an integer is needed") from None


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _split_endpoint(endpoint: str, name: str) -> tuple[str, int]:
    host, colon, port = endpoint.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ValueError(f"{name}: {endpoint!r}; accepted: host:port")
    return host.strip("[]"), int(port)


def _port_of(job: str) -> int:
    """A port that all processes of a job compute alike, below the kernel's ephemeral range."""
    return 10000 + zlib.crc32(job.encode()) % 20000


def _first_host(nodes: str) -> str:
    """``"a[003-5,9]b,c"`` -> ``"a003b"``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group()) if first else ""


def _tasks_per_node(text: str) -> list[int]:
    """``"2(x3),1"`` -> ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts
