"""Curves for Weights & Biases."""

from __future__ import annotations

import inspect
import os
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hapi.callbacks._service import _Service, reason, text_or_none

__all__ = ["Wandb", "WandbCallback"]

_MODES = (None, "online", "offline", "disabled", "shared")
_STEP = "global_step"


class Wandb(_Service):
    """Write curves to Weights & Biases.

    Tags are those of :class:`Logger`, the x axis is ``global_step``, and the run's config holds the
    hyper-parameters. The run begins with the first fit or evaluation and is finished at its end; a later one of the
    same model, and a fit that is resumed from a checkpoint, go on in it. W&B cannot take back points, so those after
    that checkpoint are there twice. A ``wandb.run`` that exists is used and not finished.

    Without a network the run is kept on this machine, with a warning; ``wandb sync`` sends it later.

    Args:
        project: Of the run. Default: wandb's.
        entity: User or team. Default: wandb's.
        name: Of the run. Default: made up by wandb.
        dir: Where wandb's folder goes. Default: the current folder.
        mode: ``"online"``, ``"offline"``, ``"disabled"`` or ``"shared"``. Default: wandb's.
        job_type: For grouping runs.
        log_freq: Batches between points. Default: ``fit``'s ``log_freq``.
        **kwargs: Further arguments of ``wandb.init``: ``tags``, ``group``, ``notes``, ``config`` ...

    Raises:
        ImportError: wandb is missing.
        TypeError, ValueError: An argument of the wrong type or value, or one that ``wandb.init`` does not know.

    Example:
        >>> model.fit(train, val, epochs=5, callbacks=hapi.callbacks.Wandb("mnist", name="lr-0.1"))
    """

    live = ("_run",)

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        dir: str | os.PathLike[str] | None = None,  # wandb's name for it
        mode: str | None = None,
        job_type: str | None = None,
        *,
        log_freq: int | None = None,
        **kwargs: Any,
    ) -> None:
        try:
            import wandb
        except ImportError as exc:
            raise ImportError(f"Wandb writes through wandb ({exc}): pip install wandb") from exc
        text_or_none("Wandb", project=project, entity=entity, name=name, job_type=job_type)
        if mode not in _MODES:
            raise ValueError(f"Wandb: mode={mode!r}; accepted: {', '.join(map(repr, _MODES[1:]))}, or None")
        accepted = inspect.signature(wandb.init).parameters
        unknown = sorted(set(kwargs) - set(accepted))
        if unknown:
            raise TypeError(f"Wandb: {unknown[0]}={kwargs[unknown[0]]!r}; wandb.init accepts: {', '.join(accepted)}")
        config = kwargs.pop("config", None)
        if config is not None and not isinstance(config, Mapping):
            raise TypeError(f"Wandb: config={config!r}; accepted: a dict")
        super().__init__(name, "." if dir is None else dir, log_freq=log_freq, hparams=config)
        given = {"project": project, "entity": entity, "name": name, "dir": dir, "mode": mode, "job_type": job_type}
        self._options = {**{key: value for key, value in given.items() if value is not None}, **kwargs}
        self._run: Any = None

    def open_run(self, folder: Path, step: int, resumed: bool) -> None:
        """Begin the run or go on with it."""
        import wandb

        self._exception, self._owned = None, wandb.run is None
        self._run = self._begin(wandb) if self._owned else wandb.run
        self.run_id = str(self._run.id)
        for tags in ("train/*", "eval/*", "perf/*"):
            self._run.define_metric(tags, step_metric=_STEP)

    def write(self, values: dict[str, float], step: int) -> None:
        """Send a point."""
        self._send(lambda: self._run.log({**values, _STEP: step}))

    def write_hparams(self, values: dict[str, int | float | str], metrics: list[str]) -> None:
        """Put the hyper-parameters into the run's config."""
        self._send(lambda: self._run.config.update(values, allow_val_change=True))

    def close_run(self) -> None:
        """Finish the run, unless it is the user's."""
        run, self._run = self._run, None
        if self._owned and run is not None:
            self._send(lambda: run.finish(exit_code=0 if self._exception is None else 1))

    def _begin(self, wandb: Any) -> Any:
        identity = self.run_id or self._options.get("id") or uuid.uuid4().hex[:8]
        options = {"resume": "allow", **self._options, "id": identity}
        try:
            return wandb.init(**options)
        except wandb.errors.CommError as exc:
            warnings.warn(
                f"Wandb: {reason(exc)}. The run is kept in {self.log_dir}; `wandb sync` sends it later.", RuntimeWarning
            )
            return wandb.init(**{**options, "mode": "offline"})


WandbCallback = Wandb
"""The reference's name."""
