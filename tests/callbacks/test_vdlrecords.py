from __future__ import annotations

import os
import random
import stat
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from hapi.callbacks import _vdlrecords
from hapi.callbacks._vdlrecords import frame, load, newest, records, repair, whole
from tests.helpers.launching import sandbox


def record(kind: str, *args: Any) -> bytes:
    made = getattr(load("visualdl.component.base_component"), kind)(*args, walltime=1_795_188_022_295)
    return frame(made.SerializeToString())


def scalar(step: int, tag: str = "train/loss") -> bytes:
    return record("scalar", tag, 0.5 * step, step)


META = record("meta_data", "meta_data_tag", "run")


def file_of(folder: Path, *frames: bytes, name: str = "vdlrecords.1.log") -> Path:
    path = folder / name
    path.write_bytes(b"".join(frames))
    return path


def steps(path: Path) -> list[int]:
    return [value.id for value in records(path) if value.WhichOneof("one_value") == "value"]


def read_by_visualdl(path: Path) -> list[int]:
    reader = load().LogReader(file_path=str(path))
    return [value.id for tag in reader.get_tags().get("scalar", []) for value in reader.get_data("scalar", tag)]


def test_a_whole_file_is_left_alone(tmp_path: Path) -> None:
    path = file_of(tmp_path, META, scalar(1), scalar(2))
    before = path.stat()
    assert whole(path)
    assert not repair(path)
    assert not repair(path, last_step=2)
    assert path.stat() == before
    assert steps(path) == read_by_visualdl(path) == [1, 2]


def test_an_empty_file_is_whole(tmp_path: Path) -> None:
    assert not repair(file_of(tmp_path))


def test_a_file_cut_anywhere_keeps_its_whole_records(tmp_path: Path) -> None:
    frames = [META, scalar(1), scalar(2), scalar(3)]
    content = b"".join(frames)
    ends = [sum(map(len, frames[:count])) for count in range(len(frames) + 1)]
    for cut in range(len(content)):
        path = file_of(tmp_path, content[:cut])
        assert repair(path) == (cut not in ends), cut
        assert path.stat().st_size == max(end for end in ends if end <= cut)
        assert os.listdir(tmp_path) == [path.name]
        with open(path, "ab") as file:
            file.write(scalar(9))
        assert read_by_visualdl(path)[-1] == 9


def test_records_of_later_steps_go_and_what_belongs_to_the_run_stays(tmp_path: Path) -> None:
    hparam = record("hparam", "run", {"lr": 0.1}, ["eval/acc"])
    frames = [META, hparam, scalar(1), scalar(2, "eval/loss"), scalar(3), scalar(4), scalar(2, "eval/acc"), scalar(5)]
    path = file_of(tmp_path, *frames, b"\x07")
    assert repair(path, last_step=2)
    assert path.read_bytes() == b"".join(frames[i] for i in (0, 1, 2, 3, 6))
    assert repair(path, last_step=0)
    assert path.read_bytes() == META + hparam
    assert not repair(path, last_step=0)


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff" * 8 + b"rest",  # a length of 16 EiB
        (1 << 40).to_bytes(8, "little") + b"rest",
        bytes(64),  # after a power failure
        frame(b"\x0a"),  # no protobuf
        frame(b"\x0a\x02\x08\x01"),  # a value without content
        frame(b"\x12\x00"),  # no value
    ],
)
def test_what_visualdl_cannot_read_goes_without_being_read_into_memory(tmp_path: Path, damage: bytes) -> None:
    path = file_of(tmp_path, META, scalar(1), damage)
    tracemalloc.start()
    assert not whole(path)
    assert repair(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert path.read_bytes() == META + scalar(1)


def test_a_damaged_record_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    path = file_of(tmp_path, META, scalar(1), frame(b"\xff\xff\xff"), scalar(2))
    assert repair(path)
    assert read_by_visualdl(path) == [1, 2]


def test_after_any_flipped_byte_visualdl_reads_the_repaired_file(tmp_path: Path) -> None:
    content = META + b"".join(scalar(step) for step in range(1, 6)) + record("text", "note", "hello", 6)
    draw = random.Random(0)
    repaired = 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[draw.randrange(len(META), len(content))] = draw.randrange(256)
        path = file_of(tmp_path, bytes(damaged))
        repaired += repair(path)
        read_by_visualdl(path)
        assert whole(path)
    assert repaired > 100


@pytest.mark.parametrize(
    "content", [b"hi", b"hello, this is a text\n" * 9, b"\x89PNG\r\n\x1a\n" + bytes(99), bytes(99)]
)
def test_what_is_no_record_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = file_of(tmp_path, content)
    assert not whole(path)
    with pytest.raises(ValueError, match=r"vdlrecords\.1\.log' is not a record file"):
        repair(path)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == [path.name]


def test_the_file_is_replaced_at_once_and_under_no_name_that_the_board_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path, META, b"\x07")
    path.chmod(0o640)
    replace = os.replace

    def watched(source: Any, target: Any) -> None:
        assert Path(source).read_bytes() == META
        assert path.read_bytes() == META + b"\x07"
        assert [name for name in os.listdir(tmp_path) if _vdlrecords.NAME in name] == [path.name]
        replace(source, target)

    monkeypatch.setattr(_vdlrecords.os, "replace", watched)
    assert repair(path)
    assert path.read_bytes() == META
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_repair_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of(tmp_path, META, b"\x07")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_vdlrecords.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        repair(path)
    assert path.read_bytes() == META + b"\x07"
    assert os.listdir(tmp_path) == [path.name]


def test_a_long_file_is_repaired_in_a_moment(tmp_path: Path) -> None:
    path = file_of(tmp_path, META, *[scalar(1)] * 100_000, *[scalar(2)] * 100_000, b"\x07")
    begun = time.perf_counter()
    assert repair(path, last_step=1)
    assert time.perf_counter() - begun < 5  # 0.4 s where this was written
    assert path.stat().st_size == len(META) + 100_000 * len(scalar(1))


def test_a_file_that_a_power_failure_filled_with_zeros_is_not_walked_through(tmp_path: Path) -> None:
    path = file_of(tmp_path, META)
    os.truncate(path, 1 << 33)
    begun = time.perf_counter()
    assert repair(path)
    assert time.perf_counter() - begun < 5
    assert path.read_bytes() == META


def test_the_newest_is_the_last_by_name(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    (tmp_path / "events.out.tfevents").touch()
    assert newest(tmp_path) is None
    first, second = file_of(tmp_path, name="vdlrecords.9.log"), file_of(tmp_path, name="vdlrecords.8.log")
    os.utime(second, (2e9, 2e9))
    assert newest(tmp_path) == first


def test_without_visualdl_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "visualdl", None)
    with pytest.raises(ModuleNotFoundError, match="pip install visualdl"):
        load()


@pytest.mark.parametrize("home", ["/dev/null", "/proc/nowhere", None])
def test_a_home_that_cannot_be_written_to(tmp_path: Path, home: str | None) -> None:
    (tmp_path / "tmp").mkdir()
    code = """
        import os, pwd, sys, tempfile
        home = os.environ.get("HOME")
        if home is None:
            pwd.getpwuid = lambda uid: type("Entry", (), {"pw_dir": "/dev/null"})
        from hapi.callbacks._vdlrecords import load
        assert load().LogWriter and load("visualdl.component.base_component").scalar
        assert os.environ.get("HOME") == home
        assert os.listdir(tempfile.gettempdir()) == [], os.listdir(tempfile.gettempdir())
        print("fine")
    """
    with sandbox(tmp_path) as box:
        box.script("home.py", code)
        command = [sys.executable, "home.py"]
        if home is None:
            command = ["env", "-u", "HOME", *command]
        ended = box.run(command, env={"HOME": home or "/dev/null", "TMPDIR": str(tmp_path / "tmp")})
    assert (ended.code, ended.out) == (0, "fine\n"), ended.err
