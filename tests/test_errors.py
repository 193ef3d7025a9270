"""Bad input, each tried: it fails early, and says what was given, what is accepted and where."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hapi
from tests.helpers.nets import blobs, mlp

X, Y = blobs(20)


def model(**options: Any) -> hapi.Model:
    net = mlp()
    return hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss(), **options)


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.fit((X, Y)), "fit: call prepare"),
        (lambda m: m.evaluate((X, Y)), "evaluate: call prepare"),
        (lambda m: m.train_batch(X, Y), "train_batch: call prepare"),
        (lambda m: m.eval_batch(X, Y), "eval_batch: call prepare"),
        (lambda m: m.prepare(loss="mse").fit((X, Y)), "without an optimizer"),
        (lambda m: m.prepare("sgd").fit((X, Y)), "without a loss"),
    ],
)
def test_no_prepare(call: Any, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        call(hapi.Model(mlp()))


BAD_PREPARE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"optimizer": "adm"}, ValueError, "did you mean 'adam'"),
    ({"optimizer": 3}, TypeError, "accepted: a torch.optim.Optimizer"),
    ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)}, ValueError, "none of the parameters"),
    ({"optimizer": lambda p: torch.optim.LBFGS(p)}, ValueError, "LBFGS"),
    ({"loss": "crossentropy"}, ValueError, "did you mean 'cross_entropy'"),
    ({"loss": 1}, TypeError, "accepted: a function"),
    ({"loss": []}, ValueError, "empty"),
    ({"loss": {"loss": "mse", "b": "mse"}}, ValueError, "used by logs"),
    ({"loss": ["mse", "mse"], "loss_weights": [1]}, ValueError, "1 loss_weights for 2 losses"),
    ({"loss_weights": [1]}, ValueError, "without a loss"),
    ({"metrics": "accurracy"}, ValueError, "did you mean 'accuracy'"),
    ({"metrics": 7}, TypeError, "accepted: a hapi metric"),
    ({"metrics": ["acc", "acc"]}, ValueError, r"two metrics are named \['acc'\]"),
    ({"metrics": hapi.metrics.Accuracy(name="loss")}, ValueError, "used by logs"),
    ({"loss": {"acc": "mse", "b": "mse"}, "metrics": "acc"}, ValueError, "both named"),
    ({"amp": "fp8"}, ValueError, "amp='fp8'"),
    ({"amp": {"levle": "O1"}}, ValueError, "did you mean 'level'"),
    ({"amp": {"custom_white_list": []}}, ValueError, "operator lists"),
    ({"amp": {"level": "O3"}}, ValueError, "'O0', 'O1', 'O2'"),
    ({"amp": {"decr_every_n_nan_or_inf": 2}}, ValueError, "accepted: 1"),
    ({"optimizer": "sgd", "scheduler": "cosin"}, ValueError, "did you mean 'cosine'"),
    ({"scheduler": "cosine"}, ValueError, "without an optimizer"),
    ({"optimizer": "sgd", "scheduler": 3}, TypeError, "accepted: a torch.optim.lr_scheduler"),
    ({"scheduler_interval": "batch"}, ValueError, "accepted: 'step', 'epoch'"),
    ({"clip_grad_norm": -1}, ValueError, "clip_grad_norm must be a number above 0"),
    ({"clip_grad_norm": 1, "clip_grad_value": 1}, ValueError, "not both"),
    ({"loss": "mse", "class_weight": {-1: 2}}, ValueError, "class index"),
    ({"sample_weight": 1.5}, TypeError, "a position or a key"),
    ({"strategy": "fsdpp"}, ValueError, "strategy='fsdpp'"),
    ({"strategy": 3}, TypeError, "or a Strategy"),
    ({"compile": "yes"}, ValueError, "accepted: True, False or a dict"),
    ({"channels_last": 1}, TypeError, "True or False"),
]


@pytest.mark.parametrize(("arguments", "kind", "words"), BAD_PREPARE)
def test_wrong_arguments_of_prepare(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        hapi.Model(mlp()).prepare(**arguments)


BAD_FIT: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"train_data": None}, ValueError, "train_data is None"),
    ({"train_data": 3}, TypeError, "fit: train_data is int; accepted: tensors"),
    ({"train_data": (X, Y[:5])}, ValueError, "different lengths"),
    ({"train_data": (X[:0], Y[:0])}, ValueError, "fit: train_data is empty"),
    ({"train_data": []}, ValueError, "fit: train_data is empty"),
    ({"train_data": (X, Y), "eval_data": (X[:0], Y[:0])}, ValueError, "fit: eval_data is empty"),
    ({"batch_size": 0}, ValueError, "batch_size must be an int of at least 1, not 0"),
    ({"batch_size": "8"}, ValueError, "batch_size"),
    ({"batch_size": [1, 2, 3]}, ValueError, r"accepted: an int, or \[train, eval\]"),
    ({"batch_size": 4, "global_batch_size": 8}, ValueError, "not both"),
    ({"batch_size": 30, "drop_last": True}, ValueError, "drop_last=True leaves none"),
    ({"epochs": 0}, ValueError, "epochs must be an int of at least 1, not 0"),
    ({"epochs": 1.5}, ValueError, "epochs"),
    ({"eval_freq": 0}, ValueError, "eval_freq"),
    ({"log_freq": 0}, ValueError, "log_freq"),
    ({"save_freq": 0}, ValueError, "save_freq"),
    ({"verbose": 4}, ValueError, "accepted: 0, 1, 2, 3"),
    ({"verbose": True}, ValueError, "verbose"),
    ({"shuffle": "yes"}, TypeError, "shuffle"),
    ({"drop_last": 1}, TypeError, "drop_last"),
    ({"num_workers": -1}, ValueError, "num_workers"),
    ({"num_iters": 0}, ValueError, "num_iters"),
    ({"accumulate_grad_batches": 0}, ValueError, "accumulate_grad_batches"),
    ({"seed": -1}, ValueError, "seed"),
    ({"callbacks": 3}, TypeError, "accepted: hapi.callbacks.Callback"),
    ({"callbacks": hapi.callbacks.History}, TypeError, "give an instance"),
    ({"validation_split": 2}, ValueError, "between 0 and 1"),
    ({"validation_split": 0.1, "eval_data": (X, Y)}, ValueError, "not both"),
    ({"sample_weight": torch.ones(20, 2)}, ValueError, r"accepted: \[N\]"),
    ({"train_data": [(X, Y)], "sample_weight": torch.ones(20)}, TypeError, "goes with arrays"),
]


@pytest.mark.parametrize(("arguments", "kind", "words"), BAD_FIT)
def test_wrong_arguments_of_fit(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        model().fit(**{"train_data": (X, Y), **arguments})


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda m: m.evaluate(None), ValueError, "evaluate: the data is None"),
        (lambda m: m.evaluate((X, Y), batch_size=[1, 2]), ValueError, "accepted: an int"),
        (lambda m: m.evaluate((X, Y), log_freq=0), ValueError, "evaluate: log_freq"),
        (lambda m: m.evaluate((X, Y), num_iters=0), ValueError, "evaluate: num_iters"),
        (lambda m: m.evaluate((X, Y), verbose=9), ValueError, "evaluate: verbose"),
        (lambda m: m.predict((X[:0],)), ValueError, "empty"),
        (lambda m: m.predict("data.csv"), TypeError, "predict: data is str"),
        (lambda m: m.predict((X,), stack_outputs=1), TypeError, "stack_outputs"),
        (lambda m: m.predict((X,), batch_size=-1), ValueError, "predict: batch_size"),
        (lambda m: m.predict_batch(3.5), ValueError, "no dimensions"),
        (lambda m: m.predict_batch([]), ValueError, "empty"),
        (lambda m: m.predict_batch("abc"), TypeError, "accepted: tensors and numpy arrays"),
        (lambda m: m.save(""), ValueError, "names a folder"),
        (lambda m: m.save("dir/"), ValueError, "names a folder"),
        (lambda m: m.save("x", format="tflite"), ValueError, "accepted: 'pt2', 'onnx'"),
        (lambda m: m.save("x", training=False), RuntimeError, "needs example inputs"),
        (lambda m: m.load("no/such/file"), FileNotFoundError, "no weights at"),
        (lambda m: m.load(""), ValueError, "names a folder"),
        (lambda m: m.summary(), ValueError, "give input_size"),
        (lambda m: hapi.Model(nn.Linear), TypeError, r"give an instance: Linear\(\)"),
        (lambda m: hapi.Model(3), TypeError, "not a torch.nn.Module"),
        (lambda m: hapi.Model(mlp(), inputs=1.5), TypeError, "accepted: hapi.InputSpec"),
        (lambda m: hapi.Model(mlp(), inputs=-1), ValueError, "negative"),
        (lambda m: hapi.Model(mlp(), labels=["a", "a"]), ValueError, "twice"),
        (lambda m: hapi.InputSpec([None], "float33"), ValueError, "not a torch dtype"),
        (lambda m: hapi.InputSpec([None, 0]), ValueError, "positive ints"),
        (lambda m: hapi.seed_everything(-1), ValueError, "seed_everything"),
        (lambda m: hapi.Model(mlp(), device="cuda:99").predict(X, verbose=0), (RuntimeError, ValueError), "cuda"),
    ],
)
def test_wrong_arguments_of_other_calls(call: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        call(model())


def test_labels_missing() -> None:
    with pytest.raises(TypeError) as caught:
        model().fit((X,), batch_size=4, verbose=0)
    assert "the batch has no labels left for it" in text_of(caught.value)


def test_shape_mismatch_between_loss_and_labels_names_both() -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        model().fit((X, torch.zeros(20, 7)), batch_size=4, verbose=0)
    assert "while computing the loss CrossEntropyLoss of outputs (float32[4, 3]) and labels (float32[4, 7])" in text_of(
        caught.value
    )


def test_a_loss_of_wrong_shape() -> None:
    net = mlp()
    bad = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), lambda out, y: out[:2])
    with pytest.raises(ValueError, match=r"gave the shape \[2, 3\]; accepted: a scalar, or one value"):
        bad.fit((X, Y), batch_size=4, verbose=0)
    worse = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), lambda out, y: 1.0)
    with pytest.raises(TypeError, match="accepted: a tensor"):
        worse.fit((X, Y), batch_size=4, verbose=0)


def test_a_loss_without_gradient() -> None:
    net = mlp()
    bad = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), lambda out, y: out.detach().mean())
    with pytest.raises(RuntimeError) as caught:
        bad.fit((X, Y), batch_size=4, verbose=0)
    assert "does not depend on any parameter" in text_of(caught.value)


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise OSError("cannot read image")
        return X[index], Y[index]


class BrokenBatches(Broken):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[i] for i in indices]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_failing_sample_is_named(workers: int) -> None:
    with pytest.raises(OSError, match="cannot read image") as caught:
        model().fit(Broken(), batch_size=4, shuffle=False, verbose=0, num_workers=workers)
    assert "while reading sample 13 of Broken (rank 0)" in text_of(caught.value)


def test_a_failing_batch_of_samples_is_named() -> None:
    with pytest.raises(OSError, match="cannot read") as caught:
        model().fit(BrokenBatches(), batch_size=4, shuffle=False, verbose=0)
    assert "while reading samples [12, 13, 14, 15] of BrokenBatches (rank 0)" in text_of(caught.value)


def test_a_failing_batch_of_a_dataloader_is_named() -> None:
    with pytest.raises(OSError, match="cannot read") as caught:
        model().fit(DataLoader(Broken(), batch_size=4), verbose=0)
    assert "while reading batch 3 of the DataLoader" in text_of(caught.value)


def test_samples_that_do_not_fit_together_are_described() -> None:
    class Ragged(Broken):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(index + 1), 0

    with pytest.raises(RuntimeError) as caught:
        model().fit(Ragged(), batch_size=4, shuffle=False, verbose=0)
    assert "the first is (float32[1], int)" in text_of(caught.value)


class Recorder(hapi.callbacks.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_exception(self, exception: BaseException) -> None:
        self.seen.append(f"exception {type(exception).__name__}")

    def on_train_end(self, logs: Any = None) -> None:
        self.seen.append("end")


class Fails(hapi.callbacks.Callback):
    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        if step == 2:
            raise KeyError("oops")


def test_a_failing_callback_is_named_and_the_others_are_closed() -> None:
    recorder = Recorder()
    with pytest.raises(KeyError) as caught:
        model().fit((X, Y), batch_size=4, verbose=0, callbacks=[Fails(), recorder])
    assert "raised by the callback Fails.on_train_batch_end" in text_of(caught.value)
    assert recorder.seen == ["exception KeyError", "end"]


def test_a_failure_while_cleaning_up_does_not_hide_the_first() -> None:
    class BadEnd(hapi.callbacks.Callback):
        def on_train_end(self, logs: Any = None) -> None:
            raise RuntimeError("second")

    recorder = Recorder()
    with pytest.raises(KeyError) as caught:
        model().fit((X, Y), batch_size=4, verbose=0, callbacks=[Fails(), BadEnd(), recorder])
    assert "while cleaning up: RuntimeError: second" in text_of(caught.value)
    assert recorder.seen == ["exception KeyError", "end"]


def test_fit_works_again_after_a_failure() -> None:
    broken = model(metrics="acc")
    with pytest.raises(KeyError):
        broken.fit((X, Y), batch_size=4, verbose=0, callbacks=Fails())
    # Reference wart: an exception left metrics half-filled, and the next evaluation was wrong.
    fresh = hapi.Model(broken.network).prepare(None, nn.CrossEntropyLoss(), "acc")
    expected = fresh.evaluate((X, Y), batch_size=4, verbose=0)
    assert broken.evaluate((X, Y), batch_size=4, verbose=0) == expected
    broken.fit((X, Y), batch_size=4, verbose=0)


def test_fit_inside_a_callback_is_refused() -> None:
    class Nested(hapi.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.fit((X, Y))

    with pytest.raises(RuntimeError, match="already running"):
        model().fit((X, Y), batch_size=4, verbose=0, callbacks=Nested())


def test_a_metric_that_is_nan_warns_and_training_goes_on() -> None:
    nan = hapi.metrics.FunctionMetric(lambda out, y: out.sum() * float("nan"), name="odd")
    with pytest.warns(RuntimeWarning, match="metric 'odd' is NaN"):
        history = model(metrics=nan).fit((X, Y), batch_size=4, verbose=0)
    assert history.history["odd"][0] != history.history["odd"][0]
    assert history.history["loss"][0] > 0


def test_a_failing_metric_is_named() -> None:
    def bad(out: Any, y: Any) -> Any:
        raise ZeroDivisionError("inside")

    with pytest.raises(ZeroDivisionError) as caught:
        model(metrics=hapi.metrics.FunctionMetric(bad, name="mine")).fit((X, Y), batch_size=4, verbose=0)
    assert "while updating the metric 'mine'" in text_of(caught.value)
