"""hapi: high-level training for PyTorch, on one card or many, with the same file.

>>> import hapi
>>> model = hapi.Model(net).prepare("adam", "cross_entropy", "accuracy")  # doctest: +SKIP
>>> model.fit(train_data, eval_data, batch_size=64, epochs=2)  # doctest: +SKIP
"""

import gc
import importlib
from typing import TYPE_CHECKING, Any

# A thousand small objects more make Python look through all of torch's for garbage: 0.1 s for nothing.
_collects = gc.isenabled()
gc.disable()

from hapi import callbacks, distributed, metrics
from hapi.data.batch import InputSpec
from hapi.data.sampler import DistributedBatchSampler
from hapi.distributed import DataParallel, notebook_launch
from hapi.engine.checkpoint import CheckpointError
from hapi.engine.rng import seed_everything
from hapi.metrics import Metric
from hapi.model import Model
from hapi.summary import flops, summary
from hapi.tune import tune

if TYPE_CHECKING:
    from hapi import datasets

if _collects:
    gc.enable()
del _collects, gc

__version__ = "0.1.0"

__all__ = [
    "Model",
    "InputSpec",
    "Metric",
    "summary",
    "flops",
    "tune",
    "seed_everything",
    "DistributedBatchSampler",
    "DataParallel",
    "notebook_launch",
    "CheckpointError",
    "callbacks",
    "datasets",
    "distributed",
    "metrics",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Scripts import the dataset that they want; the others' modules can wait.
    if name == "datasets":
        return importlib.import_module("hapi.datasets")
    raise AttributeError(f"module 'hapi' has no attribute {name!r}")
