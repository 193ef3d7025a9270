"""The peers of train.py that run on torch, each as its users write it, in its quietest useful form.

No bars and no checkpoints, which the loops do not have either; loss and accuracy of the training data, as the others.
Each is imported in its functions, since each has its own environment.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from typing import Any

import torch
from _gate import Evaluate, Result
from _nets import Evaluation, Fit, Task
from _workloads import RATES, REPORT
from torch import Tensor, nn
from torch.utils.data import DataLoader

# ------------------------------------------------------------ Keras 3 on torch


def _keras_model(task: Task) -> Any:
    os.environ["KERAS_HOME"] = os.getcwd()
    keras: Any = importlib.import_module("keras")

    class Wrapped(keras.Model):  # type: ignore[misc]
        """The same torch net as the others: Keras's own layers are slower, and would not do the same arithmetic."""

        def __init__(self) -> None:
            super().__init__()
            self.net = keras.layers.TorchModuleWrapper(task.net)

        def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
            logits: Tensor = self.net(inputs, training=training)
            return logits.transpose(1, 2) if logits.ndim == 3 else logits

    model = Wrapped()
    model.compile(
        optimizer=getattr(keras.optimizers, task.kind)(RATES[task.kind]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
    )
    return model


def fit_keras(task: Task) -> None:
    net: Any = task.net
    gate = net.gate
    # Keras also runs the net, without gradients, to learn the shapes: that is no step.
    net.gate = lambda: gate() if torch.is_grad_enabled() else None
    options: dict[str, Any] = {"epochs": sys.maxsize, "verbose": 2}
    if task.form == "map":
        _keras_model(task).fit(task.loader, **options)
    else:
        _keras_model(task).fit(*task.arrays, batch_size=task.rows, shuffle=task.shuffle, **options)


def evaluation_keras(task: Task) -> Evaluate:
    model, options = _keras_model(task), {"verbose": 0, "return_dict": True}
    data: Any = (task.loader,) if task.form == "map" else task.arrays
    if task.form != "map":
        options["batch_size"] = task.rows

    def evaluate() -> Result:
        logs = model.evaluate(*data, **options)
        return float(logs["loss"]), float(logs["acc"])

    return evaluate


# ------------------------------------------------------------ Lightning


def _lit(task: Task) -> Any:
    lightning: Any = importlib.import_module("lightning")
    torchmetrics: Any = importlib.import_module("torchmetrics")
    classes = int(task.labels.max()) + 1

    class Lit(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss_fn = task.net, nn.CrossEntropyLoss()
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=classes)

        def training_step(self, batch: Any, index: int) -> Tensor:
            inputs, labels = batch
            logits = self.net(inputs)
            loss: Tensor = self.loss_fn(logits, labels)
            self.accuracy(logits, labels)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("acc", self.accuracy, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            inputs, labels = batch
            logits = self.net(inputs)
            self.accuracy(logits, labels)
            self.log("eval_loss", self.loss_fn(logits, labels))
            self.log("eval_acc", self.accuracy)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer()

    return Lit()


def _lit_trainer() -> Any:
    return importlib.import_module("lightning").Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        log_every_n_steps=REPORT,
        logger=importlib.import_module("lightning.pytorch.loggers").CSVLogger("."),
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )


def fit_lightning(task: Task) -> None:
    _lit_trainer().fit(_lit(task), task.loader)


def evaluation_lightning(task: Task) -> Evaluate:
    lit, trainer, loader = _lit(task), _lit_trainer(), task.loader

    def evaluate() -> Result:
        logs = trainer.validate(lit, loader, verbose=False)[0]
        return logs["eval_loss"], logs["eval_acc"]

    return evaluate


# ------------------------------------------------------------ Ignite


def fit_ignite(task: Task) -> None:
    engine: Any = importlib.import_module("ignite.engine")
    metrics: Any = importlib.import_module("ignite.metrics")
    trainer = engine.create_supervised_trainer(
        task.net,
        task.optimizer(),
        nn.CrossEntropyLoss(),
        output_transform=lambda x, y, y_pred, loss: (y_pred, y, loss.item()),
    )
    metrics.Accuracy(output_transform=lambda output: output[:2]).attach(trainer, "acc")
    metrics.Average(output_transform=lambda output: output[2]).attach(trainer, "loss")

    @trainer.on(engine.Events.ITERATION_COMPLETED(every=REPORT))
    def report(trainer: Any) -> None:
        state = trainer.state
        print(f"epoch {state.epoch} step {state.iteration} loss {state.output[2]:.4f}")

    @trainer.on(engine.Events.EPOCH_COMPLETED)
    def report_epoch(trainer: Any) -> None:
        print(trainer.state.epoch, trainer.state.metrics)

    trainer.run(task.loader, max_epochs=sys.maxsize)


def evaluation_ignite(task: Task) -> Evaluate:
    engine: Any = importlib.import_module("ignite.engine")
    metrics: Any = importlib.import_module("ignite.metrics")
    wanted = {"acc": metrics.Accuracy(), "loss": metrics.Loss(nn.CrossEntropyLoss())}
    evaluator, loader = engine.create_supervised_evaluator(task.net, metrics=wanted), task.loader

    def evaluate() -> Result:
        logs = evaluator.run(loader).metrics
        return logs["loss"], logs["acc"]

    return evaluate


# ------------------------------------------------------------ Poutyne


def _poutyne_model(task: Task) -> Any:
    return importlib.import_module("poutyne").Model(
        task.net, task.optimizer(), nn.CrossEntropyLoss(), batch_metrics=["accuracy"]
    )


def fit_poutyne(task: Task) -> None:
    options: dict[str, Any] = {
        "batch_size": task.rows,
        "epochs": sys.maxsize,
        "verbose": False,
        "callbacks": [importlib.import_module("poutyne").CSVLogger("log.csv")],
        "dataloader_kwargs": {"shuffle": task.shuffle},
    }
    model = _poutyne_model(task)
    if task.form == "map":
        model.fit_dataset(task.dataset, **options)
    else:
        model.fit(*task.arrays, **options)


def evaluation_poutyne(task: Task) -> Evaluate:
    model = _poutyne_model(task)
    run, data = (model.evaluate_dataset, (task.dataset,)) if task.form == "map" else (model.evaluate, task.arrays)

    def evaluate() -> Result:
        loss, percent = run(*data, batch_size=task.rows, verbose=False)
        return float(loss), float(percent) / 100

    return evaluate


# ------------------------------------------------------------ skorch


def _skorch_net(task: Task) -> Any:
    skorch: Any = importlib.import_module("skorch")
    callbacks: Any = importlib.import_module("skorch.callbacks")

    def accuracy(net: Any, data: Any, labels: Any) -> float:
        return float((net.forward(data).argmax(1) == torch.as_tensor(labels)).float().mean())

    return skorch.NeuralNet(
        task.net,
        nn.CrossEntropyLoss,
        optimizer=getattr(torch.optim, task.kind),
        lr=RATES[task.kind],
        batch_size=task.rows,
        max_epochs=sys.maxsize,
        train_split=None,
        iterator_train__shuffle=task.shuffle,
        callbacks=[callbacks.EpochScoring(accuracy, name="acc", lower_is_better=False, on_train=True)],
    )


def fit_skorch(task: Task) -> None:
    net = _skorch_net(task)
    if task.form == "map":
        net.fit(task.dataset, y=None)
    else:
        net.fit(*task.arrays)


def evaluation_skorch(task: Task) -> Evaluate:
    net, data = _skorch_net(task).initialize(), task.dataset if task.form == "map" else task.arrays[0]

    def evaluate() -> Result:
        """It has no method that gives both: the outputs of all rows, and the rest by hand."""
        logits = net.forward(data)
        loss = nn.functional.cross_entropy(logits, task.labels)
        return loss.item(), (logits.argmax(1) == task.labels).float().mean().item()

    return evaluate


# ------------------------------------------------------------ Accelerate


def _accelerated(task: Task) -> Any:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    loader: DataLoader[Any] = task.loader
    return accelerator, *accelerator.prepare(task.net, task.optimizer(), loader)


def fit_accelerate(task: Task) -> None:
    accelerator, net, optimizer, loader = _accelerated(task)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in itertools.count():
        net.train()
        total, correct, seen, counted = 0.0, 0, 0, 0
        for step, (inputs, labels) in enumerate(loader, 1):
            optimizer.zero_grad()
            logits = net(inputs)
            loss = loss_fn(logits, labels)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.item() * len(labels)
            correct += (logits.argmax(1) == labels).sum().item()
            seen, counted = seen + len(labels), counted + labels.numel()
            if step % REPORT == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {total / seen:.4f} acc {correct / counted:.4f}")


def evaluation_accelerate(task: Task) -> Evaluate:
    accelerator, net, _, loader = _accelerated(task)
    loss_fn = nn.CrossEntropyLoss()

    def evaluate() -> Result:
        net.eval()
        total, correct = 0.0, 0
        with torch.no_grad():
            for inputs, labels in loader:
                logits, labels = accelerator.gather_for_metrics((net(inputs), labels))
                total += loss_fn(logits, labels).item() * len(labels)
                correct += (logits.argmax(1) == labels).sum().item()
        return total / len(task.labels), correct / task.labels.numel()

    return evaluate


PEERS: dict[str, tuple[Fit, Evaluation]] = {
    "keras": (fit_keras, evaluation_keras),
    "lightning": (fit_lightning, evaluation_lightning),
    "ignite": (fit_ignite, evaluation_ignite),
    "poutyne": (fit_poutyne, evaluation_poutyne),
    "skorch": (fit_skorch, evaluation_skorch),
    "accelerate": (fit_accelerate, evaluation_accelerate),
}
