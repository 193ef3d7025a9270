from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hapi.datasets import _download
from tests.helpers.http import FileServer, serve_files


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(_download, "BACKOFF_S", 0.001)
    with serve_files() as state:
        yield state


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home folder without data, and no HAPI_DATA_HOME."""
    monkeypatch.delenv("HAPI_DATA_HOME", raising=False)
    folder = tmp_path / "user"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    return folder


@pytest.fixture
def idx() -> Callable[[np.ndarray], bytes]:
    """uint8 array -> the bytes of an IDX file."""

    def encode(array: np.ndarray) -> bytes:
        assert array.dtype == np.uint8
        return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()

    return encode
