from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

from hapi.callbacks import Callback, History
from tests.callbacks.driver import Driver, values


def test_values_and_their_epochs() -> None:
    history = History()
    Driver([history], evaluate=values(5.0, 4.0), eval_freq=2, batches=1).fit(3)
    assert history.history == {
        "loss": [1.0, 1 / 11, 1 / 21],
        "lr": [0.1, 0.1, 0.1],
        "eval_loss": [5.0, 4.0],
    }
    assert history.epochs == {"loss": [1, 2, 3], "lr": [1, 2, 3], "eval_loss": [2, 3]}
    assert history.epoch == [1, 2, 3]
    assert repr(history) == "History(epochs=3, last: loss=0.04762, lr=0.1, eval_loss=4)"
    assert repr(History()) == "History(epochs=0)"


class Matrix(Callback):
    """Adds an array that it changes afterwards."""

    def __init__(self) -> None:
        self.matrix = np.zeros((2, 2))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert logs is not None
        self.matrix += 1
        logs.update(matrix=self.matrix, note="text", names=np.array(["a"]))


def test_arrays_are_copies_and_text_is_left_out() -> None:
    history = History()
    Driver([Matrix(), history]).fit(2)
    assert [array[0, 0] for array in history.history["matrix"]] == [1.0, 2.0]
    assert set(history.history) == {"loss", "lr", "matrix"}


def test_second_fit_begins_anew_and_leaves_the_first_result() -> None:
    history = History()
    driver = Driver([history])
    driver.fit(2)
    first = history.history
    driver.fit(1)
    assert len(first["loss"]) == 2
    assert len(history.history["loss"]) == 1
    assert history.epoch == [1]


def test_resume_goes_on() -> None:
    first, second = Driver([Matrix(), History()]), Driver([Matrix(), History()])
    first.fit(2)
    file = io.BytesIO()
    torch.save(first.callbacks[1].state_dict(), file)
    file.seek(0)
    second.callbacks[1].load_state_dict(torch.load(file, weights_only=True))
    second.run.progress = first.run.progress
    second.fit(3, resume=True)
    history = second.callbacks[1]
    assert isinstance(history, History)
    assert history.epoch == [1, 2, 3]
    assert history.epochs["matrix"] == [1, 2, 3]
    assert all(isinstance(array, np.ndarray) for array in history.history["matrix"])
