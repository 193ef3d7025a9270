"""Fashion-MNIST: 70,000 articles of clothing in MNIST's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from hapi.datasets.mnist import MNIST

__all__ = ["FashionMNIST"]


class FashionMNIST(MNIST):
    """Articles of clothing, 28 x 28 in grey: 60,000 for training and 10,000 for testing.

    Source: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST", 2017.

    Samples, arguments, search and download are those of :class:`hapi.datasets.MNIST`; the folder is
    ``fashion-mnist``. Since the files have the same names as MNIST's, files that lie directly in
    ``$HAPI_DATA_HOME`` are not taken to be these. The known hashes are MD5: they find damage, not malice.

    Example:
        >>> image, label = FashionMNIST(mode="test")[0]
    """

    folder: ClassVar[str] = "fashion-mnist"
    mirrors: ClassVar[Sequence[str]] = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
    digests: ClassVar[Mapping[str, str]] = {
        "train-images-idx3-ubyte": "md5:f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "md5:9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "md5:8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "md5:15d484375f8d13e6eb1aabb0c3f46965",
    }
    class_names: ClassVar[Sequence[str]] = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )
    bare_home: ClassVar[bool] = False
