"""Unchanged scripts under launchers, to the user's hands: what is printed, what is saved, what happens on failure."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hapi
from hapi.distributed.hang import EXIT_CODE
from tests.helpers.launching import Sandbox, sandbox
from tests.helpers.nets import LeNet, weight_gap
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks

ROOT = Path(hapi.__file__).parent.parent
EXAMPLE = str(ROOT / "examples" / "mnist_lenet.py")
HAS_MNIST = (Path(os.environ.get("HAPI_DATA_HOME", "/nonexistent")) / "mnist").is_dir()
LAUNCHERS = {
    "python": [sys.executable],
    "hapi.launch": [sys.executable, "-m", "hapi.launch", "--nproc", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
}
NO_NETWORK = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}

TRAIN = """
    import sys, torch, hapi
    from torch import nn

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            {fault}
            return torch.full((4,), index / 64), index % 2

    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), "cross_entropy", "acc")
    model.fit(Samples(), Samples(), batch_size=4, epochs=2, log_freq=4, shuffle=False, save_dir="saved")
    # One write: with unbuffered output the ranks' prints would mix.
    sys.stdout.write(f"value {{round(net.weight.sum().item(), 6)}}\\n")
"""


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Sandbox]:
    with sandbox(tmp_path) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_example_unchanged(box: Sandbox, launcher: str) -> None:
    """Digits stand in for MNIST here; the real one is trained in test_mnist.py and below."""
    env = {"HAPI_DATA_HOME": str(box.folder), "HOME": str(box.folder), **NO_NETWORK}
    ended = box.run([*LAUNCHERS[launcher], EXAMPLE, "--epochs", "4", "--save-dir", "out"], env, timeout=120)
    assert ended.code == 0, ended.err
    console = ended.out + ended.err
    # Said once, by rank 0, whatever the number of ranks; torchrun shows every rank's own prints.
    for line in ("Epoch 1/4", "Eval samples: 360"):
        assert console.count(line + "\n") == 1, console
    assert sorted(p.name for p in (box.folder / "out").glob("*.pt") if "state" not in p.name) == [
        "1.pt",
        "2.pt",
        "3.pt",
        "4.pt",
        "final.pt",
    ]
    accuracy = float(re.findall(r"acc_top1: ([\d.]+)", console)[-1])
    assert accuracy > 0.75


@pytest.mark.slow
def test_a_script_gives_the_same_numbers_under_every_launcher(box: Sandbox) -> None:
    """batch_size is per rank, so two ranks with 4 rows are one rank with 8."""
    two = box.script("train.py", TRAIN.format(fault="pass"))
    one = box.script("one.py", TRAIN.format(fault="pass").replace("batch_size=4", "batch_size=8"))
    values = {}
    for launcher, command in LAUNCHERS.items():
        ended = box.run([*command, one if launcher == "python" else two])
        assert ended.code == 0, ended.err
        assert "value" in ended.out, (launcher, ended)
        values[launcher] = float(re.findall(r"value (\S+)", ended.out + ended.err)[0])
    assert values["hapi.launch"] == pytest.approx(values["python"], abs=1e-5)
    assert values["torchrun"] == values["hapi.launch"]


@pytest.mark.slow
def test_a_failing_sample_ends_the_run_with_rank_index_and_code(box: Sandbox) -> None:
    script = box.script("train.py", TRAIN.format(fault="assert index != 45, 'broken image'"))
    ended = box.run([*LAUNCHERS["hapi.launch"], script], timeout=60)
    assert ended.code == 1
    assert ended.seconds < 30
    tail = "\n".join(ended.err.splitlines()[-60:])
    assert "AssertionError: broken image" in tail
    assert "while reading sample 45 of Samples (rank 1)" in tail
    assert re.search(r"rank 1 .*failed", tail)


HANG = """
    import time, torch, hapi
    from torch import nn

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            if index == 45:
                time.sleep(1000)
            return torch.zeros(4), 0

    net = nn.Linear(4, 2)
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), "cross_entropy")
    model.fit(Slow(), batch_size=4, shuffle=False, verbose=0)
"""


@pytest.mark.slow
def test_a_hang_is_reported_with_places_and_stacks(box: Sandbox) -> None:
    script = box.script("train.py", HANG)
    ended = box.run([*LAUNCHERS["hapi.launch"], script], {"HAPI_TIMEOUT": "3"}, timeout=60)
    assert ended.code == EXIT_CODE
    assert ended.seconds < 40
    report = ended.out + ended.err + "".join(p.read_text() for p in (box.folder / "log").glob("workerlog.*"))
    assert re.search(r"rank 0 on \S+ \(pid \d+\): in step 5 batch 5, \d+ s", report), report
    assert re.search(r"rank 1 on \S+ \(pid \d+\): reading batch 5, \d+ s", report), report
    assert "--- stacks of rank 1" in report
    assert "time.sleep(1000)" in report
    assert "no rank made progress for 3 s" in "\n".join(ended.err.splitlines()[-12:]), (
        "the table is what one reads last"
    )


def test_a_bad_timeout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hapi.distributed import group

    monkeypatch.setenv("HAPI_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="HAPI_TIMEOUT='soon'; accepted: a number of seconds"):
        group._timeout(None)
    assert group._timeout(5) == 5.0
    monkeypatch.delenv("HAPI_TIMEOUT")
    assert group._timeout(None) == 600.0


def lenet_epoch(precise: bool) -> Any:
    from hapi.datasets import MNIST

    train, test = ((d.images, d.labels) for d in (MNIST(mode="train"), MNIST(mode="test")))
    dtype = torch.float64 if precise else torch.float32
    torch.manual_seed(0)
    net = LeNet().to(dtype)
    # In float32 Adam divides rounding by rounding where gradients vanish, in any order of summation; see the test.
    optimizer = torch.optim.Adam(net.parameters(), 1e-3) if precise else torch.optim.SGD(net.parameters(), 0.01)
    model = hapi.Model(net).prepare(optimizer, nn.CrossEntropyLoss(), hapi.metrics.Accuracy(topk=(1, 2)))
    history = model.fit((train[0].to(dtype) / 255, train[1]), global_batch_size=128, seed=1, verbose=0)
    values = model.evaluate((test[0].to(dtype) / 255, test[1]), global_batch_size=500, verbose=0)
    return net.state_dict(), values, history.history, model._progress.state_dict()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MNIST, reason="the real MNIST is not there: set HAPI_DATA_HOME")
@pytest.mark.parametrize(("precise", "gap"), [(False, 1e-4), (True, 1e-9)], ids=["float32, SGD", "float64, Adam"])
def test_lenet_on_the_real_mnist_ends_with_the_same_weights_on_1_2_and_3_ranks(precise: bool, gap: float) -> None:
    """469 steps. Float64 shows that the arithmetic is the same; float32 that rounding stays small with plain SGD."""
    alone, values, history, progress = run_ranks(lenet_epoch, 1, precise, timeout=280)[0]
    assert values["acc_top1"] > (0.97 if precise else 0.5)
    for world in (2, 3):
        for weights, other_values, other_history, other_progress in run_ranks(lenet_epoch, world, precise, timeout=280):
            assert weight_gap(alone, weights) < gap
            assert other_values["acc_top1"] == values["acc_top1"]
            assert other_values["acc_top2"] == values["acc_top2"]
            assert other_progress == progress
            if other_history:
                assert other_history["loss"] == pytest.approx(history["loss"], abs=1e-5)
