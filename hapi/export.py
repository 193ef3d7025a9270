"""``save(path, training=False)``: a program for inference."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["export_onnx", "export_program"]


def export_program(network: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], path: Path) -> None:
    """Write ``torch.export``'s program of the network in evaluation mode, with a dynamic batch dimension.

    Args:
        network: What to export; its modes are put back.
        args: Example positional inputs, the batch first.
        kwargs: Example keyword inputs.
        path: The file, ``.pt2``.
    """
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        program = _program(network, args, kwargs)
    finally:
        for module, training in modes:
            module.training = training
    _atomically(path, lambda temporary: torch.export.save(program, temporary))


def _program(network: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Any:
    # A batch of one would be taken for a constant.
    args = tuple(_at_least_two(value) for value in args)
    kwargs = {name: _at_least_two(value) for name, value in kwargs.items()}
    batch = torch.export.Dim("batch", min=1)
    shapes = ([{0: batch} for _ in args], {name: {0: batch} for name in kwargs})
    dynamic: Any = tuple(shapes[0]) if not kwargs else _by_parameter(network, shapes)
    with torch.no_grad():
        return torch.export.export(network, args, kwargs or None, dynamic_shapes=dynamic)


def _by_parameter(network: nn.Module, shapes: tuple[Sequence[Any], dict[str, Any]]) -> dict[str, Any]:
    names = list(inspect.signature(network.forward).parameters)
    return {**dict(zip(names, shapes[0], strict=False)), **shapes[1]}


def _at_least_two(value: Tensor) -> Tensor:
    return torch.cat([value, value]) if value.shape[0] == 1 else value


def export_onnx(network: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], path: Path) -> None:
    """Write an ONNX file with a dynamic batch dimension; needs the packages of ``hapi[onnx]``.

    Raises:
        ImportError: onnx or onnxscript is missing; the message says what to install.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as exc:
        raise ImportError(f"ONNX export needs {exc.name}: pip install 'hapi[onnx]'") from exc
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        program = _program(network, args, kwargs)
        # The exporter talks of its own deprecations and of packages that it does not need.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            made = torch.onnx.export(program, dynamo=True, verbose=False)
    finally:
        for module, training in modes:
            module.training = training
    assert made is not None
    _atomically(path, lambda temporary: made.save(temporary))


def _atomically(path: Path, write: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp.{path.name}")
    try:
        write(str(temporary))
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
