"""``python -m hapi.launch``: arguments, logs, errors, signals, restarts; and no process left by any of it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hapi.distributed import _devices
from hapi.distributed._blame import Failure, culprit
from hapi.distributed._devices import choose_devices
from hapi.distributed._rendezvous import LaunchError, is_local
from hapi.distributed.launcher import LaunchOptions, Plan
from hapi.launch import main, parse
from tests.helpers.launching import Sandbox, free_port, launch_command, sandbox, wait_until

REDUCE = """
    import sys
    import torch
    from torch import distributed as dist
    from hapi.distributed import detect

    env = detect()
    dist.init_process_group(
        "gloo", f"tcp://{env.master_addr}:{env.master_port}", rank=env.rank, world_size=env.world
    )
    total = torch.tensor(env.rank + 1.0)
    dist.all_reduce(total)
    print(f"rank {env.rank} of {env.world} by {env.launcher}: {total.item():g}", flush=True)
    if "--fail" in sys.argv:
        if env.rank == 1:
            raise KeyError("the real reason")
        dist.all_reduce(total)
    dist.destroy_process_group()
"""


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Sandbox]:
    with sandbox(tmp_path) as made:
        yield made


def log(box: Sandbox, rank: int, suffix: str = "") -> str:
    return (box.folder / "log" / f"workerlog.{rank}{suffix}").read_text()


# Arguments.


def test_options_before_the_script_are_ours_and_those_after_it_are_its_own() -> None:
    options = parse(["--log-dir", "l", "--nproc=2", "train.py", "--nproc", "9", "-m", "--log_dir", "x"])
    assert options == LaunchOptions(
        target="train.py", args=("--nproc", "9", "-m", "--log_dir", "x"), log_dir="l", nproc=2
    )
    assert parse(["--nproc-per-node", "3", "-m", "pkg.train", "a"]) == LaunchOptions(
        target="pkg.train", module=True, args=("a",), nproc=3
    )
    assert parse(["--gpus", "0,1", "t.py"]).devices == parse(["--devices=0,1", "t.py"]).devices == "0,1"
    assert parse(["--ips", "a, b", "t.py"]).machines == (2, 2)
    assert parse(["--nnodes", "2:4", "--master", "h:1", "t.py"]).machines == (2, 4)
    assert parse(["--dry-run", "t.py"]).dry_run


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nporc", "2", "t.py"], "unknown option '--nporc' before the script; did you mean 'nproc'?"),
        (["--epochs", "2", "t.py"], "unknown option '--epochs' before the script; options of the script follow"),
        (["--nproc", "2"], "name the script to run"),
        (["--nproc", "two", "t.py"], "invalid int value: 'two'"),
        (["--nproc"], "expected one argument"),
    ],
)
def test_a_mistyped_option_is_an_error_at_once(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nproc", "0"], "--nproc 0: at least 1"),
        (["--nnodes", "2"], "--nnodes 2 needs --master host:port"),
        (["--nnodes", "3:2", "--master", "h:1"], "1 <= MIN <= MAX"),
        (["--nnodes", "x"], "accepted: N or MIN:MAX"),
        (["--nnodes", "2", "--master", "h:port"], "accepted: host:port"),
        (["--nnodes", "2", "--master", "h:70000"], "port 1 to 65535"),
        (["--nnodes", "2", "--master", "h:1", "--node_rank", "2"], "--node_rank 2 is not in 0..1"),
        (["--ips", "a,b", "--master", "h:1"], "leave out --nnodes and --master"),
        (["--backend", "mpi"], "accepted: 'auto', 'gloo', 'nccl'"),
        (["--max_restarts", "-1"], "--max_restarts -1"),
        (["--grace", "-1"], "--grace must be 0 or more"),
        (["--gpus", "0"], "devices '0': torch.cuda.device_count() is 0"),
        (["--backend", "nccl"], "needs GPUs, but none is visible"),
    ],
)
def test_what_makes_no_sense_ends_with_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main([*argv, __file__]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_script_or_module_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere.py"]) == 2
    assert "script 'nowhere.py' is not a file (working directory /" in capsys.readouterr().err
    assert main(["-m", "nowhere.train"]) == 2
    assert "module 'nowhere.train' is not found" in capsys.readouterr().err


def test_a_log_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").touch()
    assert main(["--log_dir", str(tmp_path / "log"), __file__]) == 2
    assert "cannot be made: File exists" in capsys.readouterr().err


def test_dry_run_starts_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (
        main(["--dry_run", "--devices", "cpu", "--nproc", "2", "--log_dir", str(tmp_path / "l"), __file__, "--x"]) == 0
    )
    shown = capsys.readouterr().err
    assert "2 processes on this machine (CPU)" in shown
    assert f"--script {__file__} --x" in shown
    assert "CUDA_VISIBLE_DEVICES=\n" in shown
    assert not (tmp_path / "l").exists()


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert choose_devices(None, None) == (4, {})
    assert choose_devices(None, 2) == (2, {})
    assert choose_devices("1,3", None) == (2, {"CUDA_VISIBLE_DEVICES": "1,3"})
    assert choose_devices("cpu", None) == (1, {"CUDA_VISIBLE_DEVICES": ""})
    for devices, nproc, message in (
        ("4", None, "devices '4': 4 is not among the GPUs 0, 1, 2, 3"),
        ("0,0", None, "different GPU numbers"),
        ("", None, "different GPU numbers"),
        (None, 5, "5 processes for 4 GPUs"),
        ("0,1", 3, "3 processes for 2 GPUs"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_devices(devices, nproc)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert choose_devices("4,5", None) == (2, {"CUDA_VISIBLE_DEVICES": "4,5"})
    with pytest.raises(ValueError, match="0 is not among the GPUs 4, 5, 6, 7"):
        choose_devices("0", None)


def test_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("hapi.distributed.launcher.usable_cpus", lambda: 9)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert Plan.of(LaunchOptions(target=__file__, nproc=4)).environment["OMP_NUM_THREADS"] == "2"
    assert Plan.of(LaunchOptions(target=__file__, nproc=20)).environment["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in Plan.of(LaunchOptions(target=__file__, nproc=4)).environment
    assert 1 <= _devices.usable_cpus() <= (os.cpu_count() or 1)


def test_a_machine_finds_itself_in_the_list() -> None:
    assert is_local("127.0.0.1")
    assert not is_local("192.0.2.7")
    plan = Plan.of(LaunchOptions(target=__file__, ips=("192.0.2.7", "127.0.0.1")))
    assert (plan.place, plan.serve, plan.address) == (1, False, "127.0.0.1")
    assert plan.environment["GLOO_SOCKET_IFNAME"] == plan.environment["NCCL_SOCKET_IFNAME"] == "lo"
    with pytest.raises(LaunchError, match=r"none of --ips 192.0.2.7,192.0.2.8 is an address of this machine"):
        Plan.of(LaunchOptions(target=__file__, ips=("192.0.2.7", "192.0.2.8")))


# Whom to blame.

TORN = "Traceback (most recent call last):\n  File\nRuntimeError: [gloo/transport/tcp] Connection closed by peer"
OWN = "Traceback (most recent call last):\n  File\nValueError: shapes (Connection closed by peer is not in it)"


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([Failure(0, 1, TORN, 1.0), Failure(1, 1, "Traceback\n  x\nKeyError: 1", 2.0)], 1),
        ([Failure(0, 1, "Traceback\n  x\nKeyError: 1", 1.0), Failure(1, -9, "", 2.0, raised=False)], 1),
        ([Failure(0, 1, TORN, 1.0), Failure(1, 3, "", 2.0, raised=False)], 1),
        ([Failure(0, -15, "", 1.0, raised=False, stopped=True), Failure(1, 1, TORN, 2.0)], 1),
        ([Failure(0, 1, "Traceback\n  x\nKeyError: 1", 2.0), Failure(1, 1, "Traceback\n  x\nKeyError: 1", 1.5)], 1),
        ([Failure(0, 1, TORN, 2.0), Failure(1, 1, TORN, 1.0)], 1),
        ([Failure(0, -6, TORN, 1.0), Failure(1, 1, "Traceback\n  x\nKeyError: 1", 2.0)], 1),
    ],
)
def test_the_culprit_is_the_rank_that_the_others_died_of(failures: list[Failure], rank: int) -> None:
    assert culprit(failures).rank == rank
    assert culprit(failures[::-1]).rank == rank


def test_exit_codes_are_the_shells() -> None:
    assert [Failure(0, code).status for code in (0, 3, -9, None)] == [0, 3, 137, 1]
    assert [Failure(0, code).how for code in (3, -9)] == ["exit code 3", "killed by SIGKILL"]


# Runs.


@pytest.mark.ranks
def test_ranks_reduce_and_write_their_logs(box: Sandbox) -> None:
    box.script("train.py", REDUCE)
    ended = box.launch("--nproc", "2", "train.py", "--epochs", "3")
    assert ended.code == 0, ended.err
    assert ended.out == log(box, 0) == "rank 0 of 2 by torch: 3\n"
    assert log(box, 1) == "rank 1 of 2 by torch: 3\n"
    assert "args: --epochs 3" in ended.err
    assert re.search(
        r"RANK=0  WORLD_SIZE=2  LOCAL_RANK=0  LOCAL_WORLD_SIZE=2  MASTER_ADDR=127.0.0.1  MASTER_PORT=\d+", ended.err
    )


@pytest.mark.ranks
def test_a_script_sees_what_plain_python_shows(box: Sandbox) -> None:
    box.script("lib/helper.py", "NAME = 'helper'")
    shown = "import sys; print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__ and __spec__.name)"
    box.script("lib/train.py", f"from helper import NAME; {shown}; assert sys.modules['__main__'].NAME == NAME")
    box.script("pkg/__init__.py", "")
    box.script("pkg/train.py", f"from pkg import __name__ as p; {shown}")
    for how in (["lib/train.py", "-x"], ["-m", "pkg.train", "-x"]):
        plain = box.run([sys.executable, *how])
        launched = box.launch("--log_dir", "l", *how)
        assert plain.code == launched.code == 0, launched.err
        assert launched.out == plain.out


@pytest.mark.ranks
def test_the_console_is_live_and_keeps_progress_bars(box: Sandbox) -> None:
    box.script(
        "train.py",
        """
        import os, time
        print("1/2\\r", end="", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.02)
        os.write(2, b"2/2\\xff\\n")
        """,
    )
    process = box.start(launch_command("train.py"))
    assert process.stdout is not None
    assert os.read(process.stdout.fileno(), 100) == b"1/2\r"
    (box.folder / "go").touch()
    assert os.read(process.stdout.fileno(), 100) == b"2/2\xff\n"
    box.finish(process)
    assert process.returncode == 0


@pytest.mark.ranks
def test_spawned_dataloader_workers_find_the_script(box: Sandbox) -> None:
    box.script(
        "train.py",
        """
        from torch.utils.data import DataLoader, Dataset

        class Rows(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return index

        if __name__ == "__main__":
            loader = DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
            print([batch.tolist() for batch in loader])
        """,
    )
    ended = box.launch("train.py")
    assert (ended.code, ended.out) == (0, "[[0, 1, 2, 3]]\n"), ended.err


@pytest.mark.ranks
def test_the_last_lines_are_the_traceback_of_the_rank_that_failed_first(box: Sandbox) -> None:
    box.script("train.py", REDUCE)
    ended = box.launch("--nproc", "3", "train.py", "--fail")
    assert ended.code == 1
    assert ended.seconds < 30
    report = ended.err[ended.err.rindex("-" * 80) :].splitlines()
    assert report[1] == f"rank 1 on host {socket.gethostname()} failed (exit code 1)"
    assert report[2] == "Traceback (most recent call last):"
    assert report[3].startswith(f'  File "{box.folder}/train.py", line ')
    assert report[-1] == "KeyError: 'the real reason'"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("line", "code", "how"),
    [
        ("sys.exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
        ("os.kill(os.getpid(), 11)", 139, "killed by SIGSEGV"),
        ("os._exit(3)", 3, "exit code 3"),
        ("sys.exit('no data')", 1, "exit code 1"),
    ],
)
def test_the_exit_code_is_the_ranks_own(box: Sandbox, line: str, code: int, how: str) -> None:
    box.script(
        "train.py",
        f"""
        import os, sys, time
        print("before the end", flush=True)
        if os.environ["RANK"] == "1":
            {line}
        time.sleep(1000)
        """,
    )
    ended = box.launch("--nproc", "2", "train.py")
    assert ended.code == code
    assert ended.seconds < 20
    assert (
        f"rank 1 on host {socket.gethostname()} failed ({how})\nlast lines of its output:\nbefore the end" in ended.err
    )


@pytest.mark.ranks
def test_a_rank_that_will_not_end_is_ended(box: Sandbox) -> None:
    box.script(
        "train.py",
        """
        import os, signal, subprocess, threading, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        threading.Thread(target=time.sleep, args=(1000,)).start()
        if os.environ["RANK"] == "1":
            raise ValueError("and then waits for its thread")
        """,
    )
    ended = box.launch("--nproc", "2", "train.py")
    assert ended.code == 1
    assert ended.seconds < 20
    assert ended.err.endswith("ValueError: and then waits for its thread\n")


WAIT = """
    import os, signal, subprocess, sys, time
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    def finish(number, frame):
        time.sleep(0.5)
        print("finished the batch", flush=True)
        sys.exit(int(os.environ.get("CODE", "0")))
    if os.environ.get("CODE"):
        signal.signal(signal.SIGTERM, finish)
    if os.environ.get("DEAF"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"ready.{os.environ['RANK']}", "w").close()
    time.sleep(1000)
"""


def start_waiting(box: Sandbox, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    box.script("train.py", WAIT)
    process = box.start(launch_command("--nproc", "2", *arguments, "train.py"), env)
    wait_until(lambda: all((box.folder / f"ready.{rank}").exists() for rank in range(2)))
    return process


@pytest.mark.ranks
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_ends_children_and_grandchildren(box: Sandbox, number: signal.Signals, code: int) -> None:
    process = start_waiting(box)
    begun = time.monotonic()
    process.send_signal(number)
    _, err = box.finish(process)
    assert process.returncode == code
    assert time.monotonic() - begun < 10
    assert f"stopped by {number.name}" in err
    box.assert_empty(within=0)


@pytest.mark.ranks
@pytest.mark.parametrize("code", [0, 75])
def test_a_rank_that_handles_sigterm_finishes_and_keeps_its_code(box: Sandbox, code: int) -> None:
    process = start_waiting(box, env={"CODE": str(code)})
    process.send_signal(signal.SIGTERM)
    out, _ = box.finish(process)
    assert process.returncode == code
    assert out == log(box, 1) == "finished the batch\n"


@pytest.mark.ranks
def test_grace_has_an_end_and_a_second_signal_ends_it_now(box: Sandbox) -> None:
    process = start_waiting(box, "--grace", "1", env={"DEAF": "1"})
    process.send_signal(signal.SIGTERM)
    box.finish(process, timeout=15)
    assert process.returncode == 143
    for path in box.folder.glob("ready.*"):
        path.unlink()
    process = start_waiting(box, "--grace", "1000", env={"DEAF": "1"})
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    box.finish(process, timeout=15)
    assert process.returncode == 143


@pytest.mark.ranks
def test_kill_9_of_the_launcher_leaves_nothing(box: Sandbox) -> None:
    process = start_waiting(box)
    assert len(box.processes()) >= 6  # the launcher, its guard, two ranks, two sleeps
    process.kill()
    box.finish(process)
    box.assert_empty(within=5)


@pytest.mark.ranks
def test_sigusr1_writes_the_stacks_into_the_log(box: Sandbox) -> None:
    process = start_waiting(box)
    (rank1,) = [
        pid
        for pid, command in box.processes().items()
        if "_bootstrap" in command and b"\0LOCAL_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
    ]
    os.kill(rank1, signal.SIGUSR1)
    wait_until(lambda: "train.py" in log(box, 1))
    assert "most recent call first" in log(box, 1)
    process.send_signal(signal.SIGTERM)
    box.finish(process)


@pytest.mark.ranks
def test_restarts(box: Sandbox) -> None:
    body = REDUCE.replace("if env.rank == 1:", "if env.rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] != '2':")
    box.script("train.py", body.replace("import sys", "import os, sys"))
    ended = box.launch("--nproc", "2", "--max_restarts", "3", "train.py", "--fail", timeout=120)
    assert ended.code == 0, ended.err
    assert ended.err.count("rank 1 on host") == 2
    assert "failed (exit code 1); starting all ranks again (3 left)" in ended.err
    assert "KeyError: 'the real reason'" in log(box, 1, ".attempt0")
    assert log(box, 1, ".attempt1")
    assert log(box, 1) == "rank 1 of 2 by torch: 3\n"


@pytest.mark.ranks
def test_restarts_run_out(box: Sandbox) -> None:
    box.script("train.py", "import sys; sys.exit(5)")
    box.script("log/workerlog.7", "of an older run")
    ended = box.launch("--max_restarts", "1", "train.py")
    assert ended.code == 5
    assert ended.err.count("failed (exit code 5)") == 2
    assert sorted(path.name for path in (box.folder / "log").iterdir()) == ["workerlog.0", "workerlog.0.attempt0"]


@pytest.mark.ranks
def test_a_busy_port_and_an_absent_master_are_clear_errors(box: Sandbox) -> None:
    box.script("train.py", "")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = box.launch("--nnodes", "2", "--master", f"127.0.0.1:{port}", "--node_rank", "0", "train.py")
    assert ended.code == 1
    assert f"port {port} of this machine cannot be used (Address already in use); choose another one" in ended.err
    port = free_port()
    ended = box.launch(
        "--nnodes", "2", "--master", f"127.0.0.1:{port}", "--node_rank", "1", "--timeout", "1", "train.py"
    )
    assert ended.code == 1
    assert f"waiting up to 1 s for master 127.0.0.1:{port} (Connection refused)" in ended.err
    assert f"master 127.0.0.1:{port} cannot be reached within 1 s (Connection refused)" in ended.err
    ended = box.launch("--nnodes", "2", "--master", "no.host.invalid:1", "--node_rank", "1", "train.py")
    assert ended.code == 1
    assert "host 'no.host.invalid' cannot be resolved" in ended.err


@pytest.mark.ranks
def test_machines_that_do_not_come_are_missed(box: Sandbox) -> None:
    box.script("train.py", "")
    ended = box.launch(
        "--nnodes", "2", "--master", f"127.0.0.1:{free_port()}", "--node_rank", "0", "--timeout", "1", "train.py"
    )
    assert ended.code == 1
    assert "fewer than 2 machines came to 127.0.0.1:" in ended.err


@pytest.mark.ranks
def test_a_launch_within_a_rank_ends_with_the_outer_one(box: Sandbox) -> None:
    box.script(
        "inner.py",
        """
        import subprocess, time
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open("up", "w").close()
        time.sleep(1000)
        """,
    )
    box.script(
        "outer.py",
        """
        import subprocess, sys
        subprocess.run([sys.executable, "-m", "hapi.launch", "--log_dir", "l2", "inner.py"])
        """,
    )
    process = box.start(launch_command("outer.py"))
    wait_until(lambda: (box.folder / "up").exists())
    process.kill()
    box.finish(process)
    box.assert_empty()


# Other launchers, the same script.


@pytest.mark.ranks
def test_under_torchrun(box: Sandbox) -> None:
    box.script("train.py", REDUCE)
    ended = box.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"])
    assert ended.code == 0, ended.err
    lines = re.findall(r"rank \d of 2 by torch: 3", ended.out)  # torchrun mixes the ranks' line ends
    assert sorted(lines) == [f"rank {rank} of 2 by torch: 3" for rank in range(2)]


@pytest.mark.ranks
@pytest.mark.parametrize("launcher", ["slurm", "openmpi", "paddle"])
def test_under_other_launchers(box: Sandbox, launcher: str) -> None:
    """No srun or mpirun here: the processes get the variables that these set."""
    box.script("train.py", REDUCE)
    port = str(free_port())

    def variables(rank: int) -> dict[str, str]:
        if launcher == "slurm":
            return {
                "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost",
                "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NTASKS": "2",
                "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
        if launcher == "openmpi":
            return {
                "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
        endpoints = f"127.0.0.1:{port},127.0.0.1:{int(port) + 1}"
        return {
            "PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": endpoints,
            "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip

    processes = [box.start([sys.executable, "train.py"], variables(rank)) for rank in range(2)]
    outputs = [box.finish(process) for process in processes]
    assert [out for out, _ in outputs] == [f"rank {rank} of 2 by {launcher}: 3\n" for rank in range(2)], outputs


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_killed_at_any_moment(box: Sandbox) -> None:
    soak = pytest.importorskip("benchmarks.kill_soak").soak  # not part of the source distribution
    box.script(
        "train.py",
        """
        import torch
        from torch import distributed as dist
        dist.init_process_group("gloo")
        while True:
            dist.all_reduce(torch.ones(10))
        """,
    )
    rounds = soak([str(box.folder / "train.py")], runs=2, nproc=2, seed=1, env=box.environment(), folder=box.folder)
    assert [done.problems for done in rounds] == [[], []]
