"""A killed run goes on: which checkpoint, what is in it besides weights, and how it is put back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hapi.data.sampler import fold
from hapi.engine import checkpoint, rng
from hapi.engine.plain import plain
from hapi.engine.state import Run
from hapi.errors import add_note

__all__ = ["CallbacksPart", "FitPart", "find", "restore_rank"]


def find(resume: str, folder: Path | None) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to go on from, and its state; None to start anew.

    Args:
        resume: ``"auto"`` (the newest whole checkpoint in ``folder``), or a checkpoint's prefix.
        folder: ``save_dir`` of the fit.

    Raises:
        ValueError: ``"auto"`` without a folder, or a checkpoint that only holds weights.
        CheckpointError: The checkpoint named is damaged.
    """
    if resume != "auto":
        prefix = checkpoint.prefix_of(resume, where="fit: resume")
        wrong = checkpoint.damage(prefix)
        if wrong is not None:
            raise checkpoint.CheckpointError(f"fit: resume={resume!r}: {wrong}")
        return prefix, _state_of(prefix)
    if folder is None:
        raise ValueError("fit: resume='auto' needs save_dir, where the checkpoints are")
    if not folder.is_dir():
        return None
    checkpoint.clean(folder)
    refused: list[str] = []
    for prefix in checkpoint.newest_first(folder):
        wrong = checkpoint.damage(prefix)
        if wrong is None:
            if refused:
                warnings.warn(f"fit: resuming from {prefix}, since {'; '.join(refused)}", UserWarning, stacklevel=3)
            return prefix, _state_of(prefix)
        refused.append(wrong)
    if refused:
        warnings.warn(f"fit: starting anew, since {'; '.join(refused)}", UserWarning, stacklevel=3)
    return None


def _state_of(prefix: Path) -> dict[str, Any]:
    state = checkpoint.read_state(prefix)
    if state is None or "fit" not in state:
        raise ValueError(f"fit: {prefix} was not written by fit: it has no position to resume from. Use load()")
    return state


class FitPart:
    """What a fit is, as part of its checkpoints.

    Args:
        run: The run.
        shape: What must be the same for the position to mean the same: rows of the data, batches per step ...
    """

    def __init__(self, run: Run, shape: dict[str, Any]) -> None:
        self.run = run
        self.shape = shape

    def state_dict(self) -> dict[str, Any]:
        """The seed, the shape, the latest values, why it stopped, and weights that a callback keeps."""
        run = self.run
        return {
            "seed": run.config.seed,
            "shape": self.shape,
            "logs": {name: plain(value, f"log value {name!r}") for name, value in run.logs.items()},
            "rate": None if run.rate is None else float(run.rate),
            "stop": run.control.stop,
            "kept": run.kept,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the values back; refuse another data set or step in the middle of an epoch.

        Raises:
            ValueError: The position in the epoch means something else here.
        """
        run, saved = self.run, state_dict["shape"]
        changed = {k: (saved.get(k), v) for k, v in self.shape.items() if saved.get(k) != v}
        if run.progress.batch_in_epoch and changed:
            raise ValueError(
                "fit: cannot resume in the middle of an epoch with other "
                + ", ".join(f"{name} ({then} then, {now} now)" for name, (then, now) in changed.items())
            )
        run.logs = {k: v.numpy() if isinstance(v, Tensor) else v for k, v in state_dict["logs"].items()}
        run.rate, run.kept = state_dict.get("rate"), state_dict["kept"]
        if state_dict["stop"] is not None:
            run.control.request_stop(state_dict["stop"])


class CallbacksPart:
    """The states of a fit's callbacks, in order."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self.callbacks = callbacks

    def state_dict(self) -> dict[str, Any]:
        """Each callback's class and state."""
        entries = []
        for callback in self.callbacks:
            name = type(callback).__name__
            entries.append({"kind": name, "state": plain(callback.state_dict(), f"state of the callback {name}")})
        return {"callbacks": entries}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each callback the state of the n-th saved one of its class."""
        saved = list(state_dict["callbacks"])
        for callback in self.callbacks:
            kind = type(callback).__name__
            entry = next((entry for entry in saved if entry["kind"] == kind), None)
            if entry is not None:
                saved.remove(entry)
                try:
                    callback.load_state_dict(entry["state"])
                except Exception as exc:
                    add_note(exc, f"while restoring the callback {kind}")
                    raise


def restore_rank(run: Run, state: dict[str, Any]) -> None:
    """This rank's generators and meters; on another number of ranks, generators are seeded from (seed, step, rank)."""
    ranks, rank = state["ranks"], run.env.rank
    if len(ranks) == run.env.world:
        mine = ranks[rank]["rng"]
    else:
        torch.manual_seed(fold(run.config.seed, run.progress.global_step, rank))
        now = rng.capture()
        mine = {"now": now, "epoch": now}
    if run.progress.batch_in_epoch:
        run.resume_rng = mine
        run.meters.load_states([part["meters"] for part in ranks])
    else:
        rng.restore(mine["now"])
