"""What first users tripped over: each of these was found by somebody who knew only the guide."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hapi
from tests.helpers.nets import blobs, mlp
from tests.helpers.ranks import run_ranks

X, Y = blobs(40)


def prepared(loss: Any = "cross_entropy", metrics: Any = None, **options: Any) -> hapi.Model:
    net = options.pop("net", None) or mlp()
    return hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), loss, metrics, **options)


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_the_learning_rate_in_the_history_does_not_depend_on_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    rates = [
        prepared(scheduler="cosine").fit((X, Y), batch_size=10, epochs=3, verbose=verbose, shuffle=False).history["lr"]
        for verbose in (0, 2)
    ]
    assert rates[0] == rates[1]
    assert rates[0][-1] > 0
    assert "Epoch 3/3" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["accuracy", "f1", "precision", "recall", "auc"])
def test_binary_metrics_by_name_take_logits_where_the_loss_does(name: str) -> None:
    class Perfect(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    label = torch.tensor([0.0, 1.0, 1.0, 0.0])
    logits = (label - 0.5) * 0.4  # right, and all below 0.5
    model = hapi.Model(Perfect()).prepare(None, "bce_with_logits", name)
    values = model.evaluate((logits, label), batch_size=2, verbose=0)
    assert next(value for key, value in values.items() if key != "loss") == 1.0


def test_a_list_of_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="A list is a list of batches"):
        prepared().fit([(X[i], Y[i]) for i in range(10)], verbose=0)


def test_lists_of_numbers_are_refused() -> None:
    for data in ((X.tolist(), Y.tolist()), {"x": [1, 2]}):
        with pytest.raises(TypeError, match=r"fit: train_data is .*accepted: tensors or numpy arrays"):
            prepared().fit(data, verbose=0)


def test_what_a_callback_writes_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Adds(hapi.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            logs["double"] = 0.5

    prepared().fit((X, Y), batch_size=20, callbacks=Adds())
    assert "double: 0.5000" in capsys.readouterr().out


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(), "cross_entropy"])
def test_labels_of_shape_n_1_work_with_every_form_of_cross_entropy(loss: Any) -> None:
    flat = prepared(loss).evaluate((X, Y), batch_size=10, verbose=0)
    assert prepared(loss).evaluate((X, Y[:, None]), batch_size=10, verbose=0) == flat
    assert prepared(loss).fit((X, Y[:, None]), batch_size=10, verbose=0).history["loss"][0] > 0


def test_classes_serve_as_factories() -> None:
    model = hapi.Model(mlp()).prepare(torch.optim.Adam, nn.CrossEntropyLoss, [hapi.metrics.Accuracy])
    assert set(model.fit((X, Y), batch_size=20, verbose=0).history) == {"loss", "acc", "lr"}


def test_a_failing_forward_says_on_what() -> None:
    for act in (lambda m: m.fit((X.double(), Y), verbose=0), lambda m: m.predict(X.double(), verbose=0)):
        with pytest.raises(RuntimeError) as caught:
            act(prepared())
        assert "while running Sequential.forward(float64[1, 8]). The input is float64" in text_of(caught.value)


def test_inputs_and_labels_given_apart() -> None:
    with pytest.raises(TypeError) as caught:
        prepared().fit(X, Y, verbose=0)
    assert "give both together, as fit((x, y))" in text_of(caught.value)


def test_elementwise_losses_do_not_broadcast() -> None:
    net = nn.Linear(8, 1)
    with pytest.raises(ValueError, match=r"the output is float32\[10, 1\] and the label float32\[10\]"):
        prepared("mse", net=net).fit((X, torch.rand(40)), batch_size=10, verbose=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_binary_labels_of_any_dtype(dtype: torch.dtype) -> None:
    net = nn.Linear(8, 1)
    history = prepared("bce_with_logits", net=net).fit((X, (Y == 1)[:, None].to(dtype)), batch_size=10, verbose=0)
    assert 0 < history.history["loss"][0] < 5


def test_loading_a_folder_lists_what_is_in_it(tmp_path: Any) -> None:
    model = prepared()
    model.save(tmp_path / "run" / "3")
    with pytest.raises(FileNotFoundError, match=r"has \['3.pt'\]"):
        model.load(tmp_path / "run")


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: prepared(class_weight={0: 1.0}).fit((X, Y), verbose=0), ValueError, "classes 0 to 0, but a label is"),
        (lambda: prepared().fit((X, Y), sample_weight="x", verbose=0), TypeError, "fit: sample_weight is str"),
        (lambda: prepared().fit((X, Y), save_dir=3, verbose=0), TypeError, "fit: save_dir=3"),
        (lambda: prepared().fit((X.numpy(), np.array(["a"] * 40)), verbose=0), TypeError, "fit: train_data: an array"),
        (lambda: prepared("sparse_categorical_crossentropy"), ValueError, "Keras's .* is 'cross_entropy'"),
        (lambda: hapi.Model(mlp(), device="gpu"), ValueError, "Model: device='gpu'"),
    ],
)
def test_messages_name_the_argument(call: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def test_hints_at_the_dtype() -> None:
    with pytest.raises(RuntimeError) as caught:
        prepared().fit((torch.ones(40, 8, dtype=torch.int64), Y), verbose=0)
    assert "The input is int64; most networks want float32: use .float()" in text_of(caught.value)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        prepared().fit((X, Y.float()), verbose=0)
    assert "Class labels are integers: use .long()" in text_of(caught.value)


UNGUARDED = """
import hapi
def work():
    return 1
hapi.distributed.spawn(work, nprocs=2)
"""


@pytest.mark.slow
def test_spawn_without_the_main_guard_says_so_in_one_sentence(tmp_path: Any) -> None:
    (tmp_path / "train.py").write_text(UNGUARDED)
    root = str(Path(hapi.__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert result.returncode == 1
    assert 'put the call under `if __name__ == "__main__":`' in result.stderr
    assert "freeze_support" not in result.stderr


def history_everywhere() -> Any:
    model = prepared(metrics="acc")

    class Adds(hapi.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["mine"] = 1.0

    history = model.fit((X, Y), (X, Y), batch_size=8, epochs=2, verbose=0, callbacks=[Adds()])
    return history.history


@pytest.mark.ranks
def test_fit_returns_the_history_on_every_rank() -> None:
    first, second = run_ranks(history_everywhere, 2)
    assert first == second
    assert set(first) == {"loss", "acc", "lr", "eval_loss", "eval_acc", "mine"}
