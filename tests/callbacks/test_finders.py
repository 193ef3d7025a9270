"""LearningRateFinder and BatchSizeFinder: what they find, and that a trial leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hapi
from hapi.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from tests.helpers.nets import blobs, mlp, same_weights
from tests.helpers.ranks import run_ranks

X, Y = blobs(120)


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws random numbers per sample."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + 0.1 * torch.randn(8), Y[index]


def net_with_everything() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))


def prepared(net: nn.Module, lr: float = 0.05, **options: Any) -> hapi.Model:
    optimizer = torch.optim.Adam(net.parameters(), lr)
    return hapi.Model(net).prepare(optimizer, "cross_entropy", "acc", **options)


def fit(model: hapi.Model, *callbacks: Callback, data: Any = None, **options: Any) -> hapi.callbacks.History:
    how: dict[str, Any] = {"batch_size": 8, "epochs": 2, "verbose": 0, "seed": 3}
    data = Noisy() if data is None else data
    return model.fit(data, callbacks=list(callbacks), **{**how, **options})


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_trial_leaves_no_trace(accumulate: int) -> None:
    plain, tried = net_with_everything(), net_with_everything()
    torch.manual_seed(5)
    expected = fit(prepared(plain), accumulate_grad_batches=accumulate)
    torch.manual_seed(5)
    finder = LearningRateFinder(steps=40, diverged=None, update=False, verbose=0)
    history = fit(prepared(tried), finder, BatchSizeFinder(update=False, verbose=0), accumulate_grad_batches=accumulate)
    assert len(finder.losses) == 40
    assert same_weights(plain, tried)
    assert history.history == expected.history


def test_the_suggestion_trains(capsys: pytest.CaptureFixture[str]) -> None:
    net = mlp()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 1e-9), "cross_entropy", "acc")
    finder = LearningRateFinder(1e-5, 10.0, 60)
    history = fit(model, finder, data=(X, Y), epochs=5)
    assert finder.suggestion is not None
    assert 1e-3 < finder.suggestion < 5
    assert history.history["lr"] == [finder.suggestion] * 5
    assert history.history["acc"][-1] > 0.9
    assert f"LearningRateFinder: {finder.suggestion:.3g} is used" in capsys.readouterr().out
    assert finder.lrs == sorted(finder.lrs)
    assert finder.lrs[0] == pytest.approx(1e-5)


def test_the_suggestion_depends_little_on_the_number_of_steps() -> None:
    found = []
    for steps in (50, 100, 200):
        net = mlp()
        finder = LearningRateFinder(1e-5, 10.0, steps, verbose=0, update=False)
        model = hapi.Model(net).prepare(torch.optim.Adam(net.parameters()), "cross_entropy")
        model.fit(blobs(1000), batch_size=32, verbose=0, num_iters=1, seed=1, callbacks=finder)
        assert finder.suggestion is not None
        found.append(finder.suggestion)
    # Some it must: with fewer steps per rate, a loss needs higher rates to fall. A mean that lags made this 15.
    assert max(found) < 7 * min(found), found


def test_groups_keep_their_ratio() -> None:
    net = mlp()
    groups = [{"params": net[0].parameters(), "lr": 0.2}, {"params": net[3].parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups)
    finder = LearningRateFinder(1e-4, 1.0, 30, verbose=0)
    fit(hapi.Model(net).prepare(optimizer, "cross_entropy"), finder, data=(X, Y))
    assert finder.suggestion is not None
    assert optimizer.param_groups[0]["lr"] == pytest.approx(finder.suggestion)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(finder.suggestion / 2)


def test_it_ends_when_the_loss_diverges() -> None:
    net = mlp()
    finder = LearningRateFinder(1e-4, 1e4, 200, verbose=0, method="minimum")
    fit(hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), "cross_entropy"), finder, data=(X, Y), epochs=1)
    assert 12 <= len(finder.lrs) < 150


def test_plot(tmp_path: Path) -> None:
    finder = LearningRateFinder(1e-4, 1.0, 30, verbose=0, update=False)
    with pytest.raises(RuntimeError, match="nothing has been tried yet"):
        finder.plot()
    fit(prepared(mlp()), finder)
    figure = finder.plot(tmp_path / "rates.png")
    assert figure.axes[0].get_xlabel() == "learning rate"
    assert (tmp_path / "rates.png").read_bytes()[:4] == b"\x89PNG"


def test_a_loss_that_does_not_fall_suggests_nothing() -> None:
    net = mlp()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), lambda out, y: 0 * out.sum() + 1.0)
    finder = LearningRateFinder(steps=20)
    with pytest.warns(UserWarning, match="the loss falls at none of the rates from 1e-07 to 1"):
        history = fit(model, finder, data=(X, Y))
    assert finder.suggestion is None
    assert history.history["lr"] == [0.1, 0.1]


def test_what_cannot_be_tried_is_refused() -> None:
    with pytest.raises(ValueError, match=r"update=True in a run with the scheduler LinearLR"):
        fit(prepared(mlp(), scheduler="linear"), LearningRateFinder())
    batches = ((X[i : i + 8], Y[i : i + 8]) for i in range(0, 80, 8))
    with pytest.raises(ValueError, match="trial steps would use up the training data"):
        fit(prepared(mlp()), LearningRateFinder(), data=batches, batch_size=1)
    listed = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 80, 8)]
    with pytest.raises(ValueError, match="batch sizes can be tried where hapi cuts the batches"):
        fit(prepared(mlp()), BatchSizeFinder(max_size=20), data=listed, batch_size=1)
    with pytest.raises(ValueError, match="max_size=4 is less than fit's batch_size=8"):
        fit(prepared(mlp()), BatchSizeFinder(max_size=4))
    with pytest.raises(ValueError, match="0 < min_lr < max_lr"):
        LearningRateFinder(1.0, 0.1)


class Greedy(nn.Module):
    """Runs out of memory above 50 rows."""

    def __init__(self, limit: int = 50) -> None:
        super().__init__()
        self.inner = mlp()
        self.limit = limit
        self.largest = 0

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        self.largest = max(self.largest, len(x))
        return self.inner(x)


class Seen(Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.steps = self.params["steps"]

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.rows = max(logs["batch_size"], getattr(self, "rows", 0))


def test_the_largest_batch_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    finder, seen = BatchSizeFinder(), Seen()
    model = prepared(Greedy())
    history = fit(model, seen, finder, epochs=3)
    assert finder.tried == {8: True, 16: True, 32: True, 64: False, 48: True, 56: False, 52: False, 50: True}
    assert finder.batch_size == 50
    assert (seen.rows, seen.steps) == (50, 3)
    assert len(history.epoch) == 3
    assert "BatchSizeFinder: 50 rows per rank are used" in capsys.readouterr().out


def test_num_iters_and_named_schedulers_follow_the_new_size() -> None:
    model = prepared(Greedy(), scheduler="linear")
    history = fit(model, BatchSizeFinder(halve=False, verbose=0), epochs=3)
    # 32 rows: 4 steps an epoch, 12 in all, at the end of which the rate is 0.
    assert history.history["lr"][-1] == pytest.approx(0.05 / 12)
    net = Greedy()
    model = prepared(net)
    fit(model, BatchSizeFinder(halve=False, verbose=0), num_iters=20)
    assert model._progress.global_step == 20


def test_a_resumed_run_takes_the_size_that_was_found(tmp_path: Path) -> None:
    class Dies(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if self.run.progress.global_step == 5:
                raise KeyError("killed")

    whole = Greedy()
    expected = fit(prepared(whole), BatchSizeFinder(verbose=0), epochs=4)
    how: dict[str, Any] = {"save_dir": tmp_path, "save_every_n_steps": 2, "resume": "auto", "epochs": 4}
    with pytest.raises(KeyError):
        fit(prepared(Greedy()), BatchSizeFinder(verbose=0), Dies(), **how)
    net, finder = Greedy(), BatchSizeFinder(verbose=0)
    history = fit(prepared(net), finder, **how)
    assert finder.batch_size == 50
    assert same_weights(net, whole)
    assert history.history == expected.history


def test_other_errors_are_not_taken_for_want_of_memory() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 20:
                raise RuntimeError("shapes cannot be multiplied")
            return self.inner(x)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fit(prepared(Fails()), BatchSizeFinder())


def test_not_even_the_first_size() -> None:
    with pytest.raises(RuntimeError, match="not even batch_size=8 fits in memory"):
        fit(prepared(Greedy(4)), BatchSizeFinder())


def _find_on_ranks() -> tuple[Any, Any, list[float], dict[str, Tensor]]:
    rank = hapi.distributed.get_rank()
    lr, size = LearningRateFinder(1e-4, 1.0, 30, verbose=0), BatchSizeFinder(verbose=0, halve=False)
    net = Greedy(50 if rank else 20)  # one rank has less memory
    model = prepared(net)
    fit(model, lr, size, data=(X, Y), batch_size=8)
    return lr.suggestion, size.batch_size, lr.losses, net.inner.state_dict()


def test_ranks_find_the_same() -> None:
    first, second = run_ranks(_find_on_ranks, 2)
    assert first[0] == second[0] is not None
    assert first[1] == second[1] == 16
    assert first[2] == second[2]
    for name, value in first[3].items():
        assert torch.equal(value, second[3][name])
