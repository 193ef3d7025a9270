"""Metrics: exact over batches and ranks, without a wait for the device until they are read."""

from hapi.metrics.adapters import ReferenceMetric, as_metric, by_name
from hapi.metrics.auc import Auc
from hapi.metrics.base import Metric
from hapi.metrics.classification import Accuracy, accuracy
from hapi.metrics.confusion import F1, ConfusionMatrix, Precision, Recall
from hapi.metrics.mean import FunctionMetric, Mean
from hapi.metrics.perplexity import Perplexity
from hapi.metrics.regression import MAE, MSE, R2
from hapi.metrics.torch_metric import TorchMetric

__all__ = [
    "Metric",
    "Accuracy",
    "Precision",
    "Recall",
    "F1",
    "Auc",
    "MSE",
    "MAE",
    "R2",
    "Mean",
    "Perplexity",
    "ConfusionMatrix",
    "FunctionMetric",
    "ReferenceMetric",
    "TorchMetric",
    "as_metric",
    "by_name",
    "accuracy",
]
