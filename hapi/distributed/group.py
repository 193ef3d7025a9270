"""Starting the process group, once, when it is first needed."""

from __future__ import annotations

import atexit
import dataclasses
import os
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from hapi.distributed.environment import Environment, detect, resolve_device
from hapi.distributed.hang import HangWatch, Place

__all__ = ["ParallelEnv", "get_rank", "get_world_size", "init_parallel_env", "place"]

DEFAULT_TIMEOUT = 600.0

_place = Place()
_watch: HangWatch | None = None


def init_parallel_env(
    backend: str | None = None,
    *,
    device: str | torch.device | None = None,
    timeout: float | None = None,
) -> Environment:
    """Join the group that the launcher's environment describes; on one process, only find the device.

    ``Model`` calls this by itself. A hand-written loop calls it first. Calling it again returns the same
    environment; a group that the script started itself is used as it is.

    Args:
        backend: ``"nccl"`` or ``"gloo"``. Default: ``HAPI_BACKEND``, else NCCL where the rank has a GPU, else Gloo.
        device: Where this rank computes. Default: cuda:LOCAL_RANK, else mps or xpu, else cpu.
        timeout: Seconds in one place of ``fit``, ``evaluate`` or ``predict`` (reading a batch, in a step, in a
            callback) that count as a hang: all ranks then print where they are and end. Default: ``HAPI_TIMEOUT``,
            else 600.

    Raises:
        ValueError: The launcher's environment is incomplete; the message says what to set.
        RuntimeError: The group's master cannot be reached.

    Example:
        >>> init_parallel_env().world  # one process
        1
    """
    env = detect()
    resolved = resolve_device(env, device)
    if dist.is_available() and dist.is_initialized():
        env = dataclasses.replace(env, rank=dist.get_rank(), world=dist.get_world_size())
    elif env.world > 1:
        _start(env, backend, resolved, _timeout(timeout))
    if env.world > 1:
        _start_watch(env, _timeout(timeout))
    return dataclasses.replace(env, device=resolved)


def place() -> Place:
    """Where this process's loop stands, for the hang report."""
    return _place


def _timeout(given: float | None) -> float:
    text = os.environ.get("HAPI_TIMEOUT")
    if given is None and text is None:
        return DEFAULT_TIMEOUT
    try:
        seconds = float(text or "") if given is None else float(given)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        what = f"HAPI_TIMEOUT={text!r}" if given is None else f"timeout={given!r}"
        raise ValueError(f"init_parallel_env: {what}; accepted: a number of seconds above 0")
    return seconds


def _start_watch(env: Environment, timeout: float) -> None:
    global _watch
    store = dist.distributed_c10d._get_default_store()
    if _watch is not None:
        if _watch.alive_for(store):
            return
        _watch.stop()
    _watch = HangWatch(_place, env.rank, env.world, timeout, store)


def _start(env: Environment, backend: str | None, device: torch.device, timeout: float) -> None:
    wanted = backend or os.environ.get("HAPI_BACKEND") or "auto"
    if wanted == "auto":
        wanted = "nccl" if device.type == "cuda" else "gloo"
    if wanted not in ("nccl", "gloo"):
        raise ValueError(f"init_parallel_env: backend={wanted!r}; accepted: 'nccl', 'gloo', 'auto'")
    if wanted == "nccl" and device.type != "cuda":
        raise ValueError(f"init_parallel_env: backend 'nccl' needs a GPU, but this rank computes on {device}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    options: dict[str, Any] = {"backend": wanted, "rank": env.rank, "world_size": env.world}
    # torch's own limit comes after the hang report, which says more.
    options["timeout"] = timedelta(seconds=2 * timeout + 60)
    if env.launcher == "torch":
        # MASTER_* and, under elastic launchers, the agent's own store.
        options["init_method"] = "env://"
    else:
        options["init_method"] = f"tcp://{env.master_addr}:{env.master_port}"
    dist.init_process_group(**options)
    atexit.register(_leave)


def _leave() -> None:
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None
    if dist.is_initialized():
        dist.destroy_process_group()


def get_rank() -> int:
    """This process's rank: of the started group, else from the launcher's environment; 0 on one process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return detect().rank


def get_world_size() -> int:
    """The number of processes: of the started group, else from the launcher's environment; 1 on one process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return detect().world


class ParallelEnv:
    """The reference's view of the environment: attributes ``rank``, ``world_size``, ``local_rank``, ``device_id``,
    ``nranks``.

    Example:
        >>> ParallelEnv().world_size
        1
    """

    def __init__(self) -> None:
        self._env = detect()

    @property
    def rank(self) -> int:
        """Global rank."""
        return get_rank()

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return get_world_size()

    @property
    def nranks(self) -> int:
        """Number of processes."""
        return get_world_size()

    @property
    def local_rank(self) -> int:
        """Index among the processes of this machine."""
        return self._env.local_rank

    @property
    def device_id(self) -> int:
        """Index of this process's device on this machine."""
        return self._env.local_rank
