from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

import hapi
from hapi.callbacks import Callback, ProfilerCallback
from tests.callbacks.driver import Driver


class Work(Callback):
    """One matrix product of a shape of its own per batch, so that a trace shows which batches it has."""

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        torch.ones(2, 2) @ torch.ones(2, 2)


def products(path: Path) -> int:
    events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("name") == "aten::mm" for event in events)


def traces(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pt.trace.json"), key=lambda path: int(path.name.split(".")[-4]))


def off() -> bool:
    return not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("batches", "repeat", "expected"),
    [(20, 1, [3]), (20, 2, [3, 3]), (7, 0, [3]), (8, 0, [3, 1]), (3, 1, [1])],
)
def test_traces_hold_the_active_batches(batches: int, repeat: int, expected: list[int], tmp_path: Path) -> None:
    profiler = ProfilerCallback(tmp_path / "new" / "traces", repeat=repeat, activities=["cpu"])
    Driver([Work(), profiler], batches=batches).fit(1)
    assert [products(path) for path in traces(tmp_path / "new" / "traces")] == expected
    assert off()


def test_batches_count_over_epochs_and_every_fit_has_its_own(tmp_path: Path) -> None:
    profiler = ProfilerCallback(tmp_path, wait=5, activities=[ProfilerActivity.CPU])
    driver = Driver([Work(), profiler], batches=3)
    driver.fit(3)
    driver.fit(3)
    assert [products(path) for path in traces(tmp_path)] == [3, 3]


@pytest.mark.parametrize(("fail_at", "written"), [((1, 1), 0), ((1, 2), 0), ((1, 3), 0), ((1, 4), 1), ((1, 9), 1)])
def test_a_failure_leaves_no_profiler_running(fail_at: tuple[int, int], written: int, tmp_path: Path) -> None:
    driver = Driver([Work(), ProfilerCallback(tmp_path, activities=["cpu"])], batches=12)
    with pytest.raises(RuntimeError, match="batch failed"):
        driver.fit(1, fail_at=fail_at)
    assert off()
    assert len(traces(tmp_path)) == written
    driver.fit(1)
    assert len(traces(tmp_path)) == written + 1


def test_too_few_batches_are_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="nothing was recorded: training had 1 batches, .* after wait=1 and warmup=1"):
        Driver([ProfilerCallback(tmp_path, activities=["cpu"])], batches=1).fit(1)
    assert not traces(tmp_path)


def test_a_folder_that_goes_away_does_not_end_the_training(tmp_path: Path) -> None:
    folder = tmp_path / "traces"

    class Breaks(Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            folder.rmdir()
            folder.touch()

    driver = Driver([ProfilerCallback(folder, activities=["cpu"]), Breaks()], batches=8)
    with pytest.warns(RuntimeWarning, match="ProfilerCallback: cannot write a trace to '.*traces': "):
        driver.fit(1)
    assert driver.run.progress.global_step == 8
    assert off()


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Driver([Work(), ProfilerCallback(tmp_path, activities=["cpu"], print_table=2)], batches=6).fit(1)
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title == "Profiler: operators by their own CPU time"
    assert header.split() == ["time", "part", "calls", "operator"]
    assert len(rows) == 2
    assert all(row.split()[1] == "ms" and row.split()[2].endswith("%") for row in rows)
    assert "ProfilerStep" not in "".join(rows)


def test_options_reach_the_profiler(tmp_path: Path) -> None:
    options: dict[str, Any] = {"record_shapes": True, "profile_memory": True, "with_flops": True, "with_stack": True}
    profiler = ProfilerCallback(tmp_path, activities=["cpu"], **options)
    Driver([Work(), profiler], batches=6).fit(1)
    events = json.loads(traces(tmp_path)[0].read_text())["traceEvents"]
    product = next(event for event in events if event.get("name") == "aten::mm")
    assert product["args"]["Input Dims"] == [[2, 2], [2, 2]]
    assert any(event.get("name") == "[memory]" for event in events)
    assert any("test_profiler.py" in str(event.get("name")) for event in events)


def test_a_real_fit(tmp_path: Path) -> None:
    net = torch.nn.Linear(8, 2)
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), torch.nn.CrossEntropyLoss())
    data = torch.randn(64, 8), torch.zeros(64, dtype=torch.int64)
    model.fit(data, batch_size=8, verbose=0, callbacks=ProfilerCallback(tmp_path))
    text = traces(tmp_path)[0].read_text()
    assert "aten::addmm" in text
    assert "Optimizer.step" in text


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="log_dir=''; accepted: the path of a folder"):
        ProfilerCallback("")
    with pytest.raises(ValueError, match="active=0; accepted: an int >= 1"):
        ProfilerCallback(tmp_path, active=0)
    with pytest.raises(ValueError, match=r"activities holds 'cpus'; did you mean 'cpu'[?]; accepted: some of 'cpu'"):
        ProfilerCallback(tmp_path, activities=["cpus"])
    with pytest.raises(TypeError, match="activities='cpu'; accepted: a list with some of"):
        ProfilerCallback(tmp_path, activities="cpu")
    with pytest.raises(ValueError, match=r"activities=\[\]; accepted"):
        ProfilerCallback(tmp_path, activities=[])
    with pytest.raises(TypeError, match="with_stack=1; accepted: True or False"):
        ProfilerCallback(tmp_path, with_stack=1)  # type: ignore[arg-type]
