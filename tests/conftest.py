"""A test must leave nothing: no environment variable, thread, open file or process group. See ``leak_check``."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist

from tests.helpers.ranks import close_pool


@pytest.fixture(scope="session", autouse=True)
def _close_ranks() -> Iterator[None]:
    yield
    close_pool()


@pytest.fixture(scope="session", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Packages that make folders in the home folder when they are imported (visualdl, matplotlib) make them here.

    Inductor's cache is fresh too, or a test that compiles would do nothing on a machine where it ran before.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)  # the generator that users' datasets draw from
    torch.manual_seed(0)
    torch.set_num_threads(1)


def _inductor_threads() -> set[threading.Thread]:
    """The threads that torch keeps for Inductor, from the first kernel that it compiles until the process ends."""
    module = sys.modules.get("torch._inductor.async_compile")
    if module is None or not module.AsyncCompile.pool.cache_info().currsize:
        return set()
    return set(module.AsyncCompile.pool()._threads)


def _threads() -> set[threading.Thread]:
    # tqdm's and torch's own helpers may start once and stay; only ours and the tests' count.
    named = (t for t in threading.enumerate() if not t.name.startswith(("pytest_timeout", "tqdm_monitor")))
    return {t for t in named if t.is_alive()} - _inductor_threads()


def _files() -> set[str]:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        return set()
    targets = set()
    for entry in folder.iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("/") and not target.startswith(("/dev", "/proc", "/memfd")):
            targets.add(target)
    return targets


@pytest.fixture(autouse=True)
def leak_check(_seeded: None) -> Iterator[None]:
    environment, threads, files = dict(os.environ), _threads(), _files()
    folder = Path.cwd()
    yield
    # torch names its compile cache the first time an optimizer steps, tensorboardX its checksums' mode at import.
    ignored = (
        "PYTEST_CURRENT_TEST",
        "TORCHINDUCTOR_CACHE_DIR",
        "CRC32C_SW_MODE",
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    )
    after = {k: v for k, v in os.environ.items() if k not in ignored}
    before = {k: v for k, v in environment.items() if k not in ignored}
    assert after == before, f"environment changed: {sorted(set(after.items()) ^ set(before.items()))}"
    assert Path.cwd() == folder, "the working directory changed"
    assert not dist.is_initialized(), "a process group is left"
    deadline = time.monotonic() + 5
    while (left := _threads() - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"threads are left: {left}"
    left_files = {f for f in _files() - files if not f.endswith((".so", ".pyc", ".py")) and "site-packages" not in f}
    assert not left_files, f"files are left open: {left_files}"
