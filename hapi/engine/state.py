"""What a run is, and who may write it.

=========== ============================================= ==========================================
type        written by                                    read by
=========== ============================================= ==========================================
Progress    engine/loop.py and checkpoint load, only      callbacks, the sampler
Control     callbacks on rank 0, signal handlers          the loop, at agreement points
Run         model.py builds it; the loop fills ``logs``   the loop, ``callback.run``
=========== ============================================= ==========================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hapi.distributed.hang import Place
from hapi.engine.signals import SignalNote
from hapi.engine.writer import BackgroundWriter

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from hapi.data.batch import Batch
    from hapi.distributed.environment import Environment
    from hapi.distributed.strategy import Strategy
    from hapi.engine.config import FitConfig
    from hapi.engine.meters import Meters, Window
    from hapi.engine.trials import Trials

__all__ = ["Average", "Control", "Logs", "Progress", "Request", "Run", "Stateful"]

Logs = dict[str, Any]
"""What a hook receives: floats by name (a numpy array where a metric's result is one)."""


class Stateful(Protocol):
    """Anything that a checkpoint can hold: tensors and plain containers out, the same back in."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as tensors and plain containers."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take the state back."""
        ...


@dataclass
class Progress:
    """Where a model's training stands, counted over its whole life (all calls of ``fit``).

    Attributes:
        epoch: Epochs finished; the index of the epoch in progress.
        first_epoch: ``epoch`` when the current ``fit`` began, so that ``epoch - first_epoch`` is its own count.
        first_step: ``global_step`` when the current ``fit`` began.
        batch_in_epoch: Batches (forwards) finished in the epoch in progress.
        row_in_epoch: Rows seen in the epoch in progress, over all ranks: the position in its order.
        global_step: Optimizer updates done. The x axis of every curve.
        samples: Training samples seen, over all ranks.
    """

    epoch: int = 0
    first_epoch: int = 0
    first_step: int = 0
    batch_in_epoch: int = 0
    row_in_epoch: int = 0
    global_step: int = 0
    samples: int = 0

    def state_dict(self) -> dict[str, Any]:
        """The counters as a plain dict."""
        return asdict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the counters from :meth:`state_dict`."""
        for name in asdict(self):
            setattr(self, name, int(state_dict.get(name, 0)))


class Average(Protocol):
    """Weights that a callback on every rank keeps beside the trained ones; it sets ``run.average`` to itself.

    Attributes:
        network: Holds the averaged weights; None as long as there are none.
        evaluates: Whether evaluations see them.
        saves: Whether a checkpoint's ``.pt`` holds them; the trained weights then lie beside the training state.
        applies: Whether the network gets them at the end of the fit.
        refreshes: Whether BatchNorm's running statistics are computed anew for them.
    """

    network: nn.Module | None
    evaluates: bool
    saves: bool
    applies: bool
    refreshes: bool

    def end_epoch(self) -> None:
        """Called after an epoch's last step, before its evaluation."""
        ...


@dataclass(frozen=True)
class Request:
    """Something that a callback asks the engine to do on every rank at the next agreement point.

    Attributes:
        action: ``"save"`` writes a checkpoint at ``path``; ``"keep"`` copies the weights to host memory;
            ``"restore"`` puts the kept weights back.
        path: For ``save``: the prefix of the files.
        remove: For ``save``: prefixes of older checkpoints, deleted once the new one is whole.
    """

    action: Literal["save", "keep", "restore"]
    path: str = ""
    remove: tuple[str, ...] = ()


@dataclass
class Control:
    """What callbacks decided. The loop carries it out and, on several ranks, tells the others."""

    stop: str | None = None
    requests: list[Request] = field(default_factory=list)

    def request_stop(self, reason: str) -> None:
        """End training at the next batch. The first reason is kept."""
        if self.stop is None:
            self.stop = reason

    def request_save(self, path: str, remove: tuple[str, ...] = ()) -> None:
        """Write a checkpoint at ``path`` once the current hooks are through; see :class:`Request`."""
        self.requests.append(Request("save", path, remove))

    def request_keep_weights(self) -> None:
        """Keep a copy of the current weights in host memory (one copy; a later one replaces it)."""
        self.requests.append(Request("keep"))

    def request_restore_weights(self) -> None:
        """Put the weights kept last back into the network."""
        self.requests.append(Request("restore"))


@dataclass(repr=False)
class Run:
    """One call of ``fit``, ``evaluate`` or ``predict``: everything the loop needs, resolved.

    Attributes:
        network: What the user gave; checkpoint keys come from it.
        module: What the step calls: ``network`` itself, or its data-parallel wrapper.
        parts: *Is* the checkpoint: to save a new thing, add it here.
        logs: The latest training values of the epoch in progress (floats by name).
        rate: The learning rate of the last step (of the first parameter group).
        kept: Weights that a callback asked to keep, in host memory.
        pending: Requests that all ranks know of, to be carried out at the end of an optimizer step.
        resume_rng: In a resumed run, until its epoch goes on: this rank's generators, now and when the epoch began.
        epoch_rng: This rank's generators when the epoch in progress began.
        save_dir: Where a checkpoint goes when a signal ends the run; None where the fit saves nothing.
        ending: On several ranks: whether all of them have heard of the signal.
        note: The signal that asked for an end.
        writer: Writes checkpoints in the background.
        place: Where the loop stands, for the hang report.
        read_seconds: How long this fit has waited for batches.
        folders: Folders that writers of this fit took, by log folder and name: those of other kinds may share them.
        gradients: The gradients of what the optimizer steps, by the network's names of the parameters.
        example: The first batch of the phase; None before it came.
        average: Averaged weights, where a callback keeps some.
        refreshed: The step for which the average's BatchNorm statistics were computed.
        restored: Whether the weights that were kept have been put back.
        trials: For ``on_train_begin`` of a callback on every rank: steps that leave no trace.
        evaluated: In ``on_eval_batch_end``: this rank's batch and the network's outputs.
        notes: Lines for whoever prints, who takes them out: what compiled, and how long it took.
    """

    network: nn.Module
    module: nn.Module
    optimizer: Optimizer | None
    scheduler: Any
    strategy: Strategy
    env: Environment
    config: FitConfig
    progress: Progress
    control: Control
    meters: Meters
    parts: dict[str, Stateful]
    logs: Logs = field(default_factory=dict)
    rate: Any = None
    kept: dict[str, Any] | None = None
    pending: list[Request] = field(default_factory=list)
    resume_rng: dict[str, Any] | None = None
    epoch_rng: dict[str, Any] | None = None
    save_dir: str | None = None
    ending: bool = False
    note: SignalNote = field(default_factory=SignalNote)
    writer: BackgroundWriter = field(default_factory=BackgroundWriter)
    place: Place = field(default_factory=Place)
    read_seconds: float = 0.0
    folders: dict[tuple[str, str | None], tuple[Path, set[str]]] = field(default_factory=dict)
    gradients: Callable[[], list[tuple[str, Tensor]]] = list
    example: Callable[[], Batch | None] = lambda: None
    evaluated: tuple[Batch, Any] | None = None
    average: Average | None = None
    refreshed: int | None = None
    restored: bool = False
    trials: Trials | None = None
    notes: list[str] = field(default_factory=list)

    def window(self) -> Window:
        """A reader of the values since its last reading; see :class:`hapi.engine.meters.Window`."""
        return self.meters.window()
