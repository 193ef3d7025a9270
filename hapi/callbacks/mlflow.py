"""Curves for MLflow."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hapi.callbacks._service import _Service, reason, text_or_none, unreachable

__all__ = ["MLflow"]

_PARAMS_PER_CALL = 100  # MLflow takes no more


class MLflow(_Service):
    """Write curves to MLflow.

    Metrics have the tags of :class:`Logger` (a character that MLflow refuses becomes ``_``) at the global step, and
    the run's parameters are the hyper-parameters. The run begins with the first fit or evaluation and ends with it:
    FINISHED, FAILED after an error, KILLED after a signal. A later fit of the same model, and one that is resumed
    from a checkpoint, go on in it; MLflow cannot take back points, so those after that checkpoint are there twice.
    A run that is active is used and not ended.

    A server that does not answer turns the writer off, with a warning, after MLflow's own retries (set
    ``MLFLOW_HTTP_REQUEST_MAX_RETRIES`` for fewer).

    Args:
        tracking_uri: The server, or ``sqlite:///file.db``. Default: MLflow's.
        experiment: The experiment's name; made if it is new. Default: MLflow's.
        name: Of the run. Default: made up by MLflow.
        tags: Of the run, by name.
        log_freq: Batches between points. Default: ``fit``'s ``log_freq``.

    Raises:
        ImportError: mlflow is missing.
        TypeError, ValueError: An argument of the wrong type or value.

    Example:
        >>> model.fit(train, val, epochs=5, callbacks=hapi.callbacks.MLflow("http://127.0.0.1:5000", "mnist"))
    """

    live = ("_client",)

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        *,
        log_freq: int | None = None,
    ) -> None:
        try:
            import mlflow  # noqa: F401
        except ImportError as exc:
            raise ImportError(f"MLflow writes through mlflow ({exc}): pip install mlflow") from exc
        text_or_none("MLflow", tracking_uri=tracking_uri, experiment=experiment, name=name)
        if tags is not None and not isinstance(tags, Mapping):
            raise TypeError(f"MLflow: tags={tags!r}; accepted: a dict, or None")
        super().__init__(name, ".", log_freq=log_freq)
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self.tags = dict(tags or {})
        self._client: Any = None

    def open_run(self, folder: Path, step: int, resumed: bool) -> None:
        """Begin the run or go on with it."""
        import mlflow

        self._exception = None
        active = mlflow.active_run()
        self._owned = active is None
        try:
            run = self._begin(mlflow) if active is None else active
            self._client = mlflow.MlflowClient()
        except Exception as exc:
            if not unreachable(exc):
                raise
            self._off = True
            warnings.warn(f"MLflow: {reason(exc)}. Training goes on without MLflow.", RuntimeWarning)
        else:
            self.run_id = str(run.info.run_id)

    def write(self, values: dict[str, float], step: int) -> None:
        """Send a point, in one call."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_key(tag), value, now, step) for tag, value in values.items()]
        self._send(lambda: self._client.log_batch(self.run_id, metrics=metrics))

    def write_hparams(self, values: dict[str, int | float | str], metrics: list[str]) -> None:
        """Send the run's parameters, but for those that the user has set: MLflow lets nobody change them."""
        from mlflow.entities import Param

        def send() -> None:
            known = {} if self._owned else self._client.get_run(self.run_id).data.params
            params = [Param(_key(name), str(value)) for name, value in values.items() if _key(name) not in known]
            for first in range(0, len(params), _PARAMS_PER_CALL):
                self._client.log_batch(self.run_id, params=params[first : first + _PARAMS_PER_CALL])

        self._send(send)

    def close_run(self) -> None:
        """End the run, unless it is the user's."""
        import mlflow

        client, self._client = self._client, None
        if not self._owned or client is None:
            return
        status = "FINISHED"
        if self._exception is not None:
            # A signal comes as KeyboardInterrupt or SystemExit.
            status = "FAILED" if isinstance(self._exception, Exception) else "KILLED"
        active = mlflow.active_run()
        if active is not None and active.info.run_id == self.run_id:
            self._send(lambda: mlflow.end_run(status))
        else:  # the user has begun another on top of it
            self._send(lambda: client.set_terminated(self.run_id, status))

    def _begin(self, mlflow: Any) -> Any:
        if self.tracking_uri is not None:
            mlflow.set_tracking_uri(self.tracking_uri)
        if self.run_id is not None:
            return mlflow.start_run(run_id=self.run_id)
        experiment = None if self.experiment is None else mlflow.set_experiment(self.experiment).experiment_id
        return mlflow.start_run(experiment_id=experiment, run_name=self.name, tags=self.tags)


def _key(name: str) -> str:
    return re.sub(r"[^\w./ -]", "_", name)
