"""What writers to a tracking service share: the service keeps runs itself, and may be out of reach."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hapi.callbacks.logger import Logger

__all__ = ["reason", "text_or_none", "unreachable"]


class _Service(Logger):
    """Base class of writers to a tracking service.

    A run is known by the service's id, which checkpoints keep. A run that is active already is written to and left
    open: it is the user's.

    Args:
        name: Of the run; None leaves it to the service.
        folder: Where the service's own files go.
        log_freq: Batches between points. Default: ``fit``'s ``log_freq``.
        hparams: Hyper-parameters besides those of the fit.
    """

    run_id: str | None = None

    def __init__(
        self,
        name: str | None,
        folder: str | os.PathLike[str],
        *,
        log_freq: int | None = None,
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(folder, log_freq=log_freq, hparams=dict(hparams or {}))
        self.name = name  # any text, not a folder's name
        self._owned = False  # whether this callback opened the run, and so closes it
        self._exception: BaseException | None = None

    def on_exception(self, exception: BaseException) -> None:
        """Note how the run ends."""
        self._exception = exception

    def state_dict(self) -> dict[str, Any]:
        """The logger's state and the run's id."""
        return {**super().state_dict(), "run_id": self.run_id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the run that is resumed."""
        super().load_state_dict(state_dict)
        self.folder = None if state_dict["folder"] is None else self.log_dir
        self.run_id = state_dict["run_id"]

    def __getstate__(self) -> dict[str, Any]:
        """Without the error, which holds the frames that it went through."""
        return {**super().__getstate__(), "_exception": None}

    def _begin_run(self) -> None:
        super()._begin_run()
        self.run_id = None

    def _new_folder(self) -> Path:
        return self.log_dir

    def _send(self, action: Callable[[], object]) -> None:
        """Do something that the service may fail at for many reasons: all of them only end the writing."""
        try:
            action()
        except OSError:
            raise
        except Exception as exc:
            raise OSError(reason(exc)) from exc


def text_or_none(owner: str, **values: Any) -> None:
    """Raise TypeError if one is neither a text nor None."""
    for name, value in values.items():
        if value is not None and (not isinstance(value, str) or not value):
            raise TypeError(f"{owner}: {name}={value!r}; accepted: a text, or None")


def unreachable(exc: BaseException) -> bool:
    """Whether an error comes of the network or the disk, and not of what was asked for."""
    return any(isinstance(link, OSError) for link in _chain(exc))


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__


def reason(exc: BaseException) -> str:
    """An error on one line."""
    return " ".join(f"{type(exc).__name__}: {exc}".split())[:300]
