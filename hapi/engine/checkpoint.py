"""Files: weights in ``<prefix>.pt``, what training needs in ``<prefix>.state.pt``, a manifest in ``<prefix>.json``.

A checkpoint appears at once. All files are written under temporary names and flushed; renaming the manifest, which
carries sizes and hashes of the others, is the commit point, and the others follow. A crash before that leaves the old
checkpoint whole; a crash after it is finished by the next load or save, since the manifest says what belongs to it.

Nothing in a file is executed: they are read with ``weights_only=True``.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = [
    "CheckpointError",
    "OptimizerPart",
    "clean",
    "damage",
    "fit_optimizer",
    "load_network",
    "newest_first",
    "optimizer_state",
    "prefix_of",
    "read_state",
    "read_weights",
    "remove",
    "write",
]

FORMAT = 1
_OWN_SUFFIXES = (".state.pt", ".pt", ".json")


class CheckpointError(RuntimeError):
    """A checkpoint file that cannot be used; the message names it and says why."""


def prefix_of(path: str | os.PathLike[str], *, where: str) -> Path:
    """The prefix that ``path`` means: without hapi's own suffixes; other dots belong to the name.

    Raises:
        ValueError: The path is empty or ends with a separator.
    """
    text = os.fspath(path)
    if not text or text.endswith(("/", os.sep)):
        raise ValueError(f"{where}: path={text!r} names a folder; give a file prefix such as 'output/lenet'")
    for suffix in _OWN_SUFFIXES:
        if text.endswith(suffix) and len(os.path.basename(text)) > len(suffix):
            text = text[: -len(suffix)]
            break
    if os.path.basename(text) in (".", ".."):
        raise ValueError(f"{where}: path={os.fspath(path)!r} names a folder; give a file prefix")
    return Path(text)


def _weights_file(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".pt")


def _state_file(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".state.pt")


def _manifest_file(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def write(prefix: Path, weights: Mapping[str, Any], state: Mapping[str, Any] | None, *, step: int = 0) -> None:
    """Write a checkpoint; see the module's text for what a crash leaves.

    Args:
        prefix: Path without suffix; its folder is created.
        weights: The network's state dict.
        state: What training needs besides; None writes weights alone and removes an older state file.
        step: Optimizer steps done; the manifest says so, and :func:`newest_first` sorts by it.

    Raises:
        OSError: The disk is full, or the folder cannot be written. The previous checkpoint is whole.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    _finish(prefix)
    targets = {_weights_file(prefix): dict(weights)}
    if state is not None:
        targets[_state_file(prefix)] = {"format": FORMAT, **state}
    manifest_file = _manifest_file(prefix)
    everything = [_temporary(path) for path in (*targets, manifest_file)]
    try:
        manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": {}}
        for path, value in targets.items():
            temporary = _temporary(path)
            _save(value, temporary)
            manifest["files"][path.name] = {"size": temporary.stat().st_size, "sha256": _sha256(temporary)}
        _save(manifest, _temporary(manifest_file))
        os.replace(_temporary(manifest_file), manifest_file)  # the commit point
    except BaseException:
        for path in everything:
            path.unlink(missing_ok=True)
        raise
    for path in targets:
        os.replace(_temporary(path), path)
    if state is None:
        _state_file(prefix).unlink(missing_ok=True)
    _sync_folder(prefix.parent)


def _save(value: Any, path: Path) -> None:
    """One file, flushed: JSON for the manifest, torch's format for the rest."""
    try:
        with open(path, "wb") as file:
            if path.name.endswith(".json.tmp"):
                file.write(json.dumps(value, indent=1).encode())
            else:
                torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as exc:
        # torch's zip writer reports a short write as a RuntimeError without a reason.
        known = isinstance(exc, OSError) and exc.errno is not None
        reason = exc.strerror if known else str(exc).splitlines()[0]  # type: ignore[union-attr]
        raise OSError(
            getattr(exc, "errno", None) or 0,
            f"cannot write {path}: {reason} (is the disk full?); the previous checkpoint, if any, is whole",
        ) from exc


def _sync_folder(folder: Path) -> None:
    """Make renames durable. Not every platform can open a folder."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _manifest(prefix: Path) -> dict[str, Any] | None:
    """The manifest; None where there is none (a bare weights file).

    Raises:
        CheckpointError: It is damaged, or from a newer hapi.
    """
    path = _manifest_file(prefix)
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_bytes())
        version, files = int(manifest["format"]), dict(manifest["files"])
        whole = all(isinstance(entry["size"], int) and isinstance(entry["sha256"], str) for entry in files.values())
        step = int(manifest["step"])
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"{path} is damaged: not a manifest of hapi") from exc
    if version > FORMAT:
        raise CheckpointError(f"{path} has format {version}; this hapi reads up to {FORMAT}. Use a newer hapi")
    if not whole:
        raise CheckpointError(f"{path} is damaged: not a manifest of hapi")
    return {"format": version, "files": files, "step": step}


def _mismatch(path: Path, entry: Mapping[str, Any]) -> str | None:
    """How a file differs from its entry in the manifest; None if it does not."""
    if not path.is_file():
        return "it is missing"
    size = path.stat().st_size
    if size != entry["size"]:
        return f"it has {size} bytes instead of {entry['size']}"
    return None if _sha256(path) == entry["sha256"] else "its content does not match its checksum"


def _finish(prefix: Path) -> None:
    """After a crash between the renames of a committed checkpoint: rename what is still waiting."""
    waiting = [path for path in (_weights_file(prefix), _state_file(prefix)) if _temporary(path).is_file()]
    if not waiting:
        return
    try:
        manifest = _manifest(prefix)
    except CheckpointError:
        return
    for path in waiting:
        entry = manifest["files"].get(path.name) if manifest else None
        if entry is not None and _mismatch(_temporary(path), entry) is None:
            os.replace(_temporary(path), path)


def damage(prefix: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None if it is whole. Reads every byte once."""
    _finish(prefix)
    try:
        manifest = _manifest(prefix)
    except CheckpointError as exc:
        return str(exc)
    if manifest is None:
        return f"{_manifest_file(prefix)} is missing"
    for name, entry in manifest["files"].items():
        wrong = _mismatch(prefix.with_name(name), entry)
        if wrong is not None:
            return f"{prefix.with_name(name)} is damaged: {wrong}"
    return None


def newest_first(folder: Path) -> list[Path]:
    """The prefixes of all checkpoints in a folder that have a manifest, the latest step first."""
    found: list[tuple[int, float, Path]] = []
    for path in folder.glob("*.json"):
        prefix = path.with_suffix("")
        try:
            manifest = _manifest(prefix)
        except CheckpointError:
            # Somebody's own JSON, or a damaged manifest? The second is kept: whoever looks should hear of it.
            if _weights_file(prefix).exists() or _state_file(prefix).exists():
                found.append((1 << 62, path.stat().st_mtime, prefix))
            continue
        if manifest is not None and f"{prefix.name}.state.pt" in manifest["files"]:
            found.append((manifest["step"], path.stat().st_mtime, prefix))
    return [prefix for *_, prefix in sorted(found, key=lambda entry: entry[:2], reverse=True)]


def clean(folder: Path) -> None:
    """Finish what a crash left half-renamed in a folder, and delete other temporary files of checkpoints."""
    for path in folder.glob(".*.tmp"):
        name = path.name.removeprefix(".").removesuffix(".tmp")
        if name.endswith(_OWN_SUFFIXES):
            _finish(prefix_of(folder / name, where="clean"))
            path.unlink(missing_ok=True)


def remove(prefix: Path) -> None:
    """Delete a checkpoint's files, the manifest first: without it there is no checkpoint."""
    for path in (_manifest_file(prefix), _state_file(prefix), _weights_file(prefix)):
        path.unlink(missing_ok=True)


def read_weights(prefix: Path, given: Path | None = None, *, verify: bool = True) -> dict[str, Any]:
    """The weights at ``prefix``: tensors by name.

    Args:
        prefix: Path without suffix.
        given: The path as the user gave it: a file that exists as it is wins (a plain state dict saved by torch
            under any name).
        verify: Compare with the manifest, where there is one.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointError: The file is damaged, or holds something else.
    """
    _finish(prefix)
    path = _weights_file(prefix)
    if given is not None and not path.is_file() and given.is_file():
        path = given
    if not path.is_file():
        folder = prefix if prefix.is_dir() else prefix.parent
        near = [p.name for p in sorted(folder.glob("*.pt")) if not p.name.startswith(".")]
        near = [name for name in near if not name.endswith(".state.pt")][:8]
        have = f"; the folder {folder} has {near}" if near else ""
        raise FileNotFoundError(f"load: no weights at {path}{have}")
    manifest = _manifest(prefix) if verify and path == _weights_file(prefix) else None
    if manifest is not None:
        _verify(path, manifest)
    weights = _read(path)
    if not all(isinstance(key, str) for key in weights):
        raise CheckpointError(f"{path} does not hold a state dict (its keys are not names)")
    return weights


def _verify(path: Path, manifest: Mapping[str, Any]) -> None:
    entry = manifest["files"].get(path.name)
    wrong = "its manifest does not know it" if entry is None else _mismatch(path, entry)
    if wrong is not None:
        raise CheckpointError(
            f"{path} is damaged or was replaced: {wrong} ({_manifest_file(prefix_of(path, where='load')).name}). "
            "To take it as plain weights, load it with reset_optimizer=True"
        )


def read_state(prefix: Path) -> dict[str, Any] | None:
    """The training state beside the weights; None where there is none.

    Raises:
        CheckpointError: The file is damaged, or from a newer hapi.
    """
    manifest = _manifest(prefix)
    path = _state_file(prefix)
    if manifest is None or path.name not in manifest["files"]:
        return None
    _verify(path, manifest)
    state = _read(path)
    if not isinstance(state.get("format"), int):
        raise CheckpointError(f"{path} is not a training state of hapi (it has no format number)")
    if state["format"] > FORMAT:
        raise CheckpointError(f"{path} has format {state['format']}; this hapi reads up to {FORMAT}. Use a newer hapi")
    return state


def _read(path: Path) -> dict[str, Any]:
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is damaged: it is empty")
    if not zipfile.is_zipfile(path):
        # torch has written zip archives since 1.6; what is none is cut off, foreign, or a bare pickle.
        raise CheckpointError(f"{path} is damaged or no torch file; nothing of it was executed")
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as exc:  # whatever a damaged archive makes torch's readers raise
        reason = "nothing of it was executed" if isinstance(exc, pickle.UnpicklingError) else str(exc).splitlines()[0]
        forbidden = re.search(r"GLOBAL ([\w.]+)", str(exc))
        what = f"; it asks for {forbidden.group(1)!r}" if forbidden else ""
        raise CheckpointError(f"{path} is damaged or unsafe: {reason}{what}") from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a state dict, but {type(value).__name__}")
    return value


def load_network(
    network: nn.Module, weights: Mapping[str, Any], *, skip_mismatch: bool, source: str
) -> tuple[list[str], list[str], list[str]]:
    """Copy weights into the network.

    Args:
        network: What to fill.
        weights: Tensors by name.
        skip_mismatch: Leave out what is missing or has another shape, instead of raising.
        source: The file, for messages.

    Returns:
        Missing, mismatched and unexpected names.

    Raises:
        ValueError: A name is missing or has another shape (without ``skip_mismatch``). Nothing has been changed.
    """
    own = network.state_dict()
    missing = [name for name in own if name not in weights]
    unexpected = [name for name in weights if name not in own]
    mismatched = [
        name
        for name, value in own.items()
        if name in weights and isinstance(value, torch.Tensor) and _shape(weights[name]) != tuple(value.shape)
    ]
    if (missing or mismatched) and not skip_mismatch:
        shapes = [f"{n}: file {_shape(weights[n])}, network {tuple(own[n].shape)}" for n in mismatched]
        parts = [
            f"{what}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
            for what, names in (("missing", missing), ("other shape", shapes), ("unexpected", unexpected))
            if names
        ]
        raise ValueError(f"load: {source} does not fit {type(network).__name__}. " + "; ".join(parts))
    chosen = {name: weights[name] for name in own if name in weights and name not in mismatched}
    network.load_state_dict(chosen, strict=False)
    return missing, mismatched, unexpected


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


class OptimizerPart:
    """An optimizer as part of a checkpoint: its state by parameter name.

    Args:
        optimizer: The optimizer.
        names: Of the network's parameters.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> None:
        self.optimizer = optimizer
        self.names = names

    def state_dict(self) -> dict[str, Any]:
        """See :func:`optimizer_state`."""
        return optimizer_state(self.optimizer, self.names)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """By name; raises ValueError where it does not fit."""
        self.optimizer.load_state_dict(self.fitted(state_dict))

    def fitted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """See :func:`fit_optimizer`."""
        return fit_optimizer(self.optimizer, state_dict, self.names)


def optimizer_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """An optimizer's state keyed by the parameters' names in the network, not by their position.

    Args:
        optimizer: Any torch optimizer.
        names: The network's parameters.
    """
    packed = optimizer.state_dict()
    own = _names_in_order(optimizer, names)
    return {
        "kind": type(optimizer).__name__,
        "state": {own[index]: value for index, value in packed["state"].items()},
        "groups": [{**group, "params": [own[index] for index in group["params"]]} for group in packed["param_groups"]],
    }


_HOW = ("foreach", "fused", "capturable", "differentiable")


def fit_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """:func:`optimizer_state` as this optimizer's ``load_state_dict`` takes it. Changes nothing.

    Raises:
        ValueError: The file is of another kind of optimizer, or its parameters are not this one's.
    """
    alone = "Load the weights alone with load(path, reset_optimizer=True)"
    if saved["kind"] != type(optimizer).__name__:
        raise ValueError(
            f"load: the file holds the state of {saved['kind']}, the model has {type(optimizer).__name__}. {alone}"
        )
    own = _names_in_order(optimizer, names)
    index_of = {name: index for index, name in enumerate(own)}
    unknown = sorted({name for group in saved["groups"] for name in group["params"]} ^ set(own))
    if unknown or len(saved["groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"load: the optimizer in the file has other parameters: {unknown[:8] or 'grouped differently'}. {alone}"
        )
    # torch matches groups by position; take each group's own order, so that a reordered net still fits.
    groups = []
    current = optimizer.state_dict()["param_groups"]
    for group, mine in zip(saved["groups"], current, strict=True):
        if {index_of[name] for name in group["params"]} != set(mine["params"]):
            raise ValueError(f"load: the optimizer in the file groups its parameters differently. {alone}")
        # How it computes is the optimizer's own choice, not the file's.
        kept = {option: mine[option] for option in _HOW if option in mine}
        groups.append({**group, **kept, "params": mine["params"]})
    state = {index_of[name]: value for name, value in saved["state"].items()}
    return {"state": state, "param_groups": groups}


def _names_in_order(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[str]:
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(parameter, f"#{index}") for index, parameter in enumerate(ordered)]
