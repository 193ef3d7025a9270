"""What runs in a rank's process before the user's script, and the guard that outlives the launcher.

The launcher runs this file by its path, not as ``hapi.distributed._bootstrap``: only the standard library is
imported here, so a rank reports errors from the first millisecond on, and torch is imported by the script.

* ``_bootstrap.py --script train.py [args]`` and ``--module pkg.train [args]``: run it as plain python would,
  but die with the launcher, write stacks to the log on SIGUSR1, and leave an error file behind an exception.
* ``_bootstrap.py --guard ID``: wait until the launcher is gone, however it went; kill what its ranks left.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Sequence

__all__ = ["LAUNCH_ID", "die_with_parent", "kill_marked", "main", "marked", "trim", "write_error_file"]

#: Every process of a launch carries this variable, and so does everything that those start.
LAUNCH_ID = "HAPI_LAUNCH_ID"
#: Where a rank leaves its exception. torch's own name: its elastic launcher and ``@record`` use it too.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Run what the launcher asked for.

    Args:
        argv: ``--script PATH``, ``--module NAME`` or ``--guard ID``, then the script's own arguments.

    Returns:
        The exit code. ``sys.exit`` in the script passes through.
    """
    mode, target, *args = argv
    if mode == "--guard":
        return _guard(target)
    if "HAPI_LAUNCHER_PID" in os.environ:
        die_with_parent(int(os.environ["HAPI_LAUNCHER_PID"]))
    if os.environ.get("HAPI_MERGE_STDERR"):
        os.dup2(1, 2)  # one file per rank, and the order of lines kept
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        if mode == "--module":
            _run_module(target, args)
        else:
            _run_script(target, args)
    except SystemExit:
        raise
    except BaseException as exc:
        trim(exc, __file__, runpy.__file__, "<frozen runpy>")
        write_error_file(exc)
        sys.excepthook(type(exc), exc, exc.__traceback__)
        return 130 if isinstance(exc, KeyboardInterrupt) else 1
    return 0


def _run_script(path: str, args: Sequence[str]) -> None:
    sys.argv = [path, *args]
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    file_path = os.path.abspath(path)
    with open(file_path, "rb") as file:
        code = compile(file.read(), file_path, "exec")
    module = types.ModuleType("__main__")
    # Spawned DataLoader workers find the script by __file__ when __spec__ is None, as in plain python.
    module.__dict__.update(__file__=file_path, __spec__=None, __package__=None, __cached__=None)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _run_module(name: str, args: Sequence[str]) -> None:
    sys.argv = [name, *args]  # run_module puts the file's path in front
    sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def trim(exc: BaseException, *files: str) -> None:
    """Drop the outermost frames of the traceback that belong to ``files``: it then begins in the user's code."""
    frame = exc.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in files:
        frame = frame.tb_next
    exc.__traceback__ = frame


def write_error_file(exc: BaseException, path: str | None = None) -> None:
    """Leave the exception where the launcher looks for it, in the format of torch's elastic launcher.

    Args:
        exc: What ended this rank.
        path: None for the file that the launcher named; without one nothing is written.
    """
    path = path or os.environ.get(ERROR_FILE)
    if not path:
        return
    text = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
    now = time.time()
    report = {
        "message": {
            "message": f"{type(exc).__name__}: {exc}",
            "extraInfo": {"py_callstack": text, "timestamp": str(int(now)), "time": now},
        },
        "host": socket.gethostname(),
    }
    temporary = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        with open(temporary, "w") as file:
            json.dump(report, file)
        os.replace(temporary, path)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux; elsewhere nothing).

    Args:
        parent: The expected parent's process id. If it is gone already, this process exits at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def marked(launch_id: str) -> list[int]:
    """Process ids of all living processes that a launch started, however deep. Needs /proc; else empty.

    A launch inside a rank of another launch carries both ids, joined by a colon.
    """
    name = f"{LAUNCH_ID}=".encode()
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
            ids = [item[len(name) :] for item in file.read().split(b"\0") if item.startswith(name)]
            if any(launch_id.encode() in item.split(b":") for item in ids):
                found.append(int(entry))
    return found


def kill_marked(launch_id: str, timeout: float = 5.0) -> list[int]:
    """Kill all processes of a launch and wait until they are gone.

    Args:
        launch_id: The value of :data:`LAUNCH_ID` in their environment.
        timeout: Seconds to wait.

    Returns:
        The processes that are still there: stuck in the kernel.
    """
    deadline = time.monotonic() + timeout
    while left := marked(launch_id):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


def _guard(launch_id: str) -> int:
    """Block until the launcher's end of the pipe on stdin closes, then kill what it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    return 1 if kill_marked(launch_id) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
