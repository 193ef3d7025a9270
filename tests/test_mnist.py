"""The real thing: one epoch of LeNet on the real MNIST, by the example script that every user runs first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "mnist_lenet.py"
HAS_MNIST = (Path(os.environ.get("HAPI_DATA_HOME", "/nonexistent")) / "mnist").is_dir()


def run_example(*arguments: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MNIST, reason="the real MNIST is not there: set HAPI_DATA_HOME")
def test_one_epoch_on_the_real_mnist(tmp_path: Path) -> None:
    out = run_example("--save-dir", str(tmp_path / "save"), "--log-dir", str(tmp_path / "log"))
    lines = out.splitlines()
    assert "Epoch 1/1" in lines
    assert any(
        re.fullmatch(r"step 400/938 - loss: \d\.\d{4} - acc_top1: .* - acc_top2: .* - \S+/step", s) for s in lines
    )
    assert lines[-1] == "Eval samples: 10000"
    last = lines[-2]
    assert last.startswith("step 40/40 - loss: ")
    values = {name: float(value) for name, value in re.findall(r"(acc_top\d): ([\d.]+)", last)}
    assert values["acc_top1"] >= 0.97
    assert values["acc_top2"] >= 0.99
    assert sorted(p.name for p in (tmp_path / "save").iterdir()) == [
        "1.json",
        "1.pt",
        "1.state.pt",
        "final.json",
        "final.pt",
        "final.state.pt",
    ]
    assert (tmp_path / "log" / "epochs.csv").read_text().startswith("epoch,")
    assert "\r" not in out
    assert "\x1b" not in out


@pytest.mark.slow
def test_without_mnist_the_example_says_so_and_trains_on_digits(tmp_path: Path) -> None:
    # A proxy that is not there plays the missing network.
    out = run_example(
        "--epochs",
        "6",
        HAPI_DATA_HOME=str(tmp_path),
        HOME=str(tmp_path),
        http_proxy="http://127.0.0.1:9",
        https_proxy="http://127.0.0.1:9",
        no_proxy="",
    )
    first = out.splitlines()[0]
    assert first.startswith("MNIST cannot be had, so this run trains on scikit-learn's Digits")
    accuracy = float(re.findall(r"acc_top1: ([\d.]+)", out)[-1])
    assert accuracy > 0.85
    assert "Eval samples: 360" in out


def test_the_example_has_no_line_about_ranks_or_devices() -> None:
    text = EXAMPLE.read_text()
    code = text.split('"""', 2)[2]
    for word in ("rank", "cuda", "device", "world", "distributed", "gpu", "launch"):
        assert word not in code.lower()
    assert len(text.splitlines()) < 85
