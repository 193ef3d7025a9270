"""Freed memory is kept for the next step, except where somebody else decides that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")

FAULTS = """
import resource, torch, hapi
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 784, 10))
model = hapi.Model(net, device="cpu").prepare(torch.optim.SGD(net.parameters(), 0.01), "cross_entropy")
data = torch.rand(64 * 40, 1, 28, 28), torch.randint(0, 10, (64 * 40,))

class Count(hapi.callbacks.Callback):
    def on_train_batch_end(self, step, logs=None):
        if step in (9, 39):
            self.seen = getattr(self, "seen", []) + [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]

count = Count()
history = model.fit(data, batch_size=64, verbose=0, callbacks=count, seed=0)
print((count.seen[1] - count.seen[0]) / 30, history.history["loss"][0])
"""

ASK = "from hapi.engine.memory import keep_freed_memory; print(keep_freed_memory(), keep_freed_memory())"


def run(code: str, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "HAPI_MALLOC"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**env, **environment}, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_step_faults_no_pages_in_and_the_numbers_stay() -> None:
    faults, loss = run(FAULTS).split()
    # A heap that glibc trims at every step: the worst of what its default may do.
    trimmed, same = run(FAULTS, MALLOC_MMAP_THRESHOLD_="131072", MALLOC_TRIM_THRESHOLD_="131072").split()
    # The heap still grows a little in the first steps.
    assert float(trimmed) > 500
    assert float(faults) < 0.1 * float(trimmed)
    assert loss == same


def test_it_is_done_once() -> None:
    assert run(ASK) == "True True"


@pytest.mark.parametrize(
    "environment",
    [
        {"HAPI_MALLOC": "default"},
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
    ],
    ids=lambda value: next(iter(value)),
)
def test_who_has_chosen_is_left_alone(environment: dict[str, str]) -> None:
    assert run(ASK, **environment) == "False False"


def test_another_allocator_is_left_alone() -> None:
    code = (
        "from pathlib import Path; from hapi.engine import memory\n"
        "real = Path.read_text\n"
        "Path.read_text = lambda self, **how: real(self, **how) + '/usr/lib/libjemalloc.so.2'\n"
        "print(memory.keep_freed_memory())"
    )
    assert run(code) == "False"
