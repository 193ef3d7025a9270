"""Datasets that are ready to train on: float32 in [0, 1], channels first, integer labels."""

from hapi.datasets._download import DatasetNotFoundError
from hapi.datasets.cifar import Cifar10, Cifar100
from hapi.datasets.digits import Digits
from hapi.datasets.fashion_mnist import FashionMNIST
from hapi.datasets.folder import DatasetFolder, ImageFolder
from hapi.datasets.memory import InMemoryImages
from hapi.datasets.mnist import MNIST

__all__ = [
    "MNIST",
    "FashionMNIST",
    "Cifar10",
    "Cifar100",
    "Digits",
    "DatasetFolder",
    "ImageFolder",
    "InMemoryImages",
    "DatasetNotFoundError",
]
