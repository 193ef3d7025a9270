"""What boards show besides curves: histograms, sample predictions, the confusion matrix, texts, the network's graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hapi.callbacks.checks import flag, whole
from hapi.callbacks.logger import Logger
from hapi.engine.state import Logs

__all__ = ["BoardLogger", "bucket_edges", "utf8"]

_BUCKETS = 64
_MOST_VALUES = 1_000_000  # of a tensor, for its histogram


class BoardLogger(Logger):
    """Base class of :class:`VisualDL` and :class:`TensorBoard`: the curves of a :class:`Logger`, and more if asked.

    Args:
        log_dir: The folder of all runs, which the board is given.
        name: Of the run. Default: the time at its start.
        log_freq: Batches between points. Default: ``fit``'s ``log_freq``.
        hparams: Write the hyper-parameters; a dict adds to them.
        grad_norm: Write ``train/grad_norm``: the gradients' norm before clipping, of the first step after each point.
        weight_histograms: Write ``weights/<parameter>`` after each epoch.
        grad_histograms: Write ``gradients/<parameter>`` of each epoch's first step.
        images: So many samples of each evaluation's first batch, with prediction and label, as one picture
            ``eval/predictions``. The inputs must be images ``[N, C, H, W]`` or ``[N, H, W]``.
        confusion_matrix: Draw ``eval/<metric>`` of each :class:`hapi.metrics.ConfusionMatrix` that was prepared.
        classes: The names of the classes, for pictures.
        text: Texts by tag, written once per run.

    Raises:
        ImportError: A package that draws what was asked for is missing.
        TypeError, ValueError: An argument of the wrong type or value.

    Example:
        >>> class Pictures(BoardLogger):
        ...     def write_image(self, tag, image, step):
        ...         print(tag, image.shape, step)
        >>> model.fit(train, val, callbacks=Pictures("log", images=8))
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        name: str | None = None,
        *,
        log_freq: int | None = None,
        hparams: bool | Mapping[str, Any] = False,
        grad_norm: bool = False,
        weight_histograms: bool = False,
        grad_histograms: bool = False,
        images: int = 0,
        confusion_matrix: bool = False,
        classes: Sequence[str] | None = None,
        text: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(log_dir, name, log_freq=log_freq, hparams=hparams)
        owner = type(self).__name__
        self.grad_norm = flag(owner, "grad_norm", grad_norm)
        self.weight_histograms = flag(owner, "weight_histograms", weight_histograms)
        self.grad_histograms = flag(owner, "grad_histograms", grad_histograms)
        self.images = whole(owner, "images", images, 0)
        self.confusion_matrix = flag(owner, "confusion_matrix", confusion_matrix)
        if classes is not None and (isinstance(classes, str) or not all(isinstance(c, str) for c in classes)):
            raise TypeError(f"{owner}: classes={classes!r}; accepted: a list of names")
        self.classes = None if classes is None else list(classes)
        if text is not None and not (isinstance(text, Mapping) and all(isinstance(t, str) for t in text.values())):
            raise TypeError(f"{owner}: text={text!r}; accepted: a dict of texts by tag")
        self.text = dict(text or {})
        self._told_text = False
        self._norm: Tensor | None = None
        self._need_packages()
        # Hooks that cost something are there only if they have something to do.
        if self.grad_norm or self.grad_histograms:
            self.on_before_optimizer_step = self._look_at_gradients  # type: ignore[method-assign]
        if self.images:
            self.on_eval_batch_end = self._look_at_outputs  # type: ignore[method-assign]

    # ---------------------------------------------------------------- for subclasses

    def _need_packages(self) -> None:
        """Called by the constructor, once the arguments are checked; raises ImportError for what is missing."""
        if self.images or self.confusion_matrix:
            _drawing(type(self).__name__)

    def write_histogram(self, tag: str, values: np.ndarray[Any, Any], step: int) -> None:
        """Write the distribution of ``values``: 1-d floats, finite, at least one."""

    def write_image(self, tag: str, image: np.ndarray[Any, Any], step: int) -> None:
        """Write a picture: uint8 ``[H, W, 3]``."""

    def write_text(self, tag: str, text: str, step: int) -> None:
        """Write a text."""

    # --------------------------------------------------------------------- the hooks

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Open the run; write its texts."""
        if self.confusion_matrix and not any(_is_matrix(m) for m in self.run.meters.metrics):
            raise ValueError(
                f"{type(self).__name__}: confusion_matrix=True draws hapi.metrics.ConfusionMatrix; add one to "
                "prepare(metrics=...)"
            )
        super().on_train_begin(logs)
        self._norm = None
        self._histograms_due = self.grad_histograms
        if not self._told_text:
            self._told_text = True
            for tag, text in self.text.items():
                self._guard(partial(self.write_text, tag, text, self.run.progress.global_step))

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """The epoch's first step is looked at closely."""
        super().on_epoch_begin(epoch, logs)
        self._histograms_due = self.grad_histograms

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write the weights' histograms."""
        super().on_epoch_end(epoch, logs)
        if self.weight_histograms:
            self._histograms("weights", self.run.network.named_parameters(), self.run.progress.global_step)

    def on_eval_end(self, logs: Logs | None = None) -> None:
        """Draw what is a matrix."""
        if logs and self.confusion_matrix:
            for name, value in logs.items():
                if isinstance(value, np.ndarray) and value.ndim == 2:
                    picture = _draw_matrix(value, self._class_names(len(value)))
                    self._picture(f"eval/{name}", picture)
        super().on_eval_end(logs)

    def more_values(self) -> dict[str, float]:
        """The gradients' norm."""
        norm, self._norm = self._norm, None
        return {} if norm is None else {"train/grad_norm": float(norm)}

    def state_dict(self) -> dict[str, Any]:
        """The logger's state, and whether texts were written."""
        return {**super().state_dict(), "told_text": self._told_text, "norm": self._norm}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the run that is resumed."""
        super().load_state_dict(state_dict)
        self._told_text, self._norm = state_dict["told_text"], state_dict["norm"]

    # -------------------------------------------------------------------------- inside

    def _begin_run(self) -> None:
        super()._begin_run()
        self._told_text = False

    def _look_at_gradients(self, step: int, logs: Logs | None = None) -> None:
        if self.grad_norm and self._norm is None:
            gradients = [_dense(gradient) for _, gradient in self.run.gradients()]
            # Stays on the device until the next point.
            self._norm = torch.nn.utils.get_total_norm(gradients) if gradients else None
        if self._histograms_due:
            self._histograms_due = False
            self._histograms("gradients", self.run.gradients(), self.run.progress.global_step + 1)

    def _look_at_outputs(self, step: int, logs: Logs | None = None) -> None:
        if step == 0 and self.run.evaluated is not None:
            batch, outputs = self.run.evaluated
            picture = _draw_samples(batch, outputs, self.images, self._class_names)
            if picture is None:
                raise ValueError(
                    f"{type(self).__name__}: images={self.images} needs one input of images [N, C, H, W] with 1 or 3 "
                    "channels, or [N, H, W]"
                )
            self._picture("eval/predictions", picture)

    def _histograms(self, group: str, tensors: Any, step: int) -> None:
        for name, tensor in tensors:
            values = _dense(tensor.detach()).reshape(-1)
            stride = -(-values.numel() // _MOST_VALUES) or 1
            array = values[::stride].double().cpu().numpy()
            array = array[np.isfinite(array)]
            if len(array):
                self._guard(partial(self.write_histogram, f"{group}/{name}", array, step))

    def _picture(self, tag: str, picture: np.ndarray[Any, Any]) -> None:
        self._guard(lambda: self.write_image(tag, picture, self.run.progress.global_step))

    def _class_names(self, count: int) -> list[str]:
        names = (self.classes or [])[:count]
        return names + [str(i) for i in range(len(names), count)]


def _dense(tensor: Tensor) -> Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _is_matrix(routed: Any) -> bool:
    return type(routed.metric).__name__ == "ConfusionMatrix"


def _drawing(owner: str) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise ImportError(
            f"{owner}: images and confusion_matrix are drawn by matplotlib: pip install matplotlib"
        ) from exc


def _to_picture(figure: Any) -> np.ndarray[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    pixels: np.ndarray[Any, Any] = np.asarray(canvas.buffer_rgba())
    return np.array(pixels[..., :3])


def _draw_matrix(matrix: np.ndarray[Any, Any], names: Sequence[str]) -> np.ndarray[Any, Any]:
    """Rows are labels, columns predictions; colours are shares of a row."""
    from matplotlib.figure import Figure

    size = len(matrix)
    side = min(max(3.5, 0.5 * size + 1.5), 14.0)
    figure = Figure(figsize=(side, side), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xlabel("prediction")
    axes.set_ylabel("label")
    if size <= 40:
        axes.set_xticks(range(size), names, rotation=45 if max(map(len, names)) > 3 else 0)
        axes.set_yticks(range(size), names)
    if size <= 20:
        for (row, column), count in np.ndenumerate(matrix):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(
                column, row, f"{count:.3g}" if count % 1 else f"{int(count)}", ha="center", va="center", color=colour
            )
    return _to_picture(figure)


def _draw_samples(
    batch: Any, outputs: Any, count: int, names: Callable[[int], list[str]]
) -> np.ndarray[Any, Any] | None:
    """A grid of inputs, each with what the network says and what is right; None where the input is no image."""
    from matplotlib.figure import Figure

    inputs = [*batch.args, *batch.kwargs.values()][0]
    if inputs.ndim not in (3, 4) or (inputs.ndim == 4 and inputs.shape[1] not in (1, 3)):
        return None
    pixels = inputs[:count].detach().float().cpu().numpy()
    pixels = pixels.transpose(0, 2, 3, 1) if pixels.ndim == 4 else pixels
    labels = batch.labels.values() if isinstance(batch.labels, Mapping) else batch.labels
    truths = _words(next(iter(labels), None), count, names)
    first = next(iter(outputs.values())) if isinstance(outputs, Mapping) else outputs
    first = first[0] if isinstance(first, (tuple, list)) else first
    guesses = _words(first, count, names)
    columns = min(len(pixels), 8)
    rows = -(-len(pixels) // columns)
    figure = Figure(figsize=(1.4 * columns, 1.7 * rows), dpi=100, layout="constrained")
    for index, image in enumerate(pixels):
        axes = figure.add_subplot(rows, columns, index + 1)
        low, high = float(image.min()), float(image.max())
        axes.imshow((image - low) / (high - low or 1.0), cmap="gray")
        axes.set_axis_off()
        guess, truth = guesses[index], truths[index]
        wrong = truth is not None and guess != truth
        caption = guess or truth or ""
        axes.set_title(
            f"{caption}, not {truth}" if wrong and guess else caption, fontsize=9, color="#b00000" if wrong else "black"
        )
    return _to_picture(figure)


def _words(values: Any, count: int, names: Callable[[int], list[str]]) -> list[str | None]:
    """What scores ``[N, C]``, class indices or numbers say, for people."""
    if not isinstance(values, Tensor):
        return [None] * count
    values = values[:count].detach().cpu()
    if values.is_floating_point() and values.ndim == 2 and values.shape[1] > 1:
        known = names(values.shape[1])
        return [known[i] for i in values.argmax(1).tolist()]
    flat = values.reshape(len(values), -1)[:, 0].tolist() if values.ndim else []
    if values.is_floating_point():
        return [f"{value:.3g}" for value in flat]
    known = names(max([0, *flat]) + 1)
    return [known[int(value)] if value >= 0 else str(value) for value in flat]


def bucket_edges(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Equal buckets over the values. numpy's own choice fails where they are nearly equal, or of any size."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        margin = max(0.5, abs(low) / 1000)
        low, high = low - margin, high + margin
    return 2 * np.linspace(low / 2, high / 2, _BUCKETS + 1)


def utf8(text: str) -> str:
    """Without what protobuf refuses: halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode("utf-8")
