"""``Model``: the user's words -> a Run, then the engine."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler as TorchScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hapi import export, resolve
from hapi.callbacks import Callback, History, ModelCheckpoint
from hapi.data.batch import Batch, Fields, Signature, Splitter
from hapi.data.loader import Loader
from hapi.data.memory import Resident
from hapi.data.sources import open_data, split_arrays
from hapi.data.trees import leaves
from hapi.data.workers import check_workers
from hapi.distributed.batchnorm import convert, has_sync_batchnorm
from hapi.distributed.collectives import broadcast_object
from hapi.distributed.environment import Environment
from hapi.distributed.group import init_parallel_env, place
from hapi.distributed.strategies import choose
from hapi.distributed.strategy import Strategy
from hapi.engine import checkpoint, loop, step
from hapi.engine.compile import Compilation, Compiled
from hapi.engine.config import FitConfig, Precision, check_int
from hapi.engine.guard import GuardedHook
from hapi.engine.hooks import Hooks
from hapi.engine.loss import LossFunction
from hapi.engine.master import MasterWeights
from hapi.engine.memory import keep_freed_memory
from hapi.engine.meters import Meters, RoutedMetric
from hapi.engine.resume import CallbacksPart, FitPart, find, restore_rank
from hapi.engine.rng import draw_seed
from hapi.engine.signals import noting_signals
from hapi.engine.state import Control, Logs, Progress, Run, Stateful
from hapi.engine.trials import Trials
from hapi.errors import add_note
from hapi.summary import summary

__all__ = ["Model"]


class Model:
    """A network with everything that training it needs.

    Args:
        network: Any ``torch.nn.Module``.
        inputs: What a batch's inputs are: a :class:`hapi.InputSpec`, a name, a count, or a list or dict of those.
            Default: as many fields as ``forward`` has required parameters.
        labels: The same for the labels. Default: the rest of the batch.
        device: Where to compute: ``"cpu"``, ``"cuda:1"`` ... Default: this rank's GPU, else mps or xpu, else the CPU.

    Attributes:
        network: The network.
        mode: ``"train"``, ``"eval"`` or ``"test"``: what ran last.
        stop_training: Set to True (in a callback) to end ``fit`` at the next batch.

    Example:
        >>> model = Model(nn.Linear(4, 2)).prepare("adam", "cross_entropy", "accuracy")
        >>> history = model.fit((torch.randn(32, 4), torch.randint(0, 2, (32,))), batch_size=8, verbose=0)
        >>> sorted(history.history)
        ['acc', 'loss', 'lr']
    """

    def __init__(
        self,
        network: nn.Module,
        inputs: Any = None,
        labels: Any = None,
        device: str | torch.device | None = None,
    ) -> None:
        given: Any = network
        if not isinstance(given, nn.Module):
            hint = f"; give an instance: {given.__name__}()" if isinstance(given, type) else ""
            raise TypeError(f"Model: network={given!r} is not a torch.nn.Module{hint}")
        self.network = network
        self.mode = "train"
        self._signature = Signature.of(network)
        self._inputs = Fields.parse(inputs, "inputs")
        self._labels = Fields.parse(labels, "labels")
        try:
            self._wanted_device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as exc:
            raise ValueError(f"Model: device={device!r} is none; for example 'cpu', 'cuda', 'cuda:1'") from exc
        self._env: Environment | None = None
        self._prepared = False
        self._progress = Progress()
        self._control = Control()
        self._running: Run | None = None
        self._example: Batch | None = None
        self._pending_state: tuple[dict[str, Any], str] | None = None
        self._optimizer: Optimizer | None = None
        self._scheduler: Any = None
        self._loss: LossFunction | None = None
        self._metrics: list[RoutedMetric] = []
        self._base_rates: list[Any] = []
        self._config = FitConfig()
        self._scaler: torch.amp.GradScaler | None = None
        self._masters: MasterWeights | None = None
        self._channels_last = False
        self._sample_weight: int | str | None = None
        self._compilation: Compilation | None = None
        self._compiled: Compiled | None = None
        self._strategy_choice: Any = "auto"
        self._strategy: Strategy | None = None
        self._module: nn.Module = network
        self._meters: Meters | None = None
        self._by_hand: step.TrainStep | None = None

    # ------------------------------------------------------------------ prepare

    def prepare(
        self,
        optimizer: Any = None,
        loss: Any = None,
        metrics: Any = None,
        amp: Any = None,
        *,
        scheduler: Any = None,
        scheduler_interval: str | None = None,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        loss_weights: Any = None,
        class_weight: Any = None,
        sample_weight: int | str | None = None,
        strategy: Any = "auto",
        sync_batchnorm: bool = False,
        compile: bool | str | dict[str, Any] = False,
        channels_last: bool = False,
        fused: bool | None = None,
    ) -> Model:
        """Say how to train. Calling it again replaces everything.

        Args:
            optimizer: A ``torch.optim.Optimizer``, a function of the parameters that makes one, or a name ("adam",
                "adamw", "sgd" (lr 0.01), ...; names take torch's fused kernels where there are any).
            loss: ``loss(*outputs, *labels)`` -> a scalar or one value per sample: a Module or its class, a function, a
                name ("cross_entropy", "mse", ...), or a list or dict of those, whose weighted sum is minimised.
            metrics: hapi metrics or their classes, any ``torchmetrics.Metric``, functions, names ("accuracy", ...), a
                list of those, or a dict from output name or position to metrics.
            amp: Mixed precision: None, "bf16", "fp16", "O0", "O1", "O2", or a dict with ``level``, ``dtype`` and the
                scaler's ``init_loss_scaling``, ``incr_ratio``, ``decr_ratio``, ``incr_every_n_steps``,
                ``use_dynamic_loss_scaling``. Training, evaluation and prediction use the same.
            scheduler: A torch scheduler, a function of the optimizer that makes one, or a name ("cosine", "linear",
                "one_cycle", "polynomial", "constant"; over all steps of the fit).
            scheduler_interval: "step" (default: once per optimizer step) or "epoch".
            clip_grad_norm: Largest global norm of the gradients.
            clip_grad_value: Largest absolute value of a gradient's entry.
            loss_weights: A number per loss, in a list or by name.
            class_weight: Weight per class, by index; scales each sample's loss by its integer label.
            sample_weight: Where a batch holds sample weights: a position among its fields, or a key of a dict batch.
                The loss becomes the weighted mean.
            strategy: "auto", or a :class:`hapi.distributed.Strategy`.
            sync_batchnorm: On several ranks: BatchNorm statistics over all ranks' rows, as on one rank with the global
                batch. Replaces the network's BatchNorm modules; their parameters and names stay.
            compile: True compiles forward and loss with ``torch.compile``, once for all batch sizes. "eval": in
                evaluation and prediction only. "step": the optimizer's step too. "graph": forward and loss in CUDA
                graphs, for batches of one shape; one of another size runs uncompiled. A dict holds options of
                ``torch.compile``, and, as ``what``, one of these words. The first batch waits for the compiler.
            channels_last: Keep 4-d inputs and weights in channels-last memory format.
            fused: True steps a given Adam, AdamW, SGD or Adagrad with torch's fused kernels; False steps also an
                optimizer given by name without. The last bits differ.

        Returns:
            The model, so that ``Model(net).prepare(...).fit(data)`` is one line.

        Raises:
            TypeError, ValueError: An argument that cannot be used; the message says what is accepted.
        """
        if scheduler_interval not in (None, "step", "epoch"):
            raise ValueError(f"prepare: scheduler_interval={scheduler_interval!r}; accepted: 'step', 'epoch'")
        if isinstance(sample_weight, bool) or not isinstance(sample_weight, (int, str, type(None))):
            raise TypeError(f"prepare: sample_weight={sample_weight!r}; accepted: a position or a key")
        compilation = Compilation.parse(compile)
        if fused is not None and not isinstance(fused, bool):
            raise TypeError(f"prepare: fused={fused!r}; accepted: True, False or None")
        if fused and optimizer is None:
            raise ValueError("prepare: fused=True is given without an optimizer")
        for name, flag in (("channels_last", channels_last), ("sync_batchnorm", sync_batchnorm)):
            if not isinstance(flag, bool):
                raise TypeError(f"prepare: {name}={flag!r}; accepted: True or False")
        made_loss = resolve.as_loss(loss, loss_weights, class_weight)
        made_metrics = resolve.as_metrics(metrics, made_loss)
        losses = set(made_loss.names) if made_loss else set()
        clash = sorted(losses & {name for metric in made_metrics for name in metric.names})
        if clash:
            raise ValueError(f"prepare: a loss and a metric are both named {clash}")
        precision = Precision.parse(amp)
        made_optimizer = resolve.as_optimizer(optimizer, self.network)
        made_scheduler = resolve.as_scheduler(scheduler, made_optimizer)
        plateau = isinstance(made_scheduler, ReduceLROnPlateau)
        if plateau and scheduler_interval == "step":
            raise ValueError("prepare: ReduceLROnPlateau looks at epochs; scheduler_interval='step' does not fit it")
        config = FitConfig(
            clip_norm=clip_grad_norm,
            clip_value=clip_grad_value,
            precision=precision,
            scheduler_interval="epoch" if plateau or scheduler_interval == "epoch" else "step",
        )
        if precision.scaler is not None and made_optimizer is not None:
            device = self._environment().device
            assert device is not None
            self._scaler = torch.amp.GradScaler(device.type, **precision.scaler)
        else:
            self._scaler = None
        env = self._environment()
        if made_optimizer is not None:
            # A compiled step takes the place of a fused one.
            named = isinstance(optimizer, str) and (compilation is None or compilation.what != "step")
            resolve.fuse(made_optimizer, fused, self.network, named=named)
        if compilation is not None:
            compilation.check(self._device, env.world, made_optimizer, scaled=self._scaler is not None)
        if sync_batchnorm and env.world > 1:
            self.network = convert(self.network, self._device, env.group)
        if channels_last:
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self._masters is not None:
            self._masters.undo()
            self._masters = None
        self._optimizer, self._scheduler, self._loss = made_optimizer, made_scheduler, made_loss
        self._base_rates = [group["lr"] for group in made_optimizer.param_groups] if made_optimizer else []
        self._metrics, self._config, self._sample_weight = made_metrics, config, sample_weight
        self._channels_last, self._strategy_choice = channels_last, strategy
        self._compilation = compilation
        self._strategy = choose(strategy, self._environment())
        self._prepared = True
        self._meters = self._by_hand = None
        self._set_up()
        self._restore_pending()
        return self

    def _environment(self) -> Environment:
        """Join the group and find the device, when first needed."""
        if self._env is None:
            self._env = init_parallel_env(device=self._wanted_device)
            self.network.to(self._env.device)
        return self._env

    @property
    def _device(self) -> torch.device:
        device = self._environment().device
        assert device is not None
        return device

    def _set_up(self) -> None:
        """Wrap the network. On several ranks this is where rank 0's weights reach the others."""
        assert self._strategy is not None
        if self._loss is not None:
            self._loss.to(self._device)
        precision = self._config.precision
        if precision.master_weights and precision.dtype is not None and self._optimizer is not None:
            self._masters = MasterWeights(self._optimizer, self.network, precision.dtype)
        self._module, self._optimizer = self._strategy.setup(self.network, self._optimizer)
        self._compiled = None
        if self._compilation is not None:
            self._compiled = Compiled(self._compilation, self._module, self.network, self._loss, self._optimizer)
        self._meters = Meters(self._loss, self._metrics, self._device, self._environment())

    def _twin(self, *, fused: bool | None = None, channels_last: bool = False, compile: Any = False) -> Model:
        """An independent copy with other switches, for measuring: training it leaves this model as it is."""
        twin = copy.copy(self)
        owned = self.network, self._optimizer, self._loss, self._metrics, self._masters, self._scaler
        try:
            twin.network, twin._optimizer, twin._loss, twin._metrics, twin._masters, twin._scaler = copy.deepcopy(owned)
        except Exception as exc:
            add_note(exc, "while copying the network, the optimizer, the loss and the metrics")
            raise
        optimizer = twin._optimizer
        if optimizer is not None:
            # torch copies an optimizer's groups and state, but not its flags.
            flags = {name: value for name, value in vars(self._optimizer).items() if isinstance(value, bool)}
            vars(optimizer).update(flags)
            resolve.fuse(optimizer, fused, twin.network, named=False)
        if channels_last:
            twin.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            twin._channels_last = True
        compilation = Compilation.parse(compile) or self._compilation
        twin._module, twin._compiled = twin.network, None
        if compilation is not None:
            compilation.check(self._device, 1, optimizer, scaled=self._scaler is not None)
            twin._compiled = Compiled(compilation, twin.network, twin.network, twin._loss, optimizer)
        twin._progress, twin._control, twin._scheduler = Progress(), Control(), None
        twin._running = twin._meters = twin._by_hand = None
        return twin

    def _eval_step(self, meters: Meters) -> step.EvalStep:
        return step.build_eval_step(
            self.network, self._loss, meters, self._config.precision, self._device, self._compiled
        )

    def _predict_step(self) -> step.PredictStep:
        return step.build_predict_step(self.network, self._config.precision, self._device, self._compiled)

    def _need(self, where: str, *, training: bool) -> None:
        if not self._prepared:
            raise RuntimeError(f"{where}: call prepare(optimizer, loss, metrics) first")
        if training and self._optimizer is None:
            raise RuntimeError(f"{where}: prepare was called without an optimizer")
        if training and self._loss is None:
            raise RuntimeError(f"{where}: prepare was called without a loss")

    # ---------------------------------------------------------------------- fit

    def fit(
        self,
        train_data: Any = None,
        eval_data: Any = None,
        batch_size: int | list[int] | tuple[int, int] = 1,
        epochs: int = 1,
        eval_freq: int = 1,
        log_freq: int = 10,
        save_dir: str | os.PathLike[str] | None = None,
        save_freq: int = 1,
        verbose: int = 2,
        drop_last: bool = False,
        shuffle: bool = True,
        num_workers: int | str = 0,
        callbacks: Any = None,
        accumulate_grad_batches: int = 1,
        num_iters: int | None = None,
        *,
        global_batch_size: int | None = None,
        validation_split: float | None = None,
        sample_weight: Any = None,
        seed: int | None = None,
        save_every_n_steps: int | None = None,
        keep: int | None = None,
        resume: str | os.PathLike[str] | None = None,
        keep_on_device: bool | str = False,
    ) -> History:
        """Train for ``epochs`` epochs.

        Args:
            train_data: Tensors or arrays ``(x, y)``, a dict of them, a Dataset, a DataLoader or an iterable of batches.
            eval_data: The same, evaluated after every ``eval_freq``-th epoch and the last.
            batch_size: Rows per rank and batch, where hapi forms the batches; ``[train, eval]`` for two sizes.
            epochs: Passes over the data.
            eval_freq: Epochs between evaluations.
            log_freq: Batches between lines (and reads of the metrics).
            save_dir: Where checkpoints go: ``1``, ``2`` ... and ``final``.
            save_freq: Epochs between checkpoints.
            verbose: 0 silent, 1 a live bar, 2 lines, 3 lines with the time of reading and computing.
            drop_last: Leave out a last short batch.
            shuffle: Shuffle, where hapi makes the order: a function of (seed, epoch).
            num_workers: Reader processes, kept over the epochs; results do not depend on their number. "auto": for a
                Dataset read sample by sample a number from the cores and from what a few samples cost; else 0.
            callbacks: :class:`hapi.callbacks.Callback` instances.
            accumulate_grad_batches: Batches per optimizer step; gradients are the mean over the samples of all of them.
            num_iters: End after so many optimizer steps (``epochs`` is ignored).
            global_batch_size: Rows per batch over all ranks, instead of ``batch_size``.
            validation_split: Keep this fraction of arrays, the last rows, for evaluation.
            sample_weight: For arrays: a weight per sample, ``[N]``.
            seed: Of the order. Default: follows ``torch.manual_seed``; a resumed run keeps the one it began with.
            save_every_n_steps: Also write checkpoints every so many optimizer steps: ``step-100`` ...
            keep: Keep only so many of the checkpoints, the newest.
            resume: "auto" goes on from the newest whole checkpoint in ``save_dir``, or begins if there is none, so that
                the same command can be run again after a crash; a path goes on from that checkpoint.
            keep_on_device: Move data that lies in memory to the device once, and make its batches there. "auto": where
                it takes at most half of the device's free memory. Values and order stay; on the CPU nothing changes.

        Returns:
            The :class:`hapi.callbacks.History`: ``.history["loss"]``, ``["eval_acc"]`` ...

        Raises:
            RuntimeError: ``prepare`` was not called.
            TypeError, ValueError: An argument that cannot be used, or data that does not fit the network.
        """
        self._need("fit", training=True)
        if self._running is not None:
            raise RuntimeError("fit: already running; a callback cannot call fit on its own model")
        if train_data is None:
            raise ValueError("fit: train_data is None")
        check_int("verbose", verbose, 0)
        check_workers(num_workers, "fit")
        check_int("save_freq", save_freq)
        if verbose > 3:
            raise ValueError(f"fit: verbose={verbose}; accepted: 0, 1, 2, 3")
        if save_dir is not None and not isinstance(save_dir, (str, os.PathLike)):
            raise TypeError(f"fit: save_dir={save_dir!r}; accepted: a folder's path")
        for name, flag in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(flag, bool):
                raise TypeError(f"fit: {name} must be True or False, not {flag!r}")
        if seed is not None:
            check_int("seed", seed, 0)
        train_batch, eval_batch = self._batch_sizes(batch_size, global_batch_size, "fit")
        if validation_split is not None:
            if eval_data is not None:
                raise ValueError("fit: give eval_data or validation_split, not both")
            if sample_weight is not None:
                raise ValueError("fit: validation_split with sample_weight is ambiguous; give eval_data")
            train_data, eval_data = split_arrays(train_data, validation_split, "train_data")
        weight_field = self._sample_weight
        if sample_weight is not None:
            train_data = self._with_weights(train_data, sample_weight)
            weight_field = -1
        env = self._environment()
        save_to = None if save_dir is None else os.fspath(save_dir)
        saved = self._find_resume(resume, save_to)
        if saved is not None:
            kept_seed = saved[1]["fit"]["seed"]
            if seed not in (None, kept_seed):
                raise ValueError(f"fit: seed={seed}, but the run to resume has the seed {kept_seed}")
            seed = kept_seed
        seed = broadcast_object(draw_seed() if seed is None else seed, group=env.group)
        config = replace(
            self._config,
            epochs=epochs,
            num_iters=num_iters,
            accumulate=accumulate_grad_batches,
            log_freq=log_freq,
            eval_freq=eval_freq,
            seed=seed,
        )

        resident = Resident(keep_on_device, self._device, "fit")

        def load(data: Any, what: str, batch: int, **how: bool) -> Loader:
            same = {"num_workers": num_workers, "seed": seed, "resident": resident}
            return self._open(data, f"fit: {what}", batch, **same, **how)

        def open_train(rows: int) -> Loader:
            return load(train_data, "train_data", rows, shuffle=shuffle, drop_last=drop_last)

        loader = open_train(train_batch)
        eval_loader = None
        if eval_data is not None:
            eval_loader = load(eval_data, "eval_data", eval_batch, shuffle=False, drop_last=False, lend=True)
        if num_iters is not None:
            steps = None if loader.batches is None else -(-loader.batches // config.accumulate)
            config = replace(config, epochs=None if steps is None else -(-num_iters // steps))
        chain = resolve.as_callbacks(
            callbacks,
            verbose=verbose,
            log_freq=log_freq,
            save_dir=save_to,
            save_freq=save_freq,
            every_n_steps=save_every_n_steps,
            keep=keep,
        )
        history = next(c for c in chain if isinstance(c, History))
        config = replace(config, scheduler_interval=resolve.scheduler_interval(chain, config.scheduler_interval))
        run = self._new_run(config, self._module)
        self._build_scheduler(run, loader)
        hooks = self._hooks(
            chain,
            run,
            {
                "epochs": config.epochs,
                "steps": loader.batches,
                "batch_size": train_batch,
                "verbose": verbose,
                "metrics": run.meters.names,
                "log_freq": log_freq,
                "save_dir": save_to,
                "evaluates": eval_loader is not None,
            },
        )
        assert self._optimizer is not None and self._loss is not None
        several = env.world > 1

        def inspect() -> None:
            hooks.call("on_before_optimizer_step", run.progress.batch_in_epoch - 1, {})

        train_step = step.build_train_step(
            self._module,
            self._optimizer,
            self._loss,
            run.meters,
            config,
            self._device,
            world=env.world,
            scaler=self._scaler,
            masters=self._masters,
            no_sync=run.strategy.no_sync if several else None,
            network=self.network if several else None,
            inspect=inspect if "on_before_optimizer_step" in hooks.listens else None,
            compiled=self._compiled,
        )
        eval_step = self._eval_step(run.meters)

        def evaluate() -> Logs:
            assert eval_loader is not None
            self.mode = "eval"
            feed = loop.Feed(eval_loader, self._splitter(self._sample_weight).split)
            logs = loop.evaluate_loop(run, feed, eval_step, hooks)
            self.mode = "train"
            return logs

        # A forward of this network is itself a collective, so a rank without rows must run one all the same.
        joins = several and has_sync_batchnorm(self.network)
        self.mode = "train"
        run.progress.first_epoch, run.progress.first_step = run.progress.epoch, run.progress.global_step
        run.progress.batch_in_epoch = run.progress.row_in_epoch = 0
        run.parts["callbacks"] = CallbacksPart(chain)
        shape = {"samples": loader.samples, "accumulate_grad_batches": config.accumulate}
        if loader.rows(0) is None:
            shape["number of ranks"] = env.world  # batches come as they come: the position is a count of them
        run.parts["fit"] = FitPart(run, shape)
        if saved is not None:
            self._apply_resume(run, *saved)
        splitter = self._splitter(weight_field)
        run.example = lambda: splitter.example
        feed = loop.Feed(loader, splitter.split, splitter.empty if joins else None)
        run.save_dir = next((c.save_dir or save_to for c in chain if isinstance(c, ModelCheckpoint)), None)

        def replaced(chosen: Loader, rows: int) -> None:
            """A callback chose another batch size."""
            if num_iters is not None:
                run.config = replace(run.config, epochs=None)  # it counted epochs of the first size
            if saved is None:
                self._build_scheduler(run, chosen)
            for callback in chain:
                callback.set_params({**callback.params, "batch_size": rows * env.world, "steps": chosen.batches})

        trials = Trials(run, feed, train_step, self._loss, lambda rows: open_train(rows * env.world), replaced)
        with self._active(run, splitter, lambda: (trials.feed.loader, eval_loader)), noting_signals(run.note):
            loop.fit_loop(run, trials, train_step, hooks, self._loss, evaluate if eval_loader is not None else None)
        if several:
            # Callbacks ran on rank 0; what fit returns is for every rank's script.
            told = broadcast_object((history.history, history.epochs, history.epoch), group=env.group)
            history.history, history.epochs, history.epoch = told
        return history

    def _find_resume(self, resume: Any, save_dir: str | None) -> tuple[Path, dict[str, Any]] | None:
        """Rank 0 chooses the checkpoint, all ranks read it."""
        if resume is None:
            return None
        env = self._environment()
        found = find(os.fspath(resume), None if save_dir is None else Path(save_dir)) if env.rank == 0 else None
        chosen = broadcast_object(None if found is None else str(found[0]), group=env.group)
        return None if chosen is None else found or find(chosen, None)

    def _apply_resume(self, run: Run, prefix: Path, state: dict[str, Any]) -> None:
        """Put everything back as it was when the checkpoint was written."""
        weights = state["trained"] if "trained" in state else checkpoint.read_weights(prefix)
        mine = run.parts.get("optimizer")
        if isinstance(mine, checkpoint.OptimizerPart):
            mine.fitted(state["optimizer"])  # refuse before anything has changed
        checkpoint.load_network(self.network, weights, skip_mismatch=False, source=f"{prefix}.pt")
        if self._masters is not None:
            self._masters.refresh()
        for name, part in run.parts.items():
            if name in state:
                part.load_state_dict(state[name])
        restore_rank(run, state)

    def _build_scheduler(self, run: Run, loader: Loader) -> None:
        """A scheduler given by name is built when the number of steps is known, anew for each fit."""
        if self._scheduler is None or not callable(self._scheduler) or isinstance(self._scheduler, TorchScheduler):
            return
        config, optimizer = run.config, self._optimizer
        assert optimizer is not None
        total = config.num_iters
        if total is None and loader.batches is not None and config.epochs is not None:
            total = config.epochs * -(-loader.batches // config.accumulate)
        if config.scheduler_interval == "epoch":
            total = config.epochs
        for group, rate in zip(optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate
        run.scheduler = self._scheduler(optimizer, total)
        run.parts["scheduler"] = run.scheduler

    @contextmanager
    def _active(self, run: Run, splitter: Splitter, loaders: Callable[[], tuple[Loader | None, ...]]) -> Iterator[None]:
        self._running = run
        try:
            yield
        finally:
            self._running = None
            run.place.now = None
            self._remember(splitter)
            for loader in loaders():
                if loader is not None:
                    loader.close()

    def _remember(self, splitter: Splitter) -> None:
        """Keep two rows of the first batch: the export needs example inputs."""
        batch = splitter.example
        if self._example is None and batch is not None:
            self._example = batch._replace(
                args=tuple(value[:2].clone() for value in batch.args),
                kwargs={name: value[:2].clone() for name, value in batch.kwargs.items()},
                labels=(),
                weight=None,
            )

    def _with_weights(self, data: Any, weights: Any) -> Any:
        if not isinstance(data, tuple) or not all(isinstance(leaf, (Tensor, np.ndarray)) for leaf in leaves(data)):
            raise TypeError(
                "fit: sample_weight=array goes with arrays (x, y). For other data put the weights into the batches "
                "and say where with prepare(sample_weight=...)"
            )
        try:
            weights = weights if isinstance(weights, Tensor) else np.asarray(weights, dtype=np.float32)
        except (ValueError, TypeError) as exc:
            raise TypeError(f"fit: sample_weight is {type(weights).__name__}; accepted: a number per sample") from exc
        if weights.ndim != 1:
            raise ValueError(f"fit: sample_weight has the shape {list(weights.shape)}; accepted: [N]")
        if self._sample_weight is not None:
            raise ValueError("fit: sample_weight is given here and in prepare")
        return (*data, weights)

    # ------------------------------------------------------- evaluate and predict

    def evaluate(
        self,
        eval_data: Any,
        batch_size: int = 1,
        log_freq: int = 10,
        verbose: int = 2,
        num_workers: int | str = 0,
        callbacks: Any = None,
        num_iters: int | None = None,
        *,
        global_batch_size: int | None = None,
        keep_on_device: bool | str = False,
    ) -> dict[str, Any]:
        """Evaluate: the exact sample-weighted mean of the loss, and every metric, over all data and ranks.

        Args:
            eval_data: As ``train_data`` of :meth:`fit`.
            batch_size: Rows per rank and batch.
            log_freq: Batches between lines.
            verbose: 0 silent, 1 a live bar, 2 lines, 3 lines with times.
            num_workers: Reader processes, or "auto", as for :meth:`fit`.
            callbacks: :class:`hapi.callbacks.Callback` instances.
            num_iters: Evaluate only so many batches.
            global_batch_size: Rows per batch over all ranks, instead of ``batch_size``.
            keep_on_device: As for :meth:`fit`.

        Returns:
            ``{"loss": 0.07, "acc": 0.98}``: floats by name, equal on every rank.

        Raises:
            RuntimeError: ``prepare`` was not called.
        """
        self._need("evaluate", training=False)
        if num_iters is not None:
            check_int("num_iters", num_iters, where="evaluate")
        how = num_workers, callbacks, keep_on_device
        loader, run, hooks = self._phase("evaluate", eval_data, batch_size, global_batch_size, log_freq, verbose, *how)
        meters = run.meters
        outer = meters.snapshot() if self._running is not None else None
        self.mode = "eval"
        eval_step = self._eval_step(meters)
        splitter = self._splitter(self._sample_weight)
        feed = loop.Feed(loader, splitter.split)
        try:
            with loop.guarded(hooks, "on_eval_end"):
                logs = loop.evaluate_loop(run, feed, eval_step, hooks, num_iters)
        finally:
            loader.close()
            self._remember(splitter)
            if outer is not None:
                meters.restore(outer)
            else:
                run.place.now = None
        return {name: value for name, value in logs.items() if name in meters.names}

    def predict(
        self,
        test_data: Any,
        batch_size: int = 1,
        num_workers: int | str = 0,
        stack_outputs: bool = False,
        verbose: int = 1,
        callbacks: Any = None,
        *,
        keep_outputs: bool = True,
        global_batch_size: int | None = None,
        keep_on_device: bool | str = False,
    ) -> list[Any]:
        """Predict every row once, in the data's order, on every rank. Labels in the data are ignored.

        Args:
            test_data: As ``train_data`` of :meth:`fit`, with or without labels.
            batch_size: Rows per rank and batch.
            num_workers: Reader processes, or "auto", as for :meth:`fit`.
            stack_outputs: One array per output, joined on axis 0, instead of one array per batch.
            verbose: 0 silent, 1 a live bar, 2 lines, 3 lines with times.
            callbacks: They get each batch's outputs in ``on_predict_batch_end`` as ``logs["outputs"]``.
            keep_outputs: False returns ``[]`` and keeps nothing in memory: a callback takes the outputs.
            global_batch_size: Rows per batch over all ranks, instead of ``batch_size``.
            keep_on_device: As for :meth:`fit`.

        Returns:
            A list over outputs: of lists over batches of arrays ``(rows, ...)``, or of arrays ``(N, ...)``.
        """
        for name, flag in (("stack_outputs", stack_outputs), ("keep_outputs", keep_outputs)):
            if not isinstance(flag, bool):
                raise TypeError(f"predict: {name} must be True or False, not {flag!r}")
        how = num_workers, callbacks, keep_on_device
        loader, run, hooks = self._phase("predict", test_data, batch_size, global_batch_size, 2, verbose, *how)
        self.mode = "test"
        splitter = self._splitter(self._sample_weight)
        feed = loop.Feed(loader, lambda raw: splitter.split(raw, with_labels=False))
        predict_step = self._predict_step()
        try:
            with loop.guarded(hooks, "on_predict_end"):
                batches = loop.predict_loop(run, feed, predict_step, hooks, keep=keep_outputs)
        finally:
            loader.close()
            self._remember(splitter)
            run.place.now = None
        by_output = [list(arrays) for arrays in zip(*batches, strict=True)]
        if stack_outputs:
            return [np.concatenate([np.atleast_1d(array) for array in arrays]) for arrays in by_output]
        return by_output

    def _phase(
        self,
        where: str,
        data: Any,
        batch_size: Any,
        global_batch_size: int | None,
        log_freq: int,
        verbose: int,
        num_workers: int | str,
        callbacks: Any,
        keep_on_device: bool | str,
    ) -> tuple[Loader, Run, Hooks]:
        """What evaluate and predict share: check, open the data, build the run and its hooks."""
        if data is None:
            raise ValueError(f"{where}: the data is None")
        check_int("log_freq", log_freq, where=where)
        check_int("verbose", verbose, 0, where=where)
        check_workers(num_workers, where)
        if verbose > 3:
            raise ValueError(f"{where}: verbose={verbose}; accepted: 0, 1, 2, 3")
        batch, _ = self._batch_sizes(batch_size, global_batch_size, where)
        how: dict[str, Any] = {"shuffle": False, "drop_last": False, "num_workers": num_workers, "seed": 0}
        how["resident"] = Resident(keep_on_device, self._device, where)
        # What predict gives may be parts of its input, and is the user's to write into.
        how["lend"] = where == "evaluate"
        loader = self._open(data, f"{where}: data", batch, **how)
        run = self._new_run(replace(self._config, log_freq=log_freq), self.network)
        chain = resolve.as_callbacks(callbacks, verbose=verbose, log_freq=log_freq)
        params: dict[str, Any] = {"epochs": None, "steps": loader.batches, "batch_size": batch, "verbose": verbose}
        params |= {"metrics": run.meters.names, "log_freq": log_freq, "save_dir": None, "evaluates": False}
        return loader, run, self._hooks(chain, run, params)

    def _open(self, data: Any, what: str, batch: int, **how: Any) -> Loader:
        return open_data(
            data,
            what,
            self._environment(),
            batch=batch,
            float_dtype=self._float_dtype(),
            **how,
        )

    def _float_dtype(self) -> torch.dtype:
        """What float64 numpy data becomes: what the network computes in, float32 under master weights."""
        for parameter in self.network.parameters():
            if parameter.dtype in (torch.float32, torch.float64):
                return parameter.dtype
        return torch.float32

    def _batch_sizes(self, given: Any, global_size: int | None, where: str) -> tuple[int, int]:
        """Global batch sizes for training and evaluation."""
        world = self._environment().world
        if global_size is not None:
            if given != 1:
                raise ValueError(f"{where}: give batch_size or global_batch_size, not both")
            check_int("global_batch_size", global_size, where=where)
            return global_size, global_size
        sizes = list(given) if isinstance(given, (list, tuple)) else [given]
        if len(sizes) > 2 or not sizes or (where != "fit" and len(sizes) != 1):
            accepted = "an int, or [train, eval]" if where == "fit" else "an int"
            raise ValueError(f"{where}: batch_size={given!r}; accepted: {accepted}")
        for size in sizes:
            check_int("batch_size", size, where=where)
        return sizes[0] * world, sizes[-1] * world

    def _splitter(self, weight_field: int | str | None) -> Splitter:
        return Splitter(
            self._signature,
            self._inputs,
            self._labels,
            weight_field,
            self._device,
            self._float_dtype(),
            self._channels_last,
        )

    def _new_run(self, config: FitConfig, module: nn.Module) -> Run:
        env = self._environment()
        if self._device.type == "cpu":
            keep_freed_memory()
        nested = self._running is not None
        if not nested:
            self._control = Control()
        if self._meters is None:
            self._meters = Meters(self._loss, self._metrics, self._device, env)
        return Run(
            network=self.network,
            module=module,
            optimizer=self._optimizer,
            scheduler=None if callable(self._scheduler) else self._scheduler,
            strategy=self._strategy or choose("auto", env),
            env=env,
            config=config,
            progress=self._progress,
            control=self._control,
            meters=self._meters,
            parts=self._parts(),
            place=place(),
            gradients=self._gradients,
            notes=self._compiled.notes if self._compiled is not None else [],
        )

    def _hooks(self, chain: list[Callback], run: Run, params: dict[str, Any]) -> Hooks:
        for callback in chain:
            callback.set_model(self)
            callback.set_params(dict(params))
            callback.set_run(run)
        guard = None if run.env.world == 1 else lambda hook, alone: GuardedHook(hook, alone, run.optimizer, run.place)
        return Hooks(chain, Callback, run.env.rank, guard)

    # --------------------------------------------------------- one batch at a time

    def train_batch(self, inputs: Any, labels: Any = None, update: bool = True) -> Any:
        """One forward and backward, and by default a step.

        Args:
            inputs: An array or tensor, a list of them, or a dict by name.
            labels: The same for the labels.
            update: False keeps the gradients, so that the next call adds to them.

        Returns:
            A list with each loss as a 0-d array; with metrics ``(losses, metric values of this batch)``.
        """
        self._need("train_batch", training=True)
        assert self._optimizer is not None and self._loss is not None
        self.mode = "train"
        loop.enter_training(self.network)
        run = self._new_run(self._config, self._module)
        if self._by_hand is None:
            self._by_hand = step.build_train_step(
                self._module,
                self._optimizer,
                self._loss,
                run.meters,
                self._config,
                self._device,
                world=run.env.world,
                scaler=self._scaler,
                masters=self._masters,
                compiled=self._compiled,
            )
        train_step = self._by_hand
        batch = self._batch(inputs, labels)
        result = self._by_itself(run, lambda: train_step.micro(batch, None, update), batch, means=True)
        if update:
            self._progress.global_step += train_step.update()
        return result

    def eval_batch(self, inputs: Any, labels: Any = None) -> Any:
        """One forward in evaluation mode.

        Returns:
            As :meth:`train_batch`; without a loss only the metric values.
        """
        self._need("eval_batch", training=False)
        self.mode = "eval"
        run = self._new_run(self._config, self.network)
        eval_step = self._eval_step(run.meters)
        batch = self._batch(inputs, labels)
        with loop.evaluating(self.network):
            return self._by_itself(run, lambda: eval_step(batch), batch, means=False)

    def predict_batch(self, inputs: Any) -> list[np.ndarray[Any, Any]]:
        """One forward in evaluation mode. Returns a list of arrays, one per output."""
        self.mode = "test"
        batch = self._batch(inputs, None)
        predict_step = self._predict_step()
        with loop.evaluating(self.network):
            return loop.as_arrays(predict_step(batch))

    def _batch(self, inputs: Any, labels: Any) -> Batch:
        splitter = self._splitter(None)
        splitter.example = splitter.join(inputs, labels)
        self._remember(splitter)
        return splitter.example

    def _by_itself(self, run: Run, action: Callable[[], tuple[Any, Any]], batch: Batch, *, means: bool) -> Any:
        """Run a batch, read its values alone, and leave the meters as if it had been added to what they had."""
        meters = run.meters
        before = meters.snapshot()
        meters.reset()
        outputs, parts = action()
        values = meters.read()
        meters.restore(before)
        meters.add_losses(parts, means=means)
        meters.add_metrics(step.detached(outputs), batch)
        names = self._loss.names if self._loss else ()
        losses = [np.asarray(values[name]) for name in names if len(names) == 1 or name != "loss"]
        metrics: list[Any] = []
        for routed in self._metrics:
            found = [values[name] for name in routed.names]
            metrics.append(found[0] if len(found) == 1 else found)
        if not self._metrics:
            return losses
        return (losses, metrics) if self._loss else metrics

    # ------------------------------------------------------------- save and load

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.network.named_parameters(remove_duplicate=False)}

    def _gradients(self) -> list[tuple[str, Tensor]]:
        assert self._optimizer is not None
        names = self._names()
        if self._masters is not None:
            names |= self._masters.names(names)
        stepped = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [(names[p], p.grad) for p in stepped if p in names and p.grad is not None]

    def _parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds besides the weights."""
        parts: dict[str, Stateful] = {"progress": self._progress}
        if self._optimizer is not None:
            names = self._names()
            if self._masters is not None:
                names |= self._masters.names(names)
                parts["masters"] = self._masters
            parts["optimizer"] = checkpoint.OptimizerPart(self._optimizer, names)
        if self._scheduler is not None and not callable(self._scheduler):
            parts["scheduler"] = self._scheduler
        if self._scaler is not None:
            parts["scaler"] = self._scaler
        return parts

    def save(self, path: str | os.PathLike[str], training: bool = True, *, format: str = "pt2") -> None:
        """Write the model.

        Args:
            path: A file prefix such as ``"output/lenet"``; dots in the name are fine; its folder is created.
            training: True writes the weights to ``<path>.pt`` (a plain state dict) and, when an optimizer is
                prepared, what training needs to ``<path>.state.pt``. False writes a program for inference with a
                dynamic batch dimension, which needs ``Model(inputs=[InputSpec])`` or one batch run before.
            format: Of the program: ``"pt2"`` (``torch.export``, to ``<path>.pt2``) or ``"onnx"``.

        Raises:
            ValueError: The path is a folder.
            OSError: The disk is full or cannot be written; an older checkpoint is whole.
        """
        prefix = checkpoint.prefix_of(path, where="save")
        if format not in ("pt2", "onnx"):
            raise ValueError(f"save: format={format!r}; accepted: 'pt2', 'onnx'")
        env = self._environment()
        if not training:
            args, kwargs = self._example_inputs()
            if env.rank == 0:
                write = export.export_program if format == "pt2" else export.export_onnx
                write(self.network, args, kwargs, prefix.with_name(f"{prefix.name}.{format}"))
            return
        strategy = self._strategy or choose("auto", env)
        weights = strategy.full_state(self.network)
        if env.rank == 0:
            parts = self._running.parts if self._running is not None else self._parts()
            state = {name: part.state_dict() for name, part in parts.items()}
            step = self._progress.global_step
            checkpoint.write(prefix, weights, state if self._optimizer is not None else None, step=step)

    def _example_inputs(self) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        if self._inputs is not None and all(spec is not None and spec.shape for spec in self._inputs.specs):
            made = []
            for spec in self._inputs.specs:
                assert spec is not None and isinstance(spec.dtype, torch.dtype)
                shape = [2 if size is None or i == 0 else size for i, size in enumerate(spec.shape)]
                made.append(torch.zeros(shape, dtype=spec.dtype, device=self._device))
            return tuple(made), {}
        if self._example is not None:
            return self._example.args, self._example.kwargs
        raise RuntimeError(
            "save(training=False) needs example inputs: Model(net, inputs=[InputSpec([None, ...], dtype)]), or run "
            "one batch first (fit, evaluate, predict or predict_batch)"
        )

    def load(self, path: str | os.PathLike[str], skip_mismatch: bool = False, reset_optimizer: bool = False) -> Model:
        """Read what :meth:`save` wrote, or a plain state dict saved by torch.

        Nothing in a file is executed. Works before or after ``prepare``.

        Args:
            path: The prefix, with or without ``.pt``; or any file with a state dict.
            skip_mismatch: Leave out weights that are missing or have another shape, with a warning. The
                optimizer's state is left out too.
            reset_optimizer: Leave out the optimizer's and the scheduler's state, and the step counters.

        Returns:
            The model.

        Raises:
            FileNotFoundError: There is no such file.
            hapi.CheckpointError: It is damaged or unsafe; the message names it.
            ValueError: It does not fit the network or the optimizer.
        """
        prefix = checkpoint.prefix_of(path, where="load")
        self._environment()
        weights = checkpoint.read_weights(prefix, Path(path), verify=not reset_optimizer)
        source = f"{prefix}.pt"
        state = None if skip_mismatch or reset_optimizer else checkpoint.read_state(prefix)
        mine = self._parts().get("optimizer")
        if state is not None and isinstance(mine, checkpoint.OptimizerPart) and "optimizer" in state:
            mine.fitted(state["optimizer"])  # refuse before anything has changed
        missing, mismatched, unexpected = checkpoint.load_network(
            self.network, weights, skip_mismatch=skip_mismatch, source=source
        )
        for name in [*missing, *mismatched]:
            warnings.warn(f"load: skip loading for {name}", UserWarning, stacklevel=2)
        if unexpected:
            warnings.warn(f"load: {source} has unexpected weights: {unexpected[:8]}", UserWarning, stacklevel=2)
        if self._masters is not None:
            self._masters.refresh()
        self._pending_state = None if state is None else (state, source)
        self._restore_pending()
        return self

    def _restore_pending(self) -> None:
        """Put back the training state as far as its owners exist; the rest waits for ``prepare``."""
        if self._pending_state is None:
            return
        state, source = self._pending_state
        self._progress.load_state_dict(state["progress"])
        if self._optimizer is None:
            return
        for name, part in self._parts().items():
            if name in state and name != "progress":
                part.load_state_dict(state[name])
        if "scaler" in state and self._scaler is None:
            warnings.warn(f"load: {source} holds a GradScaler's state, the model has none", UserWarning, stacklevel=3)
        self._pending_state = None

    # -------------------------------------------------------------------- others

    def parameters(self) -> list[nn.Parameter]:
        """The network's parameters."""
        return list(self.network.parameters())

    def summary(self, input_size: Any = None, dtype: Any = None) -> dict[str, Any]:
        """Print a table of the network's layers. See :func:`hapi.summary`.

        Args:
            input_size: A shape, or a list of shapes. Default: from ``Model(inputs=[InputSpec(...)])``.
            dtype: The inputs' dtypes.
        """
        if input_size is None and self._inputs is not None and all(self._inputs.specs):
            input_size = [spec for spec in self._inputs.specs if spec is not None]
        if input_size is None and self._example is not None:
            example = self._example
            keywords: dict[str, Any] = dict(example.kwargs)
            return summary(self.network, input=example.args, **keywords)
        if input_size is None:
            raise ValueError("summary: give input_size, for example (1, 1, 28, 28)")
        return summary(self.network, input_size, dtype)

    @property
    def stop_training(self) -> bool:
        """Whether training was asked to end. Setting it to True ends ``fit`` at the next batch."""
        return self._control.stop is not None

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        if value:
            self._control.request_stop("stop_training")
        else:
            self._control.stop = None
