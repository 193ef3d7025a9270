"""``python -m hapi.board LOGDIR``: VisualDL's board for curves written by :class:`hapi.callbacks.VisualDL`.

It is the package's own board, with what it needs to start: files of killed runs are repaired first, and when a run that
is resumed rewrites its file, the board is started anew, since it would read on in the middle of a record.

Example:
    ``python -m hapi.board log --port 8040``
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hapi.callbacks._vdlrecords import NAME, load, repair, whole
from hapi.distributed._bootstrap import die_with_parent

__all__ = ["main"]

_PORT = 8040  # VisualDL's own
_START_S = 120.0
_POLL_S = 1.0  # between looks at the files
_QUIET_S = 0.5  # a file that does not change for so long is not being written
_OUTPUT = 20_000  # bytes shown of a board that failed


class _BoardError(Exception):
    """The board cannot be shown; the text says why."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hapi.board",
        usage="python -m hapi.board LOGDIR [options]",
        description="Show curves written by hapi.callbacks.VisualDL in a browser, also while training runs.",
        epilog="Ctrl-C ends the board. Training does not notice.",
        allow_abbrev=False,
    )
    parser.add_argument("logdir", metavar="LOGDIR", type=Path, help="folder of the runs: VisualDL's log_dir")
    parser.add_argument(
        "--port", type=_port, help=f"port to listen on; default: {_PORT}, or any free one if that is taken"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; default: 127.0.0.1, this machine only. There is no password: whoever reaches "
        "the address can read the curves",
    )
    return parser


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: 1 to 65535")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """The command.

    Args:
        argv: Without the program's name; default: the process's own.

    Returns:
        0 after Ctrl-C, 1 if the board cannot be shown, or the board's own exit code if it ended by itself.

    Raises:
        SystemExit: With code 2 for a wrong command line, 0 for ``--help``, 143 after SIGTERM, 129 after SIGHUP.

    Example:
        >>> main(["log", "--port", "8040"])
        hapi.board: http://127.0.0.1:8040/app/scalar (Ctrl-C ends it)
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.logdir.is_dir():
        parser.error(f"LOGDIR={str(options.logdir)!r} is not a folder; give the log_dir of hapi.callbacks.VisualDL")
    try:
        with _signals_end_it(), tempfile.TemporaryDirectory(prefix="hapi-board-") as scratch:
            load()
            _mend(options.logdir)
            port = _free_port(options.host, options.port)
            return _show(options.logdir, options.host, port, Path(scratch))
    except KeyboardInterrupt:
        return 0
    except (_BoardError, ImportError) as exc:
        _say(f"error: {exc}", sys.stderr)
        return 1


def _say(text: str, stream: Any = None) -> None:
    print(f"hapi.board: {text}", file=stream or sys.stdout, flush=True)


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that the board and its folder do not stay."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    old = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------ files


def _folders(logdir: Path) -> Iterator[list[Path]]:
    """The record files of each folder that has some. The board shows the last."""
    for folder, _, names in os.walk(logdir, followlinks=True):
        if names := sorted(name for name in names if NAME in name):
            yield [Path(folder, name) for name in names]


def _mend(logdir: Path) -> None:
    """Repair files of runs that were killed; one that cannot be read would end the board."""
    problems = []
    for files in _folders(logdir):
        shown = files[-1]
        if len(files) > 1:
            _say(
                f"warning: {shown.parent} holds {len(files)} record files; the board shows only the newest, "
                f"{shown.name}. Move the others to folders of their own to see them",
                sys.stderr,
            )
        try:
            if not whole(shown) and _quiet(shown) and repair(shown):
                _say(f"repaired {shown}, whose writer was killed")
        except (OSError, ValueError) as exc:
            problems.append(str(exc))
    if not any(True for _ in _folders(logdir)):
        _say(f"there is no run of hapi.callbacks.VisualDL in {logdir} yet; one that begins will be shown", sys.stderr)
    if problems:
        raise _BoardError("the board cannot start with these files:\n  " + "\n  ".join(problems))


def _quiet(path: Path) -> bool:
    """Wait until a file that is not whole is left alone; False if its writer made it whole."""
    while True:
        before = _state(path)
        time.sleep(_QUIET_S)
        if whole(path):
            return False
        if _state(path) == before:
            return True


def _state(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _inodes(logdir: Path) -> dict[Path, int]:
    found = {}
    for files in _folders(logdir):
        with contextlib.suppress(FileNotFoundError):
            found[files[-1]] = files[-1].stat().st_ino
    return found


# ------------------------------------------------------------------------------------ board


def _free_port(host: str, port: int | None) -> int:
    """The port, if one can listen on it; without one, VisualDL's own or else any."""
    for candidate in (port,) if port else (_PORT, 0):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, candidate, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                return int(probe.getsockname()[1])
        except OSError as exc:
            problem = exc
    raise _BoardError(f"cannot listen on {host}, port {port or 'any'}: {problem.strerror}")


def _show(logdir: Path, host: str, port: int, scratch: Path) -> int:
    """Run the board until it ends, or an exception ends it. Returns its exit code."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
    told = False
    while True:
        inodes = _inodes(logdir)
        with _board(logdir, host, port, scratch) as process:
            _wait_alive(process, url)
            if process.poll() is None and not told:
                _say(f"{url}/app/scalar (Ctrl-C ends it)")
                told = True
            while process.poll() is None and not _rewritten(logdir, inodes):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
            if process.poll() is not None:
                return _failed(process.returncode, scratch)


def _rewritten(logdir: Path, inodes: dict[Path, int]) -> bool:
    """Whether a file was replaced since the last look."""
    now = _inodes(logdir)
    replaced = any(now.get(path, inode) != inode for path, inode in inodes.items())
    inodes.update(now)
    return replaced


@contextlib.contextmanager
def _board(logdir: Path, host: str, port: int, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """VisualDL's server as a child process."""
    command = [
        sys.executable,
        "-m",
        "visualdl.server.app",
        "--logdir",
        str(logdir),
        "--host",
        host,
        "--port",
        str(port),
    ]
    # Its cache would show points up to 20 s late. Without a language it fails for browsers that want neither English
    # nor Chinese. Telemetry sends data away, and lets the answer overwrite a file.
    command += ["--cache-timeout", "1", "--language", "en", "--disable-telemetry"]
    with open(scratch / "output", "wb") as output:
        process = subprocess.Popen(
            command,
            env=_environment(scratch),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the board
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _environment(scratch: Path) -> dict[str, str]:
    """This process's variables, with a home that visualdl can write to, and no proxy before this machine."""
    environment = {**os.environ, "NO_PROXY": "*", "no_proxy": "*", "PYTHONSAFEPATH": "1"}
    if not Path(load("visualdl.utils.dir").VDL_HOME).is_dir():
        # Packages of `pip install --user` lie in the real home.
        environment |= {"HOME": str(scratch), "PYTHONUSERBASE": site.getuserbase()}
    return environment


def _wait_alive(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the board answers, or has ended."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + _START_S
    while process.poll() is None:
        with contextlib.suppress(OSError), direct.open(f"{url}/alive", timeout=5):
            return
        if time.monotonic() > deadline:
            raise _BoardError(f"the board does not answer at {url} after {_START_S:g} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)


def _failed(code: int, scratch: Path) -> int:
    """Show what the board printed; return its exit code as a shell gives it."""
    output = (scratch / "output").read_bytes()[-_OUTPUT:].decode(errors="replace").strip()
    _say(f"error: VisualDL's board ended by itself with code {code}\n{output}", sys.stderr)
    return 128 - code if code < 0 else code or 1


if __name__ == "__main__":
    sys.exit(main())
