"""paddle.Model in train.py: its own nets of the same shapes, in an environment without torch.

python _train_paddle.py NAME WORKLOAD DATA CHANNEL
"""

from __future__ import annotations

import importlib
import socket
import sys
from typing import Any

import numpy as np
from _gate import Evaluate, Gate, Order, Result, serve
from _workloads import CLASSES, RATES, REPORT, SEQUENCE, VOCABULARY, WIDTH, WORKLOADS

paddle: Any = importlib.import_module("paddle")
nn = paddle.nn

MEAN, STD = np.float32(0.1307), np.float32(0.3081)  # as in _nets.py, which needs torch


class Tagger(nn.Layer):  # type: ignore[misc]
    """Token classification: two encoder layers; the classes are last, as Paddle's losses want them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH), 2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.encoder(self.tokens(tokens) + self.places.weight))


def net_of(workload: str) -> Any:
    if workload == "lenet":
        return paddle.vision.models.LeNet()
    if workload == "resnet":
        return paddle.vision.models.resnet18(num_classes=CLASSES)
    if workload == "transformer":
        return Tagger()
    if workload == "tiny":
        return nn.Linear(8, 2)
    return nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))


class MapRows(paddle.io.Dataset):  # type: ignore[misc]
    """Arrays in memory, one row at a time; images become float32 in [0, 1]."""

    def __init__(self, rows: Any, labels: Any) -> None:
        super().__init__()
        self.rows, self.labels = rows, labels
        self.images = rows.dtype == np.uint8

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = self.rows[index]
        return (row.astype("float32") / 255 - MEAN) / STD if self.images else row, self.labels[index]


def dataset_of(form: str, inputs: Any, labels: Any) -> Any:
    labels = labels[..., None]  # Accuracy takes [B, S] for one-hot labels
    if form == "map":
        return MapRows(inputs, labels)
    floats = (inputs.astype("float32") / 255 - MEAN) / STD if inputs.dtype == np.uint8 else inputs
    return paddle.io.TensorDataset([paddle.to_tensor(floats), paddle.to_tensor(labels)])


def main(name: str, workload: str, data: str, channel: str) -> None:
    gate = Gate(socket.socket(fileno=int(channel)))
    form, size = name.partition("/")[2], WORKLOADS[workload]
    arrays = np.load(data)

    def prepared(net: Any) -> Any:
        model = paddle.Model(net)
        kind = getattr(paddle.optimizer, size.optimizer)
        optimizer = kind(RATES[size.optimizer], parameters=model.parameters())
        model.prepare(optimizer, nn.CrossEntropyLoss(), paddle.metric.Accuracy())
        return model

    def open_data(order: Order, part: str) -> Any:
        cut = order.get("steps", 0) * size.rows or None
        return dataset_of(form, *(arrays[f"{part}_{what}"][:cut] for what in ("inputs", "labels")))

    def fit(order: Order) -> None:
        net = net_of(workload)
        net.register_forward_pre_hook(lambda layer, inputs: gate())
        prepared(net).fit(
            open_data(order, "train"),
            batch_size=size.rows,
            epochs=sys.maxsize,
            log_freq=REPORT,
            shuffle=order["shuffle"],
            verbose=2,
        )

    def evaluation(order: Order) -> Evaluate:
        model, data = prepared(net_of(workload)), open_data(order, "test")

        def evaluate() -> Result:
            logs = model.evaluate(data, batch_size=size.rows, verbose=0)
            return float(logs["loss"][0]), float(logs["acc"])

        return evaluate

    paddle.set_device("cpu")
    paddle.seed(0)
    serve(gate, fit, evaluation)


if __name__ == "__main__":
    main(*sys.argv[1:])
