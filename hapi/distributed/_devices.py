"""Which GPUs the processes of this machine get, for the launcher and for spawn."""

from __future__ import annotations

import os
from pathlib import Path

import torch

__all__ = ["choose_devices", "usable_cpus"]


def choose_devices(
    devices: str | None, nproc: int | None, backend: str = "auto", *, cpu_default: int = 1
) -> tuple[int, dict[str, str]]:
    """The number of processes, and the variables that show them their GPUs.

    All processes see the same list, and each uses ``cuda:LOCAL_RANK``, as under torchrun.

    Args:
        devices: GPUs as ``"0,1"``, numbered as in ``CUDA_VISIBLE_DEVICES`` if that is set; ``"cpu"`` hides
            all; None leaves what is visible.
        nproc: Number of processes; None for one per GPU.
        backend: ``"nccl"`` needs a GPU.
        cpu_default: Processes where there is no GPU and ``nproc`` is None.

    Raises:
        ValueError: A GPU is not there, twice in the list, or there are more processes than GPUs.

    Example:
        >>> choose_devices("cpu", 2)
        (2, {'CUDA_VISIBLE_DEVICES': ''})
    """
    if devices is not None and devices.strip().lower() == "cpu":
        if backend == "nccl":
            raise ValueError("backend 'nccl' needs GPUs, but devices 'cpu' hides them")
        return nproc or cpu_default, {"CUDA_VISIBLE_DEVICES": ""}
    count = torch.cuda.device_count()
    environment = {}
    if devices is not None:
        chosen = [item.strip() for item in devices.split(",") if item.strip()]
        _check_listed(devices, chosen, count)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
        count = len(chosen)
    if not count:
        if backend == "nccl":
            raise ValueError("backend 'nccl' needs GPUs, but none is visible (torch.cuda.device_count() is 0)")
        return nproc or cpu_default, environment
    if nproc is not None and nproc > count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise ValueError(
            f"{nproc} processes for {count} GPU{'s' if count > 1 else ''} (devices {devices or 'all'}, "
            f"CUDA_VISIBLE_DEVICES {visible}); start at most one per GPU, or choose devices 'cpu'"
        )
    return nproc or count, environment


def _check_listed(devices: str, chosen: list[str], count: int) -> None:
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    known = [str(i) for i in range(count)] if mask is None else [item.strip() for item in mask.split(",")]
    if not count:
        because = "" if mask is None else f", CUDA_VISIBLE_DEVICES is {mask!r}"
        raise ValueError(f"devices {devices!r}: torch.cuda.device_count() is 0 on this machine{because}")
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"devices {devices!r}; accepted: different GPU numbers such as '0,1', or 'cpu'")
    wrong = [item for item in chosen if item not in known]
    if wrong:
        raise ValueError(f"devices {devices!r}: {', '.join(wrong)} is not among the GPUs {', '.join(known)}")


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity mask, and its cgroup's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cpus if quota == "max" else max(1, min(cpus, int(quota) // int(period)))
    except (OSError, ValueError):
        return cpus
