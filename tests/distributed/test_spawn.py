"""``spawn``: the four usages, results, errors, and no process, port or file left."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from hapi.distributed.environment import detect
from hapi.distributed.spawn import SpawnError, _world, notebook_launch, spawn
from tests.helpers.launching import Sandbox, free_port, sandbox, wait_until

pytestmark = pytest.mark.ranks
net = nn.Linear(2, 1)  # built when this module is imported, as scripts do


@pytest.fixture(autouse=True)
def _no_files_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.glob("hapi-spawn-*"))


def train(flag: bool = False) -> tuple[int, bool, torch.Tensor, str | None]:
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return detect().rank, flag, total, os.environ.get("CUDA_VISIBLE_DEVICES")


def test_results_come_back_in_rank_order() -> None:
    before = dict(os.environ)
    context = spawn(train, args=(True,), nprocs=2)
    assert [result[:3] for result in context.results] == [(0, True, torch.tensor(3.0)), (1, True, torch.tensor(3.0))]
    assert len(context.processes) == 2
    assert context.join()
    assert dict(os.environ) == before


def test_gpus_are_shown_to_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    results = spawn(train, args=(True,), nprocs=2, gpus="4,5").results
    assert [result[3] for result in results] == ["4,5", "4,5"]


def test_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # By this way: the package's attribute of that name is the function.
    monkeypatch.setattr(sys.modules["hapi.distributed.spawn"], "usable_cpus", lambda: 6)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert _world(-1, None, "auto") == (6, {})
    assert _world(3, None, "auto") == (3, {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert _world(-1, None, "auto") == (4, {})
    assert _world(2, None, "auto") == (2, {})
    assert _world(-1, "1,3", "auto") == _world(2, [1, 3], "auto") == (2, {"CUDA_VISIBLE_DEVICES": "1,3"})
    assert _world(-1, "cpu", "auto") == (6, {"CUDA_VISIBLE_DEVICES": ""})
    for nprocs, gpus, message in (
        (5, None, "5 processes for 4 GPUs"),
        (1, "0,1", "nprocs=1, but gpus='0,1' names 2"),
        (3, "0,1", "3 processes for 2 GPUs"),
        (-1, "7", "7 is not among the GPUs 0, 1, 2, 3"),
        (0, None, "nprocs=0; accepted: 1 or more, or -1"),
    ):
        with pytest.raises(ValueError, match=message):
            _world(nprocs, gpus, "auto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selelcted_gpus": "0"}, "unknown option 'selelcted_gpus'"),
        ({"start_methd": "fork"}, "unknown option 'start_methd'; did you mean 'start_method'?"),
        ({"start_method": "thread"}, "start_method='thread'; accepted: spawn, fork, forkserver"),
        ({"backend": "mpi"}, "backend='mpi'; accepted: auto, gloo, nccl"),
        ({"ips": "a,b"}, "ips is not supported; spawn runs on one machine; use python -m hapi.launch --ips"),
        ({"master_port": 70000}, "master_port=70000; accepted: 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        spawn(train, nprocs=1, **options)


def test_the_old_name_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.warns(DeprecationWarning, match=r"selected_devices=\.\.\.\) is now gpus"), pytest.raises(ValueError):
        spawn(train, nprocs=2, selected_devices="0,1")
    with pytest.raises(ValueError, match="are the same"):
        spawn(train, gpus="0", selected_devices="0")


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"master_port={port} cannot be used"):
            spawn(train, nprocs=1, started_port=port)


def port_and_model() -> tuple[str, torch.Size]:
    return os.environ["MASTER_PORT"], net.weight.shape


def test_a_port_of_ones_own_and_a_module_level_model() -> None:
    port = free_port()
    assert spawn(port_and_model, nprocs=1, master_port=port).results == [(str(port), (1, 2))]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))  # given back


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_start_methods(method: str) -> None:
    assert [result[2] for result in spawn(train, nprocs=2, start_method=method).results] == [3.0, 3.0]


def test_a_function_that_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match=r"'test_a_function.*<lambda>' or its arguments cannot be sent"):
        spawn(lambda: 1, nprocs=1)


def fail() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise KeyError("the real reason")
    dist.barrier()


def test_the_rank_that_failed_first_is_named_with_its_traceback() -> None:
    begun = time.monotonic()
    with pytest.raises(SpawnError) as caught:
        spawn(fail, nprocs=3)
    assert time.monotonic() - begun < 30
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"rank 1 of 3 on host {socket.gethostname()} failed (exit code 1)"
    assert lines[2] == "Traceback (most recent call last):"
    assert lines[3].startswith(f'  File "{__file__}", line ')
    assert lines[-1] == "KeyError: 'the real reason'"


def end(how: str) -> None:
    if detect().rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


@pytest.mark.parametrize(("how", "code", "text"), [("kill", -9, "killed by SIGKILL"), ("exit", 3, "exit code 3")])
def test_a_rank_that_ends_without_an_exception(how: str, code: int, text: str) -> None:
    with pytest.raises(SpawnError, match=f"rank 1 of 2 on host .* failed \\({text}\\)$") as caught:
        spawn(end, args=(how,), nprocs=2)
    assert (caught.value.exit_code, caught.value.traceback) == (code, "")


def unpicklable() -> object:
    return lambda: None


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(SpawnError, match="the return value of rank 0, a function, cannot be pickled"):
        spawn(unpicklable, nprocs=1)


def rows() -> int:
    return sum(len(batch) for batch in DataLoader(list(range(10)), batch_size=3, num_workers=1))


def test_not_joined_at_once_and_with_dataloader_workers() -> None:
    context = spawn(rows, nprocs=1, join=False)
    assert context.results == []
    assert context.join(timeout=0) is False
    while not context.join(timeout=0.5):
        pass
    assert context.results == [10]


def test_close_ends_the_ranks() -> None:
    context = spawn(time.sleep, args=(1000,), nprocs=1, join=False)
    pids = context.pids()
    context.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Sandbox]:
    with sandbox(tmp_path) as made:
        yield made


PARENT = """
    import os, sys, time
    from hapi.distributed.spawn import spawn

    def train():
        open(f"ready.{os.environ['RANK']}", "w").close()
        time.sleep(1000)

    if __name__ == "__main__":
        spawn(train, nprocs=2, gpus="cpu")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_ranks_end_with_their_parent(box: Sandbox, number: signal.Signals) -> None:
    box.script("parent.py", PARENT)
    process = box.start([sys.executable, "parent.py"])
    wait_until(lambda: all((box.folder / f"ready.{rank}").exists() for rank in range(2)))
    process.send_signal(number)
    box.finish(process)
    box.assert_empty()


def test_notebooks(box: Sandbox) -> None:
    """What a cell defines is no module's: a script on stdin is the same to pickle."""
    pytest.importorskip("cloudpickle")
    box.script(
        "cells.py",
        """
        import torch
        from torch import distributed as dist
        from hapi.distributed.spawn import notebook_launch

        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)

        def train(scale):
            dist.init_process_group("gloo")
            print("hello from rank", dist.get_rank(), flush=True)
            before = net.bias.item()
            (net(torch.zeros(1, 2)).sum() * scale).backward()
            optimizer.step()  # still holds the parameters of this net
            dist.destroy_process_group()
            return round(before - net.bias.item(), 4)

        print(notebook_launch(train, args=(2.0,), nprocs=2, gpus="cpu"))
        """,
    )
    ended = box.run([sys.executable, "-c", "exec(open('cells.py').read())"])
    assert ended.code == 0, ended.err
    assert ended.out == "hello from rank 0\n[2.0, 2.0]\n"


def test_notebook_launch_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="only 'spawn' works here"):
        notebook_launch(train, start_method="fork")
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install hapi\[notebook\]"):
        notebook_launch(train)
