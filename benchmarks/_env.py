"""Virtual environments of the frameworks that hapi is compared with: built on first use, kept, never hapi's own."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"


# What each peer's environment holds beside torch; Paddle's has no torch. numpy's version is the constraints'.
PEERS: dict[str, tuple[str, ...]] = {
    "keras": ("keras==3.15.1",),
    "lightning": ("lightning==2.6.6",),
    "ignite": ("pytorch-ignite==0.5.5", "numpy"),
    "poutyne": ("poutyne==1.19.0",),
    "skorch": ("skorch==1.4.0",),
    "accelerate": ("accelerate==1.15.0",),
    "paddle": ("paddlepaddle==3.3.1",),
}


class EnvError(Exception):
    """An environment cannot be built; the text says why."""


def python_of(folder: Path, name: str, requirements: Sequence[str], *, torch: bool = True) -> Path:
    """The interpreter of the environment ``name`` below ``folder``, built if it is not there as asked.

    Args:
        folder: Where environments are kept; made, and hidden from git, if it is not there.
        name: Of the environment.
        requirements: What is installed, under the project's constraints.
        torch: Whether torch is installed too, before them.

    Raises:
        EnvError: pip failed, or no environment can be made.
    """
    home, mark = folder / name, folder / name / "built.json"
    python = home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    wanted = {
        "python": sys.version,
        "requirements": list(requirements),
        "torch": torch,
        "constraints": CONSTRAINTS.read_text(),
    }
    if mark.exists() and json.loads(mark.read_text()) == wanted:
        return python
    print(f"building the environment {home} ({', '.join(requirements)}) ...", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    try:
        venv.create(home, with_pip=True)
        # torch first and pinned: what comes after it takes what is there.
        for packages in ([["torch"]] if torch else []) + [list(requirements)]:
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            done = subprocess.run([*pip, "-c", str(CONSTRAINTS), *packages], capture_output=True, text=True)
            if done.returncode:
                reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
                raise EnvError(f"pip install {' '.join(packages)}: {reasons[0] if reasons else done.returncode}")
    except (OSError, subprocess.CalledProcessError) as exc:
        raise EnvError(f"{home}: {exc}") from exc
    mark.write_text(json.dumps(wanted))
    return python


def interpreters(names: Iterable[str], folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """The interpreter of each contender, named ``framework/form``; and why some have none."""
    found: dict[str, Path] = {}
    failures: dict[str, str] = {}
    for framework, group in itertools.groupby(names, lambda name: name.partition("/")[0]):
        members, wanted = list(group), PEERS.get(framework)
        try:
            has_torch = framework != "paddle"
            python = python_of(folder, framework, wanted, torch=has_torch) if wanted else Path(sys.executable)
            found.update(dict.fromkeys(members, python))
        except EnvError as exc:
            failures.update(dict.fromkeys(members, f"not installed: {exc}"))
    return found, failures
