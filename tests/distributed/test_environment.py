"""``detect`` against the variables that real launchers set; ``resolve_device`` against what torch says it sees."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import pytest
import torch

from hapi.distributed.environment import Environment, detect, resolve_device

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
PADDLE = {
    "PADDLE_TRAINER_ID": "2",
    "PADDLE_TRAINERS_NUM": "4",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6070,10.0.0.1:6071,10.0.0.2:6070,10.0.0.2:6071",
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6070",
}
PADDLE_LAUNCH = PADDLE | {
    "PADDLE_MASTER": "10.0.0.1:35000",
    "PADDLE_GLOBAL_RANK": "2",
    "PADDLE_LOCAL_RANK": "0",
    "PADDLE_RANK_IN_NODE": "0",
    "PADDLE_LOCAL_SIZE": "2",
    "PADDLE_GLOBAL_SIZE": "4",
    "PADDLE_NNODES": "2",
    "FLAGS_selected_gpus": "0",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "prterun-host-4711@1",
    "PMIX_RANK": "1",
}
OTHER_MACHINE = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "6",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NAME": "train.sh",
    "SLURM_JOB_NODELIST": "gpu[003-005]",
    "SLURM_NODELIST": "gpu[003-005]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[003-005]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "PMI_RANK": "4",
    "PMI_SIZE": "5",
}


def place(env: Environment) -> tuple[object, ...]:
    return env.launcher, env.rank, env.world, env.local_rank, env.local_world, env.master_addr


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param({}, ("none", 0, 1, 0, 1, None), id="plain python"),
        pytest.param(TORCHRUN, ("torch", 3, 4, 1, 2, "node0"), id="torchrun and hapi.launch"),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"},
            ("torch", 1, 3, 0, 1, "job-master-0"),
            id="PyTorchJob",
        ),
        pytest.param({"RANK": "1"}, ("none", 0, 1, 0, 1, None), id="a stray RANK"),
        pytest.param(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
                     ("none", 0, 1, 0, 1, None), id="torchrun with one process"),
        pytest.param(PADDLE, ("paddle", 2, 4, 0, 2, "10.0.0.1"), id="paddle spawn"),
        pytest.param(PADDLE_LAUNCH, ("paddle", 2, 4, 0, 2, "10.0.0.1"), id="paddle launch"),
        pytest.param(
            {"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "1"}, ("none", 0, 1, 0, 1, None), id="paddle, one process"
        ),
        pytest.param(OPENMPI, ("openmpi", 1, 2, 1, 2, "127.0.0.1"), id="Open MPI"),
        pytest.param(OPENMPI | OTHER_MACHINE | {"MASTER_ADDR": "n1"},
                     ("openmpi", 1, 2, 0, 1, "n1"), id="Open MPI on two machines, mpirun -x MASTER_ADDR"),
        pytest.param(HYDRA, ("mpich", 1, 2, 1, 2, "127.0.0.1"), id="MPICH and Intel MPI"),
        pytest.param(SRUN | HYDRA, ("mpich", 1, 2, 1, 2, "127.0.0.1"), id="Hydra bootstrapped by srun"),
        pytest.param(
            {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "0",
             "MV2_COMM_WORLD_LOCAL_SIZE": "2"},
            ("mpich", 0, 2, 0, 2, "127.0.0.1"), id="MVAPICH"),
        pytest.param(
            {"PMI_RANK": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_APID": "x", "MASTER_ADDR": "x1000"},
            ("mpich", 5, 8, 1, 2, "x1000"), id="PALS"),
        pytest.param(
            {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1",
             "JSM_NAMESPACE_LOCAL_SIZE": "4", "LSB_JOBID": "99"},
            ("jsrun", 1, 4, 1, 4, "127.0.0.1"), id="jsrun"),
        pytest.param(SRUN, ("slurm", 4, 5, 0, 1, "gpu003"), id="srun"),
        pytest.param(SRUN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"},
                     ("slurm", 1, 5, 1, 2, "gpu003"), id="srun, second task of the first node"),
        pytest.param(SRUN | {"MASTER_ADDR": "ib0", "MASTER_PORT": "1234"},
                     ("slurm", 4, 5, 0, 1, "ib0"), id="srun, own master"),
        pytest.param(SRUN | TORCHRUN, ("torch", 3, 4, 1, 2, "node0"), id="torchrun under srun"),
        pytest.param(SRUN | {"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"},
                     ("none", 0, 1, 0, 1, None), id="sbatch script"),
        pytest.param(SRUN | {"SLURM_PTY_PORT": "45123", "SLURM_PROCID": "0"},
                     ("none", 0, 1, 0, 1, None), id="srun --pty bash"),
        pytest.param(SRUN | {"SLURM_JOB_NAME": "interactive"}, ("none", 0, 1, 0, 1, None), id="salloc shell"),
        pytest.param({k: v for k, v in SRUN.items() if k not in ("SLURM_STEP_ID", "PMI_RANK", "PMI_SIZE")},
                     ("none", 0, 1, 0, 1, None), id="a shell with SLURM_NTASKS"),
    ],
)  # fmt: skip
def test_launchers(variables: Mapping[str, str], expected: tuple[object, ...]) -> None:
    before = dict(os.environ)
    env = detect(variables)
    assert place(env) == expected
    assert env.device is None
    assert env.group is None
    assert (env.master_port is None) == (env.world == 1)
    assert dict(os.environ) == before


def test_the_port_is_the_launchers_or_the_same_on_all_ranks() -> None:
    assert detect(TORCHRUN).master_port == 29500
    assert detect(PADDLE).master_port == 6070
    assert detect(PADDLE_LAUNCH).master_port == 35000
    assert detect(SRUN | {"MASTER_PORT": "1234"}).master_port == 1234
    ports = [detect(SRUN | {"SLURM_PROCID": str(rank)}).master_port for rank in range(5)]
    assert len(set(ports)) == 1
    assert ports[0] is not None
    assert 10000 <= ports[0] < 30000
    assert detect(SRUN | {"SLURM_STEP_ID": "1"}).master_port != ports[0]
    assert detect(OPENMPI).master_port == detect(OPENMPI | {"OMPI_COMM_WORLD_RANK": "0"}).master_port


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("a[003-5,9]b", "a003b"),
        ("a[7,9],b[1-2]", "a7"),
        ("rack[2-3]node[10-12]", "rack2node10"),
        ("login.cluster,n2", "login.cluster"),
    ],
)
def test_slurm_node_lists(nodes: str, first: str) -> None:
    assert detect(SRUN | {"SLURM_STEP_NODELIST": nodes}).master_addr == first


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "without MASTER_ADDR and MASTER_PORT; set them"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n"}, "without MASTER_PORT; set"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 is outside its world of 4"),
        (TORCHRUN | {"RANK": "x"}, "RANK='x'; an integer is needed"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "a port from 1 to 65535"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 of 2"),
        (PADDLE | {"PADDLE_TRAINERS_NUM": "3"}, "PADDLE_TRAINER_ENDPOINTS has 4"),
        (PADDLE | {"PADDLE_TRAINER_ID": "9"}, "PADDLE_TRAINER_ID=9"),
        ({"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "2"}, "set PADDLE_MASTER=host:port"),
        (PADDLE | {"TRAINING_ROLE": "PSERVER"}, "TRAINING_ROLE='PSERVER'"),
        (OPENMPI | OTHER_MACHINE, "mpirun -x MASTER_ADDR=host"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "-genv MASTER_ADDR host"),
        (SRUN | {"SLURM_STEP_NODELIST": "", "SLURM_NODELIST": ""}, "set MASTER_ADDR"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_says_what_to_set(variables: Mapping[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        detect(variables)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert detect() == detect(TORCHRUN)


@pytest.fixture
def four_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.usefixtures("four_cards")
def test_each_rank_has_its_card() -> None:
    env = detect(TORCHRUN)
    assert resolve_device(env, environ={}) == torch.device("cuda:1")
    assert resolve_device(env, "cuda", {}) == torch.device("cuda:1")
    assert resolve_device(env, "cuda:3", {}) == torch.device("cuda:3")
    assert resolve_device(env, torch.device("cpu"), {}) == torch.device("cpu")
    assert resolve_device(Environment(), environ={}) == torch.device("cuda:0")


@pytest.mark.usefixtures("four_cards")
def test_paddles_card_is_a_physical_number() -> None:
    env = detect(PADDLE_LAUNCH)
    assert resolve_device(env, environ={"FLAGS_selected_gpus": "3"}) == torch.device("cuda:3")
    masked = {"FLAGS_selected_gpus": "6", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert resolve_device(env, environ=masked) == torch.device("cuda:2")


def test_a_card_per_task_is_card_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    env = detect(SRUN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"})
    assert resolve_device(env, environ={"CUDA_VISIBLE_DEVICES": "3"}) == torch.device("cuda:0")
    with pytest.raises(ValueError, match=r"rank 3 is process 1 of 2 on this machine, but 1 CUDA device is visible"):
        resolve_device(detect(TORCHRUN), environ={"CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.usefixtures("four_cards")
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:4", r"device='cuda:4', but 4 CUDA devices are visible"),
        ("gpu", r"device='gpu'; accepted: 'cuda'"),
    ],
)
def test_a_wrong_device_is_refused(device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_device(Environment(), device, {})


def test_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="sees no CUDA device"):
        resolve_device(Environment(), "cuda", {})
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device(Environment(), environ={}) == torch.device("mps")
    assert resolve_device(detect(TORCHRUN), environ={}) == torch.device("cpu")
