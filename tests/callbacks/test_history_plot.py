from __future__ import annotations

import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hapi.callbacks import History

pytest.importorskip("matplotlib")


def history(epochs: int = 4) -> History:
    found = History()
    for epoch in range(epochs):
        logs: dict[str, Any] = {"loss": 1 / (epoch + 1), "acc": 0.5, "lr": 0.1, "matrix": np.zeros((2, 2))}
        if (epoch + 1) % 2 == 0:
            logs |= {"eval_loss": 2 / (epoch + 1), "eval_acc": 0.4, "eval_iou": 0.3}
        found.on_epoch_end(epoch, logs)
    return found


def lines(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def test_one_axes_per_value_with_training_and_evaluation() -> None:
    figure = history().plot()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["loss", "acc", "eval_iou"]
    assert lines(figure.axes[0]) == {
        "training": ([1, 2, 3, 4], [1, 1 / 2, 1 / 3, 1 / 4]),
        "evaluation": ([2, 4], [1.0, 0.5]),  # at their own epochs
    }
    assert [axes.get_legend() is not None for axes in figure.axes] == [True, True, False]
    assert {axes.get_xlabel() for axes in figure.axes} == {"epoch"}
    for axes in figure.axes:
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert ticks and all(tick == int(tick) >= 1 for tick in ticks)


def test_only_the_fits_own_values_by_default() -> None:
    found = history()
    found.set_params({"metrics": ["loss", "iou"]})
    assert [axes.get_title(loc="left") for axes in found.plot().axes] == ["loss", "eval_iou"]
    assert len(found.plot("acc").axes) == 1


def test_chosen_names() -> None:
    figure = history().plot("lr", "eval_acc")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["lr", "eval_acc"]
    assert list(lines(figure.axes[1])) == ["evaluation"]
    assert set(lines(history().plot("eval_acc", "acc").axes[0])) == {"training", "evaluation"}


def test_saves_by_suffix(tmp_path: Path) -> None:
    history().plot("loss", path=tmp_path / "new" / "curves.png")
    history().plot("loss", path=str(tmp_path / "curves.svg"))
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "curves.svg").read_text()


def test_a_notebook_shows_the_figure_and_nothing_global_is_left() -> None:
    figure: Any = history().plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
    assert pickle.loads(pickle.dumps(figure))._repr_png_().startswith(b"\x89PNG")


def test_one_epoch_shows_marks() -> None:
    figure = history(1).plot("loss")
    (axes,) = figure.axes
    assert axes.get_xlim() == (0.5, 1.5)
    assert axes.lines[0].get_marker() not in ("None", "", None)


def test_gaps_and_infinite_values(tmp_path: Path) -> None:
    found = History()
    for epoch, value in enumerate([1.0, math.nan, 2.0, math.inf, -math.inf, 3.0]):
        found.on_epoch_end(epoch, {"loss": value})
    figure = found.plot(path=tmp_path / "curves.png")
    drawn = lines(figure.axes[0])["training"][1]
    assert [math.isfinite(value) for value in drawn] == [True, False, True, False, False, True]
    assert figure.axes[0].get_ylim()[1] < 4


def test_nothing_but_gaps(tmp_path: Path) -> None:
    found = History()
    found.on_epoch_end(0, {"loss": math.nan})
    assert len(found.plot(path=tmp_path / "curves.png").axes) == 1


@pytest.mark.parametrize(("values", "shape"), [(1, (1, 1)), (3, (1, 3)), (4, (2, 2)), (7, (3, 3))])
def test_grid(values: int, shape: tuple[int, int]) -> None:
    found = History()
    found.on_epoch_end(0, {f"m{index}": 1.0 for index in range(values)})
    grid = found.plot().axes[0].get_gridspec()
    assert grid is not None
    assert (grid.nrows, grid.ncols) == shape


def test_only_the_learning_rate() -> None:
    found = History()
    found.on_epoch_end(0, {"lr": 0.1})
    assert len(found.plot().axes) == 1


def test_unknown_names_and_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match=r"unknown name 'los'; did you mean 'loss'\?; accepted: loss, acc, lr, iou, "):
        history().plot("los")
    with pytest.raises(ValueError, match="unknown name 'matrix'"):
        history().plot("matrix")
    with pytest.raises(ValueError, match="there is nothing to draw: no epoch has ended"):
        History().plot()


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"History.plot needs matplotlib: pip install matplotlib"):
        history().plot()
