"""Two machines: network namespaces with a cable between them. Skipped where the kernel does not allow it."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.test_launch import REDUCE
from tests.helpers.launching import Sandbox, launch_command, sandbox, wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
_numbers = itertools.count()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass
class Machines:
    """Two namespaces, ``names``, with addresses ``ips``."""

    box: Sandbox
    names: tuple[str, str]
    ips: tuple[str, str]

    def start(self, machine: int, *arguments: str) -> subprocess.Popen[str]:
        """Run a launch on one machine, with a log folder of its own."""
        launch = launch_command("--log_dir", f"log{machine}", *arguments)
        return self.box.start(["ip", "netns", "exec", self.names[machine], *launch])

    def cut(self) -> None:
        """Pull the cable."""
        ip("-n", self.names[1], "link", "set", "cable", "down")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the ip command")
    number = next(_numbers)
    names = (f"hapi{os.getpid()}a{number}", f"hapi{os.getpid()}b{number}")
    ips = ("10.231.77.1", "10.231.77.2")
    made: list[str] = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
            for name, address in zip(names, ips, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
                ip("-n", name, "link", "set", "cable", "up")
        except subprocess.CalledProcessError as exc:
            pytest.skip(f"no network namespaces here: {exc.stderr.strip()}")
        with sandbox(tmp_path) as box:
            yield Machines(box, names, ips)
    finally:
        for name in made:
            ip("netns", "del", name)


def test_ips_in_any_order_of_start(machines: Machines) -> None:
    """Ranks follow the list, not the addresses: the second address is the master."""
    box = machines.box
    box.script("train.py", REDUCE)
    arguments = ("--ips", f"{machines.ips[1]},{machines.ips[0]}", "--nproc", "2", "train.py")
    processes = [machines.start(machine, *arguments) for machine in (0, 1)]
    outputs = [box.finish(process) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(map("".join, outputs))
    assert outputs[0][0] == ""
    assert outputs[1][0].endswith("rank 0 of 4 by torch: 10\n")  # torch warns that the address has no name
    assert (box.folder / "log1" / "workerlog.1").read_text().endswith("rank 1 of 4 by torch: 10\n")
    assert (box.folder / "log0" / "workerlog.3").read_text().endswith("rank 3 of 4 by torch: 10\n")
    assert f"MASTER_ADDR={machines.ips[1]}" in outputs[0][1]


def test_master_with_uneven_machines_and_a_failure(machines: Machines) -> None:
    """Both machines print the same culprit, and end with its code."""
    box = machines.box
    box.script("train.py", REDUCE)
    common = ("--nnodes", "2", "--master", f"{machines.ips[0]}:29555")
    first = machines.start(0, *common, "--node_rank", "0", "train.py", "--fail")
    second = machines.start(1, *common, "--node_rank", "1", "--nproc", "2", "train.py", "--fail")
    for process in (first, second):
        _, err = box.finish(process)
        assert process.returncode == 1, err
        assert "rank 1 on host" in err
        assert err.endswith("KeyError: 'the real reason'\n"), err


def test_restart_on_both_machines(machines: Machines) -> None:
    box = machines.box
    body = REDUCE.replace(
        "if env.rank == 1:", "if env.rank == 1 and not os.path.exists('again'):\n            open('again', 'w')"
    )
    box.script("train.py", body.replace("import sys", "import os, sys"))
    arguments = ("--ips", ",".join(machines.ips), "--max_restarts", "1", "train.py", "--fail")
    processes = [machines.start(machine, *arguments) for machine in (0, 1)]
    outputs = [box.finish(process, timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(map("".join, outputs))
    assert "starting all ranks again" in outputs[0][1]


SLEEP = """
    import os, time
    open(f"ready.{os.environ['RANK']}", "w").close()
    time.sleep(1000 if os.environ["RANK"] == os.environ.get("SLOW", os.environ["RANK"]) else 0)
"""


def start_both(machines: Machines, *arguments: str) -> list[subprocess.Popen[str]]:
    machines.box.script("train.py", SLEEP)
    ips = ",".join(machines.ips)
    processes = [machines.start(machine, "--ips", ips, *arguments, "train.py") for machine in (0, 1)]
    ready = [machines.box.folder / f"ready.{rank}" for rank in (0, 1)]
    wait_until(lambda: all(path.exists() for path in ready))
    return processes


def test_a_signal_on_one_machine_ends_both(machines: Machines) -> None:
    processes = start_both(machines)
    processes[1].send_signal(signal.SIGTERM)
    errors = [machines.box.finish(process, timeout=30)[1] for process in processes]
    assert [process.returncode for process in processes] == [143, 143]
    assert "was stopped by SIGTERM" in errors[0]


def test_kill_9_of_the_masters_launcher_ends_both(machines: Machines) -> None:
    processes = start_both(machines)
    processes[0].kill()
    errors = [machines.box.finish(process, timeout=30)[1] for process in processes]
    assert processes[1].returncode == 1
    assert f"the connection to the launcher on master {machines.ips[0]}:29500 is lost" in errors[1]


def test_a_cut_cable_ends_both(machines: Machines) -> None:
    processes = start_both(machines, "--peer_timeout", "4")
    machines.cut()
    errors = [machines.box.finish(process, timeout=40)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert "machine 1 has not answered for 4 s" in errors[0]
    assert f"master {machines.ips[0]}:29500 has not answered for 4 s" in errors[1]
