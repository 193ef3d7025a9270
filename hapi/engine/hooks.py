"""Callbacks -> tuples of bound methods per hook, rank-filtered, built once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hapi.errors import add_note

__all__ = ["HOOKS", "Hooks"]

HOOKS = (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_before_optimizer_step",
    "on_eval_begin",
    "on_eval_end",
    "on_eval_batch_begin",
    "on_eval_batch_end",
    "on_predict_begin",
    "on_predict_end",
    "on_predict_batch_begin",
    "on_predict_batch_end",
    "on_save",
    "on_exception",
)

Hook = Callable[..., None]


class Hooks:
    """The hooks of a set of callbacks.

    A hook that a callback does not override costs nothing: it is not in the tuple.

    Args:
        callbacks: In the order in which they are called.
        base: The class whose methods count as not overridden.
        rank: Of this process; other ranks than 0 call only callbacks with ``all_ranks``.
        guard: On several ranks: what to put around a hook, given whether only rank 0 calls it.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        base: type,
        rank: int = 0,
        guard: Callable[[Hook, bool], Hook] | None = None,
    ) -> None:
        self.callbacks = tuple(callbacks)
        overridden = [(callback, _overridden(callback, base)) for callback in callbacks]
        here = [(callback, names) for callback, names in overridden if rank == 0 or callback.all_ranks]
        self._table: dict[str, tuple[Hook, ...]] = {
            name: tuple([getattr(callback, name) for callback, names in here if name in names]) for name in HOOKS
        }
        if guard is not None:
            for name, hooks in self._table.items():
                self._table[name] = tuple(guard(hook, not _on_all_ranks(hook)) for hook in hooks)
        # The same on every rank, since what it decides (reading the meters) is a collective.
        self.listens = frozenset[str]().union(*[names for _, names in overridden])
        wishes = [c.log_freq for c in callbacks if isinstance(getattr(c, "log_freq", None), int)]
        self.log_freqs = tuple(wish for wish in wishes if wish > 0)

    def of(self, name: str) -> tuple[Hook, ...]:
        """The methods to call for a hook."""
        return self._table[name]

    def call(self, name: str, *args: Any) -> None:
        """Call a hook of every callback."""
        fire(self._table[name], *args)

    def finish(self, name: str, *args: Any) -> None:
        """Call a hook of every callback even if one of them fails; then raise the first failure."""
        failed: BaseException | None = None
        for hook in self._table[name]:
            try:
                fire((hook,), *args)
            except BaseException as exc:
                failed = failed or exc
        if failed is not None:
            raise failed


def fire(hooks: tuple[Hook, ...], *args: Any) -> None:
    """Call ``hooks``; a failing one is named in the error."""
    for hook in hooks:
        try:
            hook(*args)
        except BaseException as exc:
            owner = getattr(hook, "__self__", None)
            name = f"{type(owner).__name__}." if owner is not None else ""
            add_note(exc, f"raised by the callback {name}{getattr(hook, '__name__', hook)}")
            raise


def _on_all_ranks(hook: Hook) -> bool:
    return bool(getattr(getattr(hook, "__self__", None), "all_ranks", False))


def _overridden(callback: Any, base: type) -> frozenset[str]:
    """The hooks that a callback does not have from the base class."""
    methods = ((name, getattr(callback, name)) for name in HOOKS)
    return frozenset(name for name, method in methods if getattr(method, "__func__", method) is not getattr(base, name))
