"""The numbers do not change with the number of ranks: every case trains, evaluates and predicts on 1, 2, 3 and 4."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler

import hapi
from hapi.distributed import DataParallelStrategy
from tests.helpers.nets import blobs, mlp, weight_gap
from tests.helpers.ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks

ROWS = 131  # global batches of 32: the last has 3 rows, so with 4 ranks one of them has none


class Samples(Dataset[Any]):
    def __init__(self, rows: int = ROWS) -> None:
        self.x, self.y = blobs(rows)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], int(self.y[index])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (Samples()[i] for i in range(ROWS))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind, self.size = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        return {"kind": self.kind(x), "size": self.size(x).squeeze(1)}


class Widest(hapi.Metric):
    """Max, min and list states, which a plain mean would get wrong."""

    def __init__(self) -> None:
        super().__init__("widest")
        self.add_state("top", reduce="max")
        self.add_state("bottom", reduce="min")
        self.add_state("rows", reduce="cat")

    def name(self) -> list[str]:
        return ["top", "bottom", "median"]

    def update(self, output: Tensor, label: Tensor) -> None:
        self.state["top"].copy_(torch.maximum(self.state["top"], output.max().double()))
        self.state["bottom"].copy_(torch.minimum(self.state["bottom"], output.min().double()))
        self.lists["rows"].append(output[:, 0].detach())

    def compute(self, totals: Any) -> list[float]:
        return [float(totals["top"]), float(totals["bottom"]), float(totals["rows"].double().median())]


class Reference:
    """In the reference's style, on the host."""

    def __init__(self) -> None:
        self.reset()

    def compute(self, pred: Tensor, label: Tensor) -> Tensor:
        return pred.argmax(1) == label

    def update(self, correct: np.ndarray) -> None:
        self.right += int(correct.sum())
        self.rows += len(correct)

    def accumulate(self) -> float:
        return self.right / self.rows

    def reset(self) -> None:
        self.right = self.rows = 0

    def name(self) -> str:
        return "reference"


def half_ignored() -> tuple[Tensor, Tensor]:
    x, y = blobs(ROWS)
    return x, torch.where(torch.arange(ROWS) % 5 < 2, 1, y)


# name -> (make net, prepare options, make data of the world size, fit options)
CASES: dict[str, Any] = {
    "plain": (mlp, {}, lambda world: blobs(ROWS), {}),
    "shuffled": (mlp, {}, lambda world: blobs(ROWS), {"shuffle": True}),
    "dataset": (mlp, {}, lambda world: Samples(), {"shuffle": True}),
    "drop last": (mlp, {}, lambda world: blobs(ROWS), {"drop_last": True}),
    "accumulation": (mlp, {}, lambda world: blobs(ROWS), {"accumulate_grad_batches": 3}),
    "accumulation, a step without rows on some rank": (
        mlp,
        {},
        lambda world: blobs(32 * 3 + 2),
        {"accumulate_grad_batches": 2},
    ),
    # Wrapped networks talk to each other in their second forward.
    "the second batch is short": (mlp, {}, lambda world: blobs(32 + 1), {}),
    "clipping and schedule": (
        mlp,
        {"clip_grad_norm": 0.1, "scheduler": "cosine"},
        lambda world: blobs(ROWS),
        {"accumulate_grad_batches": 2},
    ),
    "sum loss": (mlp, {"loss": nn.CrossEntropyLoss(reduction="sum"), "lr": 1e-3}, lambda world: blobs(ROWS), {}),
    "ignore_index": (mlp, {"loss": nn.CrossEntropyLoss(ignore_index=1)}, lambda world: half_ignored(), {}),
    "ignore_index and accumulation": (
        mlp,
        {"loss": nn.CrossEntropyLoss(ignore_index=1)},
        lambda world: half_ignored(),
        {"accumulate_grad_batches": 3},
    ),
    "class weights": (mlp, {"class_weight": [1.0, 3.0, 0.5]}, lambda world: blobs(ROWS), {}),
    "sample weights": (
        mlp,
        {},
        lambda world: blobs(ROWS),
        {"sample_weight": torch.linspace(0.1, 2, ROWS), "accumulate_grad_batches": 2},
    ),
    "several losses": (
        Heads,
        {
            "loss": {"kind": "cross_entropy", "size": nn.MSELoss(reduction="sum")},
            "loss_weights": [1.0, 0.01],
            "metrics": None,
        },
        lambda world: {"x": blobs(ROWS)[0], "kind": blobs(ROWS)[1], "size": torch.linspace(0, 1, ROWS)},
        {},
    ),
    "synchronised BatchNorm": (Norm, {"sync_batchnorm": True}, lambda world: blobs(ROWS), {}),
    "bf16": (mlp, {"amp": "bf16", "tolerance": 2e-2}, lambda world: blobs(ROWS), {}),
    "DataLoader": (
        mlp,
        {},
        lambda world: DataLoader(Samples(), batch_size=24 // world),
        {"batch_size": None, "same for": (1, 2, 3, 4)},
    ),
    "DataLoader with a sampler": (
        mlp,
        {},
        lambda world: DataLoader(
            Samples(), batch_size=24 // world, sampler=SequentialSampler(Samples()), drop_last=True
        ),
        {"batch_size": None},
    ),
    "DataLoader with batch_sampler": (
        mlp,
        {},
        lambda world: DataLoader(Samples(), batch_sampler=ReversedBatches(24 // world)),
        {"batch_size": None, "sums only": True},
    ),
    "list of batches": (
        mlp,
        {},
        lambda world: [tuple(part) for part in zip(*(t.split(24 // world) for t in blobs(ROWS)), strict=True)],
        {"batch_size": None},
    ),
    "generator": (
        mlp,
        {},
        lambda world: (tuple(p) for p in zip(*(t.split(24 // world) for t in blobs(ROWS)), strict=True)),
        {"batch_size": None, "epochs": 1, "accumulate_grad_batches": 2},
    ),
    "IterableDataset": (mlp, {}, lambda world: Stream(), {"global_batch_size": 24}),
}


class ReversedBatches(BatchSampler):
    def __init__(self, size: int) -> None:
        super().__init__(SequentialSampler(Samples()), size, False)


def run_case(name: str) -> Any:
    make, prepare, data_of, fit = CASES[name]
    prepare, fit = dict(prepare), {"epochs": 2, "shuffle": False, "verbose": 0, "seed": 3, **fit}
    fit.pop("same for", None)
    fit.pop("sums only", None)
    prepare.pop("tolerance", None)
    if "batch_size" in fit:
        fit.pop("batch_size")
    else:
        fit.setdefault("global_batch_size", 32)
    torch.manual_seed(1)
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), prepare.pop("lr", 0.05), momentum=0.9)
    loss, metrics = prepare.pop("loss", nn.CrossEntropyLoss()), prepare.pop("metrics", "acc")
    model = hapi.Model(net).prepare(optimizer, loss, metrics, **prepare)
    history = model.fit(data_of(model._environment().world), **fit)
    weights = {key: value.clone() for key, value in net.state_dict().items() if value.is_floating_point()}
    return weights, history.history, model._progress.state_dict()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_training_equals_one_rank_with_the_same_global_batch(name: str, world: int) -> None:
    if name in _alone:
        weights, history, progress = _alone[name]
    else:
        weights, history, progress = _alone[name] = run_ranks(run_case, 1, name)[0]
    results = run_ranks(run_case, world, name)
    tolerance = CASES[name][1].get("tolerance", 2e-6)
    for other_weights, other_history, other_progress in results:
        assert weight_gap(weights, other_weights) < tolerance
        assert other_progress == progress
        for key, values in history.items():
            # Only rank 0 has a history; the losses are sums over all ranks.
            if other_history:
                assert other_history[key] == pytest.approx(values, abs=max(1e-6, tolerance)), key
    assert weight_gap(results[0][0], results[-1][0]) == 0, "the ranks ended with different weights"


_alone: dict[str, Any] = {}


# ------------------------------------------------------------ evaluate and predict


def evaluation(rows: int, kind: str) -> Any:
    net = mlp()
    try:
        import torchmetrics

        others: list[Any] = [torchmetrics.classification.MulticlassF1Score(3, validate_args=False)]
    except ImportError:
        others = []
    metrics = [hapi.metrics.Accuracy(), Widest(), Reference(), hapi.metrics.ConfusionMatrix(3), *others]
    model = hapi.Model(net).prepare(None, nn.CrossEntropyLoss(), metrics)
    x, y = blobs(rows)
    world = model._environment().world
    data: Any = {
        "arrays": lambda: (x, y),
        "dataset": lambda: Samples(rows),
        "DataLoader": lambda: DataLoader(TensorDataset(x, y), batch_size=max(1, 20 // world)),
        "list": lambda: list(zip(x.split(10), y.split(10), strict=True)),
    }[kind]()
    values = model.evaluate(data, batch_size=7, verbose=0)
    outputs = model.predict(data, batch_size=7, verbose=0, stack_outputs=True)[0]
    return {name: np.asarray(value) for name, value in values.items()}, outputs


@pytest.mark.parametrize("kind", ["arrays", "dataset", "DataLoader", "list"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_evaluation_and_prediction_of_1003_rows_are_exact(world: int, kind: str) -> None:
    """Lightning, Ignite and a plain DistributedSampler count 1004 rows on 2 ranks."""
    (expected, outputs), *_ = run_ranks(evaluation, 1, 1003, kind)
    for values, rows in run_ranks(evaluation, world, 1003, kind):
        assert rows.shape == outputs.shape == (1003, 3)
        np.testing.assert_allclose(rows, outputs, atol=1e-6)
        for name, value in expected.items():
            np.testing.assert_allclose(values[name], value, atol=1e-6, err_msg=name)
        assert values["confusion_matrix"].sum() == 1003


@pytest.mark.parametrize("rows", [1, 2])
def test_ranks_without_any_row(rows: int) -> None:
    (expected, outputs), *_ = run_ranks(evaluation, 1, rows, "arrays")
    for values, got in run_ranks(evaluation, 4, rows, "arrays"):
        np.testing.assert_allclose(got, outputs, atol=1e-6)
        for name, value in expected.items():
            np.testing.assert_allclose(values[name], value, atol=1e-6, err_msg=name)


def a_users_own_distributed_sampler() -> Any:
    net = mlp()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.05), "cross_entropy")
    env = model._environment()
    sampler = DistributedSampler(Samples(40), env.world, env.rank, shuffle=True)
    model.fit(DataLoader(Samples(40), batch_size=5, sampler=sampler), epochs=2, verbose=0)
    return sampler.epoch, model._progress.samples, net.state_dict()


def test_a_users_own_distributed_sampler_is_used_as_it_is() -> None:
    results = run_ranks(a_users_own_distributed_sampler, 2)
    assert [(epoch, samples) for epoch, samples, _ in results] == [(1, 80)] * 2
    assert weight_gap(results[0][2], results[1][2]) == 0


def random_sampler_order() -> Any:
    torch.manual_seed(hapi.distributed.get_rank())  # different generators on purpose
    net = mlp()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.0), "cross_entropy", "acc")
    loader = DataLoader(Samples(), batch_size=8, sampler=RandomSampler(Samples()))
    model.fit(loader, epochs=1, verbose=0)
    return model.evaluate(Samples(), batch_size=8, verbose=0)["acc"], model._progress.samples


def test_a_random_sampler_is_cut_from_rank_0s_order() -> None:
    assert [samples for _, samples in run_ranks(random_sampler_order, 3)] == [ROWS] * 3


def batchnorm_without_synchronisation() -> Any:
    torch.manual_seed(0)
    net = Norm()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.05), "cross_entropy", "acc")
    model.fit(blobs(128), blobs(ROWS), global_batch_size=32, verbose=0)
    return net.norm.running_mean.clone(), model.evaluate(blobs(60), batch_size=4, verbose=0)


def test_buffers_of_rank_0_serve_for_evaluation() -> None:
    (mean, values), *others = run_ranks(batchnorm_without_synchronisation, 4)
    for other_mean, other_values in others:
        assert torch.equal(mean, other_mean)
        assert values == other_values


# ----------------------------------------------------------------- what callbacks do


class Stops(hapi.callbacks.Callback):
    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        if "loss" in logs and step >= 3:
            self.model.stop_training = True


class Halves(hapi.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for group in self.run.optimizer.param_groups:
            group["lr"] /= 2


class Counts(hapi.callbacks.Callback):
    calls = 0

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        type(self).calls += 1


class CountsEverywhere(Counts):
    all_ranks = True


def decisions(tmp: str) -> Any:
    Counts.calls = CountsEverywhere.calls = 0
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), 0.8)
    model = hapi.Model(net).prepare(optimizer, "cross_entropy", "acc")
    callbacks = [Stops(), Halves(), Counts(), CountsEverywhere()]
    model.fit(blobs(ROWS), global_batch_size=16, epochs=3, log_freq=2, verbose=0, callbacks=callbacks, save_dir=tmp)
    early = hapi.callbacks.EarlyStopping(patience=0, restore_best_weights=True, verbose=0)
    worse = torch.optim.SGD(net.parameters(), 300.0)
    model.prepare(worse, "cross_entropy")
    model.fit(blobs(ROWS), blobs(60), global_batch_size=16, epochs=9, verbose=0, callbacks=early)
    return (
        model._progress.global_step,
        optimizer.param_groups[0]["lr"],
        Counts.calls,
        CountsEverywhere.calls,
        net.state_dict(),
    )


def test_decisions_of_rank_0_reach_every_rank(tmp_path: Any) -> None:
    alone = run_ranks(decisions, 1, str(tmp_path / "1"))[0]
    results = run_ranks(decisions, 3, str(tmp_path / "3"))
    assert {result[:2] for result in results} == {alone[:2]}
    assert [result[2] for result in results] == [alone[2], 0, 0]
    assert [result[3] for result in results] == [alone[3]] * 3
    assert all(weight_gap(results[0][4], result[4]) == 0 for result in results)
    assert {p.name for p in (tmp_path / "1").iterdir()} == {p.name for p in (tmp_path / "3").iterdir()}


class Reduces(hapi.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        hapi.distributed.all_reduce(torch.ones(1))


class Warms(hapi.callbacks.Callback):
    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        self.run.optimizer.param_groups[0]["lr"] = 0.01 * step


class WarmsEverywhere(Warms):
    all_ranks = True


def with_callback(kind: type) -> float:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = hapi.Model(net).prepare(optimizer, "cross_entropy")
    model.fit(blobs(ROWS), global_batch_size=16, verbose=0, callbacks=kind())
    return float(optimizer.param_groups[0]["lr"])


def test_a_callback_that_starts_a_collective_is_refused_by_name() -> None:
    with pytest.raises(RankError, match=r"Reduces.on_epoch_end started the collective 'allreduce_'"):
        run_ranks(with_callback, 2, Reduces)


def test_a_learning_rate_changed_on_one_rank_only_is_refused_by_name() -> None:
    with pytest.raises(RankError, match=r"Warms.on_train_batch_begin changed the learning rate"):
        run_ranks(with_callback, 2, Warms)
    assert run_ranks(with_callback, 2, WarmsEverywhere) == [0.08, 0.08]


# -------------------------------------------------------------------------- options


class Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def unused(find: bool) -> Any:
    torch.manual_seed(0)
    net = Partial()
    model = hapi.Model(net).prepare(
        torch.optim.SGD(net.parameters(), 0.05),
        "cross_entropy",
        strategy=DataParallelStrategy(find_unused_parameters=True) if find else "auto",
    )
    model.fit(blobs(ROWS), global_batch_size=32, shuffle=False, verbose=0)
    return net.state_dict()


def test_unused_parameters_are_named_or_found() -> None:
    with pytest.raises(RankError, match=r"does not depend on the parameters spare.bias, spare.weight"):
        run_ranks(unused, 2, False)
    alone = run_ranks(unused, 1, False)[0]
    for weights in run_ranks(unused, 2, True):
        assert weight_gap(alone, weights) < 2e-6


@pytest.mark.parametrize(
    "option", [{"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}, {"static_graph": True}]
)
def test_options_of_data_parallelism(option: dict[str, Any]) -> None:
    alone = run_ranks(with_options, 1, option)[0]
    for weights in run_ranks(with_options, 2, option):
        assert weight_gap(alone, weights) < 2e-6


def with_options(option: dict[str, Any]) -> Any:
    net = mlp()
    model = hapi.Model(net).prepare(
        torch.optim.SGD(net.parameters(), 0.05), "cross_entropy", strategy=DataParallelStrategy(**option)
    )
    model.fit(blobs(128), global_batch_size=32, shuffle=False, verbose=0, epochs=2)
    return net.state_dict()


def overflow_on_one_rank() -> Any:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    model = hapi.Model(net).prepare(optimizer, "cross_entropy", amp={"init_loss_scaling": 2.0})
    x, y = blobs(32)
    x[3] = 1e30  # in the first half of the first batch: rank 0's rows
    model.fit((x, y), global_batch_size=16, shuffle=False, verbose=0)
    return model._progress.global_step, model._scaler.get_scale(), net.state_dict()


def test_a_skipped_step_is_skipped_by_all_ranks() -> None:
    results = run_ranks(overflow_on_one_rank, 2)
    assert {result[:2] for result in results} == {(1, 1.0)}
    assert weight_gap(results[0][2], results[1][2]) == 0


def by_hand() -> Any:
    env = hapi.distributed.init_parallel_env()
    net = hapi.DataParallel(mlp())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x, y = blobs(32)
    sampler = hapi.DistributedBatchSampler(range(32), 8)
    for indices in sampler:
        nn.functional.cross_entropy(net(x[indices]), y[indices]).backward()
        optimizer.step()
        optimizer.zero_grad()
    hapi.distributed.barrier()
    total = hapi.distributed.all_reduce(torch.tensor([1.0 * env.rank]))
    largest = hapi.distributed.all_reduce(torch.tensor([env.rank]), "max")
    mean = hapi.distributed.all_reduce(torch.tensor([1.0 * env.rank]), "mean")
    gathered = hapi.distributed.all_gather(torch.arange(env.rank))
    first = hapi.distributed.broadcast(torch.tensor([env.rank + 5]))
    values = float(total), int(largest), float(mean), [len(part) for part in gathered], int(first)
    who = hapi.distributed.ParallelEnv()
    assert (who.rank, who.world_size, who.local_rank) == (env.rank, env.world, env.rank)
    return values, {name.removeprefix("module."): value for name, value in net.state_dict().items()}


def test_hand_written_loops() -> None:
    results = run_ranks(by_hand, 3)
    assert [values for values, _ in results] == [(3.0, 2, 1.0, [0, 1, 2], 5)] * 3
    assert weight_gap(results[0][1], results[2][1]) == 0
    (alone, _) = run_ranks(by_hand, 1)[0]
    assert alone == (0.0, 0, 0.0, [0], 5)
