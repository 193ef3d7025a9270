"""A callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hapi.callbacks.base import Callback
from hapi.errors import suggest

__all__ = ["LambdaCallback"]

_HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class LambdaCallback(Callback):
    """Call a function at a hook.

    Args:
        **hooks: Hook name -> function, which gets the hook's arguments by position: ``(logs)`` for the begin
            and end of a phase, ``(epoch, logs)``, ``(step, logs)``, ``(path, logs)`` for ``on_save`` and
            ``(exception)`` for ``on_exception``. See :class:`hapi.callbacks.Callback` for the names.

    Raises:
        TypeError: An unknown hook, or a value that cannot be called.

    Example:
        >>> LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs["loss"]))
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        for name, function in hooks.items():
            if name not in _HOOKS:
                raise TypeError(
                    f"LambdaCallback: unknown hook {name!r}{suggest(name, _HOOKS)}; accepted: {', '.join(_HOOKS)}"
                )
            if not callable(function):
                raise TypeError(f"LambdaCallback: {name}={function!r} cannot be called")
            # On the instance: hooks that were not given stay the base's, which the engine does not call.
            setattr(self, name, function)
