"""Callbacks: what ``fit``, ``evaluate`` and ``predict`` tell, and what can be asked of them on the way."""

from hapi.callbacks.base import Callback
from hapi.callbacks.batch_size_finder import BatchSizeFinder
from hapi.callbacks.board import BoardLogger
from hapi.callbacks.checkpoint import ModelCheckpoint
from hapi.callbacks.csv import CSV
from hapi.callbacks.csv_logger import CSVLogger
from hapi.callbacks.device_stats import DeviceStats
from hapi.callbacks.early_stopping import EarlyStopping
from hapi.callbacks.ema import EMA
from hapi.callbacks.gradient_monitor import GradientMonitor
from hapi.callbacks.history import History
from hapi.callbacks.jsonlines import JSONLines
from hapi.callbacks.lambda_callback import LambdaCallback
from hapi.callbacks.logger import Logger
from hapi.callbacks.lr_finder import LearningRateFinder
from hapi.callbacks.lr_scheduler import LRScheduler
from hapi.callbacks.mlflow import MLflow
from hapi.callbacks.prediction_writer import PredictionWriter
from hapi.callbacks.profiler import ProfilerCallback
from hapi.callbacks.progress import ProgBarLogger
from hapi.callbacks.reduce_lr import ReduceLROnPlateau
from hapi.callbacks.swa import SWA
from hapi.callbacks.tensorboard import TensorBoard
from hapi.callbacks.terminate_on_nan import TerminateOnNaN
from hapi.callbacks.throughput import Throughput
from hapi.callbacks.timer import Timer
from hapi.callbacks.visualdl import VisualDL
from hapi.callbacks.wandb import Wandb, WandbCallback

__all__ = [
    "BatchSizeFinder",
    "BoardLogger",
    "Callback",
    "CSV",
    "CSVLogger",
    "DeviceStats",
    "EMA",
    "EarlyStopping",
    "GradientMonitor",
    "History",
    "JSONLines",
    "LRScheduler",
    "LambdaCallback",
    "LearningRateFinder",
    "Logger",
    "MLflow",
    "ModelCheckpoint",
    "PredictionWriter",
    "ProfilerCallback",
    "ProgBarLogger",
    "ReduceLROnPlateau",
    "TensorBoard",
    "SWA",
    "TerminateOnNaN",
    "Throughput",
    "Timer",
    "VisualDL",
    "Wandb",
    "WandbCallback",
]
