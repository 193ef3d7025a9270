from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hapi.datasets import DatasetNotFoundError, _download
from hapi.datasets._download import fetch
from tests.helpers.http import FileServer

CONTENT = bytes(range(256)) * 4000  # about 1 MB: several chunks
WRONG = b"another file" * 1000


def is_content(path: Path) -> None:
    if path.read_bytes() != CONTENT:
        raise ValueError(f"{path} has the wrong hash")


def get(server: FileServer, folder: Path, *mirrors: str, **kwargs: int) -> Path:
    return fetch("data.bin", [f"{server.url}/{m}/data.bin" for m in mirrors], folder, check=is_content, **kwargs)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_download_leaves_the_file_and_nothing_else(server: FileServer, tmp_path: Path) -> None:
    server.files["/a/data.bin"] = CONTENT
    path = get(server, tmp_path / "new" / "folder", "a")
    assert path == tmp_path / "new" / "folder" / "data.bin"
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["data.bin"]


def test_a_file_that_is_there_is_not_asked_for(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(CONTENT)
    get(server, tmp_path, "a")
    assert server.requests == []
    assert names(tmp_path) == ["data.bin"]


def test_a_cut_connection_is_resumed(server: FileServer, tmp_path: Path) -> None:
    server.files["/a/data.bin"] = CONTENT
    server.cuts["/a/data.bin"] = [300_000, 200_000]
    assert get(server, tmp_path, "a").read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, "bytes=300000-", "bytes=500000-"]
    assert names(tmp_path) == ["data.bin"]


def test_a_cut_connection_without_range_support_starts_anew(server: FileServer, tmp_path: Path) -> None:
    server.files["/a/data.bin"] = CONTENT
    server.cuts["/a/data.bin"] = [300_000]
    server.ranges = False
    assert get(server, tmp_path, "a").read_bytes() == CONTENT
    assert len(server.requests) == 2
    assert names(tmp_path) == ["data.bin"]


def test_a_later_call_resumes_what_an_earlier_one_left(server: FileServer, tmp_path: Path) -> None:
    server.files["/a/data.bin"] = CONTENT
    server.cuts["/a/data.bin"] = [100_000]
    with pytest.raises(DatasetNotFoundError, match=f"cut after 100000 of {len(CONTENT)} bytes"):
        get(server, tmp_path, "a", retries=1)
    assert names(tmp_path) == ["data.bin.part"]
    assert (tmp_path / "data.bin.part").read_bytes() == CONTENT[:100_000]
    assert get(server, tmp_path, "a").read_bytes() == CONTENT
    assert server.requests[-1][1] == "bytes=100000-"
    assert names(tmp_path) == ["data.bin"]


def test_what_cannot_be_resumed_is_not_kept(server: FileServer, tmp_path: Path) -> None:
    server.files["/a/data.bin"] = CONTENT
    server.cuts["/a/data.bin"] = [100_000] * 3
    server.ranges = False
    with pytest.raises(DatasetNotFoundError, match=r"cut.*\(3 attempts\)"):
        get(server, tmp_path, "a")
    assert len(server.requests) == 3
    assert names(tmp_path) == []


def test_a_cut_at_the_first_byte_leaves_no_empty_file(server: FileServer, tmp_path: Path) -> None:
    server.files["/a/data.bin"] = CONTENT
    server.cuts["/a/data.bin"] = [0]
    with pytest.raises(DatasetNotFoundError, match="cut after 0 of"):
        get(server, tmp_path, "a", retries=1)
    assert names(tmp_path) == []


def test_a_complete_part_is_not_downloaded_again(server: FileServer, tmp_path: Path) -> None:
    # As after a crash between the last byte and the rename.
    server.files["/a/data.bin"] = CONTENT
    (tmp_path / "data.bin.part").write_bytes(CONTENT)
    get(server, tmp_path, "a")
    assert server.requests == [("/a/data.bin", f"bytes={len(CONTENT)}-")]
    assert names(tmp_path) == ["data.bin"]


@pytest.mark.parametrize("stale", [WRONG, CONTENT + b"more"], ids=["shorter", "longer"])
def test_a_part_of_another_file_is_replaced(server: FileServer, tmp_path: Path, stale: bytes) -> None:
    server.files["/a/data.bin"] = CONTENT
    (tmp_path / "data.bin.part").write_bytes(stale)
    assert get(server, tmp_path, "a").read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [f"bytes={len(stale)}-", None]


def test_without_a_length_the_check_decides(server: FileServer, tmp_path: Path) -> None:
    server.announce_length = False
    server.files["/a/data.bin"] = server.files["/b/data.bin"] = CONTENT
    server.cuts["/a/data.bin"] = [50_000]
    assert get(server, tmp_path, "a", "b").read_bytes() == CONTENT
    assert [path for path, _ in server.requests] == ["/a/data.bin", "/b/data.bin"]


def test_a_wrong_file_sends_to_the_second_mirror(server: FileServer, tmp_path: Path) -> None:
    server.files.update({"/a/data.bin": WRONG, "/b/data.bin": CONTENT})
    assert get(server, tmp_path, "a", "b").read_bytes() == CONTENT
    assert server.requests == [("/a/data.bin", None), ("/b/data.bin", None)]
    assert names(tmp_path) == ["data.bin"]


def test_a_wrong_file_everywhere(server: FileServer, tmp_path: Path) -> None:
    server.files.update({"/a/data.bin": WRONG, "/b/data.bin": WRONG})
    with pytest.raises(DatasetNotFoundError, match=r"(?s)/a/data.bin: gave a wrong file.*/b/data.bin: gave a wrong"):
        get(server, tmp_path, "a", "b")
    assert names(tmp_path) == []


def test_404_everywhere_lists_each_mirror_and_the_way_out(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError) as caught:
        get(server, tmp_path, "a", "b")
    message = str(caught.value)
    for part in (f"{server.url}/a/data.bin: HTTP 404", f"{server.url}/b/data.bin: HTTP 404", str(tmp_path)):
        assert part in message
    assert "HAPI_DATA_HOME" in message
    assert len(server.requests) == 2, "a 404 is not tried again"
    assert isinstance(caught.value, FileNotFoundError)
    assert names(tmp_path) == []


def test_a_busy_server_is_asked_again(server: FileServer, tmp_path: Path) -> None:
    server.files["/a/data.bin"] = CONTENT
    server.statuses["/a/data.bin"] = [503, 429]
    assert get(server, tmp_path, "a").read_bytes() == CONTENT
    assert len(server.requests) == 3


def test_nobody_listens(server: FileServer, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        port = unused.getsockname()[1]
        with pytest.raises(DatasetNotFoundError, match="cannot be reached"):
            fetch("data.bin", [f"http://127.0.0.1:{port}/x", "not a url"], tmp_path, check=is_content)
    assert names(tmp_path) == []


def test_a_silent_server_times_out(server: FileServer, tmp_path: Path) -> None:
    server.files["/a/data.bin"] = CONTENT
    server.delay_s = 0.5
    with pytest.raises(DatasetNotFoundError, match="after 0 of"):
        fetch("data.bin", [f"{server.url}/a/data.bin"], tmp_path, check=is_content, retries=1, timeout=0.1)
    assert names(tmp_path) == []


def test_no_mirror_and_no_attempt(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match="no mirror is given"):
        fetch("data.bin", [], tmp_path, check=is_content)
    with pytest.raises(ValueError, match="retries must be at least 1, not 0"):
        fetch("data.bin", [], tmp_path, check=is_content, retries=0)


def test_an_unwritable_folder_is_found_out_before_any_download(server: FileServer, tmp_path: Path) -> None:
    # A file in the folder's place stops root, too; permissions do not.
    server.files["/a/data.bin"] = CONTENT
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DatasetNotFoundError, match=r"file/mnist cannot be written to.*HAPI_DATA_HOME"):
        get(server, tmp_path / "file" / "mnist", "a")
    assert server.requests == []
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="permissions do not stop root")
def test_a_read_only_folder(server: FileServer, tmp_path: Path) -> None:
    server.files["/a/data.bin"] = CONTENT
    tmp_path.chmod(0o555)
    with pytest.raises(DatasetNotFoundError, match="cannot be written to"):
        get(server, tmp_path, "a")
    assert server.requests == []
    assert names(tmp_path) == []


def test_a_full_disk_is_not_the_mirrors_fault(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_download.os, "fsync", no_space)
    server.files["/a/data.bin"] = server.files["/b/data.bin"] = CONTENT
    with pytest.raises(OSError, match="No space left") as caught:
        get(server, tmp_path, "a", "b")
    assert not isinstance(caught.value, DatasetNotFoundError)
    assert len(server.requests) == 1
    assert names(tmp_path) == []


FETCH_IN_A_PROCESS = """
import hashlib, sys
from pathlib import Path
from hapi.datasets._download import fetch

def check(path):
    if hashlib.sha256(path.read_bytes()).hexdigest() != sys.argv[3]:
        raise ValueError("wrong")

print("ready", flush=True)
sys.stdin.readline()
fetch("data.bin", [sys.argv[1]], Path(sys.argv[2]), check=check)
"""


@pytest.mark.skipif(not _download.HAVE_LOCKS, reason="this system has no file locks")
def test_processes_that_want_the_same_file_download_it_once(server: FileServer, tmp_path: Path) -> None:
    server.files["/a/data.bin"] = CONTENT
    server.delay_s = 0.3
    arguments = [f"{server.url}/a/data.bin", str(tmp_path), hashlib.sha256(CONTENT).hexdigest()]
    command = [sys.executable, "-c", FETCH_IN_A_PROCESS, *arguments]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in processes:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert server.requests == [("/a/data.bin", None)]
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert names(tmp_path) == ["data.bin"]


def lock_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_download, "HAVE_LOCKS", False)


def lock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(_download.fcntl, "flock", flock)


@pytest.mark.skipif(not _download.HAVE_LOCKS, reason="this system has no file locks to take away")
@pytest.mark.parametrize("without_locks", [lock_is_unknown, lock_is_refused])
def test_without_file_locks_each_process_has_its_own_part(
    server: FileServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    without_locks: Callable[[pytest.MonkeyPatch], None],
) -> None:
    without_locks(monkeypatch)
    server.files["/a/data.bin"] = CONTENT
    (tmp_path / "data.bin.part").write_bytes(b"somebody else's")
    server.cuts["/a/data.bin"] = [1000]
    assert get(server, tmp_path, "a").read_bytes() == CONTENT
    assert names(tmp_path) == ["data.bin", "data.bin.part"]
    assert (tmp_path / "data.bin.part").read_bytes() == b"somebody else's"
    with pytest.raises(DatasetNotFoundError):
        fetch("other.bin", [f"{server.url}/a/other.bin"], tmp_path, check=is_content)
    assert names(tmp_path) == ["data.bin", "data.bin.part"]
