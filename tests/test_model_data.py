"""What can be given as data, and how inputs and labels are told apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

import hapi
from hapi import InputSpec
from tests.helpers.nets import blobs, mlp, same_weights

X, Y = blobs(50)


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        return X[index], int(Y[index])


class Batches(Samples):
    """`__getitems__` that gives the whole batch at once."""

    def __getitems__(self, indices: list[int]) -> Any:
        return X[indices], Y[indices]


class Gather(Samples):
    def gather(self, index: Any) -> Any:
        return X[index], Y[index]


class Stream(IterableDataset[Any]):
    """Splits itself by worker, as torch's documentation shows."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return iter((X[i], int(Y[i])) for i in range(worker, 50, workers))


class Whole(IterableDataset[Any]):
    """Does not split itself: two workers would read everything twice."""

    def __iter__(self) -> Any:
        return iter((X[i], int(Y[i])) for i in range(50))


SOURCES: dict[str, Any] = {
    "tensors": lambda: (X, Y),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "float64 arrays": lambda: (X.numpy().astype(np.float64), Y.numpy()),
    "read-only arrays": lambda: (np.frombuffer(X.numpy().tobytes(), np.float32).reshape(50, 8), Y.numpy()),
    "labels [N, 1]": lambda: (X, Y[:, None]),
    "int32 labels": lambda: (X, Y.int()),
    "dict of arrays": lambda: {"input": X, "label": Y},
    "TensorDataset": lambda: TensorDataset(X, Y),
    "Subset": lambda: Subset(TensorDataset(X, Y), list(range(50))),
    "Subset of a dataset": lambda: Subset(Samples(), list(range(50))),
    "Dataset": Samples,
    "__getitems__": Batches,
    "gather": Gather,
    "DataLoader": lambda: DataLoader(Samples(), batch_size=16),
    "list of batches": lambda: [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 50, 16)],
    "list of dicts": lambda: [{"input": X[i : i + 16], "y": Y[i : i + 16]} for i in range(0, 50, 16)],
    "generator": lambda: ((X[i : i + 16], Y[i : i + 16]) for i in range(0, 50, 16)),
    "IterableDataset": Stream,
}


def trained(data: Any, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    net = mlp()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss(), "acc")
    options = {"batch_size": 16, "shuffle": False, "verbose": 0, **options}
    return net, model.fit(data, **options).history


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_data_trains_to_the_same_weights(kind: str) -> None:
    expected, history = trained((X, Y))
    got, other = trained(SOURCES[kind]())
    assert same_weights(expected, got)
    assert other == history


@pytest.mark.parametrize("kind", ["tensors", "Dataset", "__getitems__", "Subset"])
def test_shuffling_is_the_same_whatever_holds_the_data(kind: str) -> None:
    expected, _ = trained(SOURCES["tensors"](), shuffle=True, seed=5, epochs=2)
    got, _ = trained(SOURCES[kind](), shuffle=True, seed=5, epochs=2)
    other, _ = trained(SOURCES[kind](), shuffle=True, seed=6, epochs=2)
    assert same_weights(expected, got)
    assert not same_weights(expected, other)


@pytest.mark.slow
def test_workers_change_nothing() -> None:
    expected, history = trained(Samples(), shuffle=True, seed=5, epochs=2)
    got, other = trained(Samples(), shuffle=True, seed=5, epochs=2, num_workers=2)
    assert same_weights(expected, got)
    assert history == other


@pytest.mark.slow
@pytest.mark.parametrize("stream", [Stream, Whole])
def test_an_iterable_dataset_is_read_once_by_two_workers(stream: type) -> None:
    model = hapi.Model(mlp()).prepare(None, None, hapi.metrics.Mean(fn=lambda out, y: torch.ones(len(y)).sum()))
    rows = model.predict(stream(), batch_size=4, num_workers=2, stack_outputs=True, verbose=0)[0]
    assert len(rows) == 50
    alone = model.predict((X,), batch_size=50, stack_outputs=True, verbose=0)[0]
    np.testing.assert_allclose(np.sort(rows[:, 0]), np.sort(alone[:, 0]), rtol=1e-5)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow), "auto"])
def test_a_dataset_that_reads_batches_is_asked_for_batches(workers: Any) -> None:
    class Whole(Batches):
        def __getitem__(self, index: int) -> Any:
            raise AssertionError("asked for a sample")

    expected, history = trained((X, Y), shuffle=True, seed=5, epochs=2)
    got, other = trained(Whole(), shuffle=True, seed=5, epochs=2, num_workers=workers)
    assert same_weights(expected, got)
    assert history == other


def test_the_order_goes_on_over_calls_of_fit() -> None:
    """A loop of fit(epochs=1) sees as many orders as fit(epochs=n): the reference repeats one."""
    once = mlp()
    model = hapi.Model(once).prepare(torch.optim.SGD(once.parameters(), 0.1), "cross_entropy")
    model.fit((X, Y), batch_size=16, epochs=3, seed=1, verbose=0)
    again = mlp()
    model = hapi.Model(again).prepare(torch.optim.SGD(again.parameters(), 0.1), "cross_entropy")
    for _ in range(3):
        model.fit((X, Y), batch_size=16, epochs=1, seed=1, verbose=0)
    assert same_weights(once, again)


def test_torch_manual_seed_fixes_the_order() -> None:
    torch.manual_seed(11)
    a, _ = trained((X, Y), shuffle=True)
    torch.manual_seed(11)
    b, _ = trained((X, Y), shuffle=True)
    assert same_weights(a, b)


def test_a_spent_generator_warns_in_epoch_two() -> None:
    with pytest.warns(UserWarning, match="used up"), pytest.raises(ValueError, match="no batches"):
        trained(SOURCES["generator"](), epochs=2)


def test_drop_last_and_validation_split() -> None:
    net = mlp()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), "cross_entropy", "acc")
    history = model.fit((X, Y), batch_size=16, drop_last=True, validation_split=0.2, verbose=0)
    assert model._progress.samples == 32  # 40 rows for training, two whole batches
    expected = model.evaluate((X[40:], Y[40:]), batch_size=16, verbose=0)
    assert history.history["eval_loss"][0] == pytest.approx(expected["loss"])


# ------------------------------------------------------------- inputs and labels


class TwoInputs(nn.Module):
    def __init__(self, *, optional: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.a(first) + self.b(second)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layer(x if mask is None else x * mask)


class Heads(nn.Module):
    def __init__(self, form: str = "tuple") -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 1)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        out = {"kind": self.a(x), "size": self.b(x).squeeze(1)}
        return out if self.form == "dict" else tuple(out.values())


def prepared(net: nn.Module, loss: Any = "cross_entropy", **options: Any) -> hapi.Model:
    model_options = {k: options.pop(k) for k in ("inputs", "labels") if k in options}
    return hapi.Model(net, **model_options).prepare(torch.optim.SGD(net.parameters(), 0.1), loss, **options)


def test_two_inputs_flat_nested_and_by_name() -> None:
    results = []
    for data in (
        (X, X + 1, Y),
        ((X, X + 1), Y),
        ([X, X + 1], [Y]),
        {"second": X + 1, "first": X, "label": Y},
        [({"second": X[i : i + 16] + 1, "first": X[i : i + 16]}, Y[i : i + 16]) for i in range(0, 50, 16)],
    ):
        torch.manual_seed(0)
        net = TwoInputs()
        prepared(net).fit(data, batch_size=16, shuffle=False, verbose=0)
        results.append(net)
    assert all(same_weights(results[0], net) for net in results[1:])


def test_an_optional_parameter_does_not_swallow_the_label() -> None:
    """Reference wart: forward(x, mask=None) fed with (x, y) took y for the mask."""
    model = prepared(Masked())
    assert model.fit((X, Y), batch_size=16, verbose=0).history["loss"][0] > 0
    # Declared labels split from the right, so the mask reaches forward.
    zero = prepared(Masked(), labels=1)
    weight = zero.network.layer.weight.detach().clone()
    zero.fit((X, torch.zeros_like(X), Y), batch_size=16, verbose=0)
    assert torch.equal(zero.network.layer.weight, weight), "with an input masked to zero the weight has no gradient"


def test_counts_are_named_where_fields_cannot_be_told_apart() -> None:
    with pytest.raises(ValueError, match=r"the batch has 1 field, TwoInputs.forward\(first, second\) needs 2"):
        prepared(TwoInputs()).fit((X,), batch_size=16, verbose=0)
    with pytest.raises(ValueError, match="inputs declared: 2, labels declared: 1"):
        prepared(TwoInputs(), inputs=2, labels=1).fit((X, X), batch_size=16, verbose=0)

    class Star(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, *xs: Tensor) -> Tensor:
            return self.layer(sum(xs))

    with pytest.raises(ValueError, match=r"Star.forward\(\*args\)"):
        prepared(Star()).fit((X, Y), batch_size=16, verbose=0)
    prepared(Star(), labels=1).fit((X, X, Y), batch_size=16, verbose=0)


def test_dict_batches_with_other_names_are_refused_with_the_keys() -> None:
    with pytest.raises(ValueError, match=r"keys \['image', 'target'\].*needs \['x'\]"):
        prepared(Masked()).fit({"image": X, "target": Y}, batch_size=16, verbose=0)
    model = prepared(Masked(), inputs="image", labels=[InputSpec([None], "int64", "target")])
    model.fit({"target": Y, "image": X}, batch_size=16, verbose=0)


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_several_outputs_losses_labels_and_metrics(form: str) -> None:
    size = torch.rand(50)
    losses = {"kind": nn.CrossEntropyLoss(), "size": nn.MSELoss()}
    route = ("kind", "size") if form == "dict" else (0, 1)
    metrics = {route[0]: hapi.metrics.Accuracy(), route[1]: hapi.metrics.MSE()}
    data = {"x": X, "size": size, "kind": Y} if form == "dict" else (X, Y, size)
    torch.manual_seed(0)
    model = prepared(Heads(form), losses, loss_weights={"kind": 1.0, "size": 0.5}, metrics=metrics)
    history = model.fit(data, batch_size=16, verbose=0).history
    assert history["loss"][0] == pytest.approx(history["kind"][0] + 0.5 * history["size"][0])
    values = model.evaluate(data, batch_size=16, verbose=0)
    outputs = model.predict((X,), batch_size=50, stack_outputs=True, verbose=0)
    assert values["mse"] == pytest.approx(float(((outputs[1] - size.numpy()) ** 2).mean()), rel=1e-5)
    assert values["acc"] == pytest.approx(float((outputs[0].argmax(1) == Y.numpy()).mean()))
    assert values["mse"] == pytest.approx(values["size"], rel=1e-5)


def test_a_loss_of_labels_by_name() -> None:
    def loss(out: Tensor, target: Tensor, scale: Tensor) -> Tensor:
        return (nn.functional.cross_entropy(out, target, reduction="none") * scale).mean()

    scale = torch.rand(50)
    by_name = prepared(Masked(), loss)
    a = by_name.evaluate({"x": X, "scale": scale, "target": Y}, batch_size=50, verbose=0)
    b = hapi.Model(by_name.network).prepare(None, loss).evaluate((X, Y, scale), batch_size=50, verbose=0)
    assert a["loss"] == pytest.approx(b["loss"])


def test_sample_weights_from_the_batch() -> None:
    weight = torch.rand(50)
    arrays = prepared(mlp())
    arrays.fit((X, Y), batch_size=16, shuffle=False, verbose=0, sample_weight=weight)
    positional = prepared(mlp(), sample_weight=-1)
    positional.fit((X, Y, weight), batch_size=16, shuffle=False, verbose=0)
    named = prepared(mlp(), sample_weight="w")
    named.fit({"input": X, "y": Y, "w": weight}, batch_size=16, shuffle=False, verbose=0)
    assert same_weights(arrays.network, positional.network)
    assert same_weights(arrays.network, named.network)


def test_predict_ignores_labels_and_joins_on_axis_zero() -> None:
    model = hapi.Model(Heads())
    with_labels = model.predict((X, Y), batch_size=16, verbose=0)
    assert [len(arrays) for arrays in with_labels] == [4, 4]
    assert [array.shape for array in with_labels[1]] == [(16,), (16,), (16,), (2,)]
    stacked = model.predict(X, batch_size=16, stack_outputs=True, verbose=0)
    assert [array.shape for array in stacked] == [(50, 3), (50,)]
    np.testing.assert_array_equal(np.concatenate(with_labels[1]), stacked[1])


def test_a_callback_can_take_the_outputs() -> None:
    class Taker(hapi.callbacks.Callback):
        def __init__(self) -> None:
            self.rows: list[np.ndarray] = []

        def on_predict_batch_end(self, step: int, logs: Any = None) -> None:
            self.rows.append(logs["outputs"][0])

    taker = Taker()
    model = hapi.Model(mlp())
    assert model.predict(X, batch_size=16, verbose=0, callbacks=taker, keep_outputs=False) == []
    expected = model.predict(X, batch_size=16, verbose=0, stack_outputs=True)[0]
    np.testing.assert_array_equal(np.concatenate(taker.rows), expected)


def test_one_batch_methods() -> None:
    model = prepared(mlp(), metrics=["acc"])
    losses, metrics = model.train_batch([X[:4]], [Y[:4]])
    assert losses[0].shape == ()
    assert 0 <= metrics[0] <= 1
    assert model.mode == "train"
    losses, metrics = model.eval_batch(X[:4], Y[:4])
    assert model.mode == "eval"
    assert model.network.training, "the mode of the network is put back"
    (out,) = model.predict_batch([X[:4].numpy()])
    assert out.shape == (4, 3)
    assert model.mode == "test"
    only = hapi.Model(mlp()).prepare(None, None, "acc")
    assert len(only.eval_batch(X[:4], Y[:4])) == 1


def test_train_batch_without_update_adds_gradients() -> None:
    model = prepared(mlp())
    before = [p.detach().clone() for p in model.parameters()]
    model.train_batch(X[:4], Y[:4], update=False)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model.train_batch(X[4:8], Y[4:8])
    net = mlp()
    for part in (slice(0, 4), slice(4, 8)):
        nn.CrossEntropyLoss()(net(X[part]), Y[part]).backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    assert same_weights(net, model.network)


def test_frozen_modules_stay_frozen() -> None:
    """Reference wart: every batch set the mode of the whole net anew."""
    net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    net[1].eval()
    prepared(net).fit((X, Y), (X, Y), batch_size=16, epochs=2, verbose=0)
    assert not net[1].training
    assert net[0].training
    assert int(net[1].num_batches_tracked) == 0


def test_channels_last_gives_the_same_numbers() -> None:
    images = torch.randn(20, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    model = prepared(net, channels_last=True)
    model.fit((images, Y[:20]), batch_size=10, verbose=0)
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_compile_trains_to_nearly_the_same_weights() -> None:
    plain, compiled = prepared(mlp()), prepared(mlp(), compile={"backend": "aot_eager"})
    for model in (plain, compiled):
        model.fit((X, Y), (X, Y), batch_size=25, shuffle=False, verbose=0)
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert list(compiled.network.state_dict()) == list(plain.network.state_dict())


@pytest.mark.parametrize(
    "amp", ["bf16", "fp16", "O1", "O2", {"level": "O2", "dtype": "bf16"}, {"init_loss_scaling": 8.0}]
)
def test_mixed_precision_learns_and_evaluates_alike(amp: Any) -> None:
    x, y = blobs(300)
    model = prepared(mlp(), amp=amp, metrics="acc")
    history = model.fit((x, y), (x, y), batch_size=20, epochs=4, verbose=0).history
    assert history["eval_acc"][-1] > 0.9
    if amp == "O2" or (isinstance(amp, dict) and amp.get("level") == "O2"):
        assert model.network[0].weight.dtype in (torch.float16, torch.bfloat16)
        model.prepare("adam", "cross_entropy")
        assert model.network[0].weight.dtype == torch.float32
    else:
        assert model.network[0].weight.dtype == torch.float32


def test_a_skipped_fp16_step_counts_nowhere() -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model = hapi.Model(net).prepare(
        optimizer, nn.CrossEntropyLoss(), scheduler=scheduler, amp={"level": "O1", "init_loss_scaling": 2.0**40}
    )
    before = [p.detach().clone() for p in net.parameters()]
    model.fit((X, Y), batch_size=25, verbose=0)  # two batches, both overflow
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert model._progress.global_step == 0
    assert optimizer.param_groups[0]["lr"] == 0.1
