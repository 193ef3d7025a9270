"""The options of a fit, checked once and frozen. Everything a user can get wrong here fails before the first batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from hapi.errors import suggest

__all__ = ["FitConfig", "Precision", "check_int", "check_number"]

Interval = Literal["step", "epoch"] | None


def check_int(name: str, value: object, least: int = 1, *, where: str = "fit") -> int:
    """``value`` if it is an int of at least ``least``; else ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{where}: {name} must be an int of at least {least}, not {value!r}")
    return value


def check_number(name: str, value: object, *, where: str) -> float:
    """``value`` if it is a number above 0; else ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{where}: {name} must be a number above 0, not {value!r}")
    return float(value)


_SCALER_OPTIONS = {
    "init_loss_scaling": "init_scale",
    "incr_ratio": "growth_factor",
    "decr_ratio": "backoff_factor",
    "incr_every_n_steps": "growth_interval",
}
_AMP_KEYS = (
    "level",
    "dtype",
    *_SCALER_OPTIONS,
    "decr_every_n_nan_or_inf",
    "use_dynamic_loss_scaling",
)
_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Precision:
    """Mixed precision, resolved.

    Attributes:
        dtype: What autocast computes in; None for full precision.
        master_weights: The network itself is cast; the optimizer works on float32 copies (level O2).
        scaler: Arguments of ``torch.amp.GradScaler``; None where gradients are not scaled.
        dynamic: Whether the scale adapts.
    """

    dtype: torch.dtype | None = None
    master_weights: bool = False
    scaler: dict[str, Any] | None = None
    dynamic: bool = True

    @staticmethod
    def parse(amp: Any) -> Precision:
        """From None, "bf16", "fp16", "O0", "O1", "O2" or a dict with the reference's keys.

        Raises:
            ValueError: An unknown word or key.
        """
        if amp is None or amp is False or amp == "O0":
            return Precision()
        if isinstance(amp, str):
            if amp in _DTYPES:
                return Precision._of(_DTYPES[amp], "O1", {})
            if amp in ("O1", "O2"):
                return Precision._of(torch.float16, amp, {})
            options = ["bf16", "fp16", "O0", "O1", "O2"]
            raise ValueError(f"prepare: amp={amp!r}; accepted: None, {options} or a dict{suggest(amp, options)}")
        if not isinstance(amp, dict):
            raise ValueError(f"prepare: amp={amp!r}; accepted: None, 'bf16', 'fp16', 'O0', 'O1', 'O2' or a dict")
        for key in amp:
            if key in ("custom_white_list", "custom_black_list", "custom_black_varnames"):
                raise ValueError(
                    f"prepare: amp[{key!r}]: torch's autocast has no operator lists. "
                    "Wrap those layers in torch.autocast(..., enabled=False) in forward instead"
                )
            if key not in _AMP_KEYS:
                raise ValueError(f"prepare: amp[{key!r}]; accepted keys: {list(_AMP_KEYS)}{suggest(key, _AMP_KEYS)}")
        level, dtype = amp.get("level", "O1"), amp.get("dtype", "fp16")
        if level not in ("O0", "O1", "O2"):
            raise ValueError(f"prepare: amp['level']={level!r}; accepted: 'O0', 'O1', 'O2'")
        resolved = _DTYPES.get(dtype, dtype)
        if resolved not in (torch.bfloat16, torch.float16):
            raise ValueError(f"prepare: amp['dtype']={dtype!r}; accepted: 'bf16', 'fp16'")
        return Precision() if level == "O0" else Precision._of(resolved, level, amp)

    @staticmethod
    def _of(dtype: torch.dtype, level: str, options: dict[str, Any]) -> Precision:
        if options.get("decr_every_n_nan_or_inf", 1) != 1:
            raise ValueError("prepare: amp['decr_every_n_nan_or_inf']: torch backs off at every overflow; accepted: 1")
        scaler = None
        dynamic = bool(options.get("use_dynamic_loss_scaling", True))
        given = {theirs: options[ours] for ours, theirs in _SCALER_OPTIONS.items() if ours in options}
        for name, value in given.items():
            check_number(f"amp: {name}", value, where="prepare")
        # bfloat16 has float32's range: nothing underflows, so nothing is scaled unless somebody asks.
        if dtype is torch.float16 or given:
            scaler = given
        return Precision(dtype, level == "O2", scaler, dynamic)


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Everything that shapes the loop, resolved.

    Attributes:
        epochs: Epochs to run; None: until ``num_iters`` steps are done.
        num_iters: Optimizer steps to run at most.
        accumulate: Micro-batches per optimizer step.
        clip_norm: Largest global gradient norm.
        clip_value: Largest absolute gradient entry.
        scheduler_interval: When the scheduler steps.
        log_freq: Batches between log points.
        eval_freq: Epochs between evaluations.
        precision: Mixed precision.
        seed: Of the order of samples.
    """

    epochs: int | None = 1
    num_iters: int | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    scheduler_interval: Interval = "step"
    log_freq: int = 10
    eval_freq: int = 1
    precision: Precision = field(default_factory=Precision)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs is not None:
            check_int("epochs", self.epochs)
        if self.num_iters is not None:
            check_int("num_iters", self.num_iters)
        check_int("accumulate_grad_batches", self.accumulate)
        check_int("log_freq", self.log_freq)
        check_int("eval_freq", self.eval_freq)
        if self.clip_norm is not None:
            check_number("clip_grad_norm", self.clip_norm, where="prepare")
        if self.clip_value is not None:
            check_number("clip_grad_value", self.clip_value, where="prepare")
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError("prepare: give clip_grad_norm or clip_grad_value, not both")
