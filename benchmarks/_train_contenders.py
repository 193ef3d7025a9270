"""The contenders of train.py: the loops and hapi here, the peers in _train_peers.py, Paddle in _train_paddle.py.

Each has a ``fit`` without end, which the gate in the net cuts into turns, and an ``evaluation``, which makes a function
that evaluates the whole data once. Runs in the environment of the contender's framework.

    python _train_contenders.py NAME WORKLOAD DATA CHANNEL
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from _gate import Evaluate, Gate, Order, Report, Result, serve
from _nets import NETS, Evaluation, Fit, Task, as_floats, map_style
from _workloads import REPORT, WORKLOADS
from torch import Tensor, nn

# ------------------------------------------------------------ the loops


def fit_raw(task: Task) -> None:
    """The loop of torch's tutorials, or an expert's."""
    if task.form == "map":
        _fit_ordinary(task)
    else:
        _fit_best(task)


def _fit_ordinary(task: Task) -> None:
    net, loader, optimizer, loss_fn = task.net, task.loader, task.optimizer(), nn.CrossEntropyLoss()
    for epoch in itertools.count():
        net.train()
        total, correct, seen, counted = 0.0, 0, 0, 0
        for step, (inputs, labels) in enumerate(loader, 1):
            optimizer.zero_grad()
            logits = net(inputs)
            loss = loss_fn(logits, labels)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
            correct += (logits.argmax(1) == labels).sum().item()
            seen, counted = seen + len(labels), counted + labels.numel()
            if step % REPORT == 0:
                print(f"epoch {epoch} step {step} loss {total / seen:.4f} acc {correct / counted:.4f}")


def _fit_best(task: Task) -> None:
    """A gather per batch, sums kept as tensors, one read per report."""
    net, loss_fn = task.net, nn.CrossEntropyLoss()
    fast = "fused" in task.form
    if fast:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameters, optimizer = list(net.parameters()), task.optimizer(**({"fused": True} if fast else {}))
    inputs = as_floats(task.inputs)
    net.train()
    for epoch in itertools.count():
        total, correct = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
        seen = counted = 0
        for step, (batch, labels) in enumerate(_gathered(task, inputs, fast), 1):
            logits = net(batch)
            loss = loss_fn(logits, labels)
            loss.backward()
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None
            total.add_(loss.detach(), alpha=len(labels))
            correct.add_((logits.detach().argmax(1) == labels).sum())
            seen, counted = seen + len(labels), counted + labels.numel()
            if step % REPORT == 0:
                print(f"epoch {epoch} step {step} loss {total / seen:.4f} acc {correct / counted:.4f}")


def _gathered(task: Task, inputs: Tensor, channels_last: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an epoch, each one gather, or one slice where the order is the data's."""
    labels, rows = task.labels, task.rows
    channels_last = channels_last and inputs.ndim == 4
    order = torch.randperm(len(labels)) if task.shuffle else None
    for first in range(0, len(labels), rows):
        if order is None:
            batch, label = inputs[first : first + rows], labels[first : first + rows]
        else:
            index = order[first : first + rows]
            batch, label = inputs.index_select(0, index), labels.index_select(0, index)
        yield (batch.contiguous(memory_format=torch.channels_last) if channels_last else batch), label


def evaluation_raw(task: Task) -> Evaluate:
    net, loss_fn = task.net, nn.CrossEntropyLoss()
    rows = len(task.labels)

    if task.form == "map":
        loader = task.loader

        def ordinary() -> Result:
            net.eval()
            total, correct = 0.0, 0
            with torch.no_grad():
                for inputs, labels in loader:
                    logits = net(inputs)
                    total += loss_fn(logits, labels).item() * len(labels)
                    correct += (logits.argmax(1) == labels).sum().item()
            return total / rows, correct / task.labels.numel()

        return ordinary
    fast = "fused" in task.form
    if fast:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    everything = as_floats(task.inputs)

    def best() -> Result:
        net.eval()
        total, correct = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
        with torch.inference_mode():
            for inputs, labels in _gathered(task, everything, fast):
                logits = net(inputs)
                total.add_(loss_fn(logits, labels), alpha=len(labels))
                correct.add_((logits.argmax(1) == labels).sum())
        return float(total) / rows, float(correct) / task.labels.numel()

    return best


# ------------------------------------------------------------ hapi


def fit_hapi(task: Task) -> None:
    _hapi_model(task).fit(
        _hapi_data(task), batch_size=task.rows, epochs=sys.maxsize, log_freq=REPORT, shuffle=task.shuffle
    )


def evaluation_hapi(task: Task) -> Evaluate:
    model, data = _hapi_model(task), _hapi_data(task)

    def evaluate() -> Result:
        logs = model.evaluate(data, batch_size=task.rows, verbose=0)
        return logs["loss"], logs["acc"]

    return evaluate


def _hapi_model(task: Task) -> Any:
    hapi = importlib.import_module("hapi")
    options: dict[str, Any] = {}
    if task.form == "fast":
        options["channels_last"] = True
    elif task.form == "compile-eval":
        options["compile"] = "eval"
    optimizer = task.kind.lower() if task.form == "fast" else task.optimizer()
    return hapi.Model(task.net).prepare(optimizer, nn.CrossEntropyLoss(), "accuracy", **options)


def _hapi_data(task: Task) -> Any:
    if task.form == "map":
        return map_style(task.inputs, task.labels)
    return task.arrays


OWN: dict[str, tuple[Fit, Evaluation]] = {"raw": (fit_raw, evaluation_raw), "hapi": (fit_hapi, evaluation_hapi)}

# ------------------------------------------------------------ the process


class Probe(Gate):
    """A gate that can say what a fit has made of the net.

    Args:
        channel: The connection to the parent.
    """

    def __init__(self, channel: socket.socket) -> None:
        super().__init__(channel)
        self.task: Task | None = None

    def begin(self, order: Order) -> None:
        if order.get("probe"):
            torch.manual_seed(1)  # dropout draws the same, whatever the framework has drawn to get here

    def end(self, order: Order) -> Report:
        report = super().end(order)
        if order.get("probe") and self.task is not None:
            report |= _digest(self.task)
        return report


def _digest(task: Task) -> Report:
    """The hash of the weights, and the net's loss on the first rows."""
    net: Any = task.net
    weights = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in net.state_dict().values())
    gate, net.gate = net.gate, _open
    net.eval()
    with torch.no_grad():
        loss = nn.CrossEntropyLoss()(net(as_floats(task.inputs[: task.rows])), task.labels[: task.rows])
    net.gate = gate
    return {"weights": hashlib.sha256(weights).hexdigest(), "loss": loss.item()}


def _open() -> None:
    """In the place of a gate where turns are not cut within a net."""


def main(name: str, workload: str, data: str, channel: str) -> None:
    os.environ["KERAS_BACKEND"] = "torch"  # before anything of Keras is imported
    gate = Probe(socket.socket(fileno=int(channel)))
    framework, _, form = name.partition("/")
    fit, evaluation = OWN[framework] if framework in OWN else importlib.import_module("_train_peers").PEERS[framework]
    size, arrays = WORKLOADS[workload], np.load(data)

    def task_of(order: Order, part: str, passing: Callable[[], None]) -> Task:
        torch.manual_seed(0)
        net = NETS[workload](passing)
        cut = order.get("steps", 0) * size.rows or None
        inputs, labels = (torch.from_numpy(arrays[f"{part}_{what}"][:cut]) for what in ("inputs", "labels"))
        gate.task = Task(form, net, inputs, labels, size.rows, bool(order.get("shuffle")), size.optimizer)
        return gate.task

    serve(
        gate,
        lambda order: fit(task_of(order, "train", gate)),
        lambda order: evaluation(task_of(order, "test", _open)),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
