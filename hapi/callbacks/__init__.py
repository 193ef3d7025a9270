"""Callbacks: what ``fit``, ``evaluate`` and ``predict`` tell, and what can be asked of them on the way."""

from hapi.callbacks.base import Callback
from hapi.callbacks.board import BoardLogger
from hapi.callbacks.checkpoint import ModelCheckpoint
from hapi.callbacks.csv_logger import CSVLogger
from hapi.callbacks.early_stopping import EarlyStopping
from hapi.callbacks.history import History
from hapi.callbacks.lambda_callback import LambdaCallback
from hapi.callbacks.logger import Logger
from hapi.callbacks.lr_scheduler import LRScheduler
from hapi.callbacks.progress import ProgBarLogger
from hapi.callbacks.reduce_lr import ReduceLROnPlateau
from hapi.callbacks.terminate_on_nan import TerminateOnNaN

__all__ = [
    "BoardLogger",
    "Callback",
    "CSVLogger",
    "EarlyStopping",
    "History",
    "LRScheduler",
    "LambdaCallback",
    "Logger",
    "ModelCheckpoint",
    "ProgBarLogger",
    "ReduceLROnPlateau",
    "TerminateOnNaN",
]
