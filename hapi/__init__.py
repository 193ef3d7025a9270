"""hapi: high-level training for PyTorch, on one card or many, with the same file.

>>> import hapi
>>> model = hapi.Model(net).prepare("adam", "cross_entropy", "accuracy")  # doctest: +SKIP
>>> model.fit(train_data, eval_data, batch_size=64, epochs=2)  # doctest: +SKIP
"""

from hapi import callbacks, datasets, distributed, metrics
from hapi.data.batch import InputSpec
from hapi.data.sampler import DistributedBatchSampler
from hapi.distributed import DataParallel, notebook_launch
from hapi.engine.checkpoint import CheckpointError
from hapi.engine.rng import seed_everything
from hapi.metrics import Metric
from hapi.model import Model
from hapi.summary import flops, summary
from hapi.tune import tune

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
