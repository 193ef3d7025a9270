"""Virtual environments of the frameworks that hapi is compared with: built on first use, kept, never hapi's own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"


class EnvError(Exception):
    """An environment cannot be built; the text says why."""


def python_of(folder: Path, name: str, requirements: Sequence[str]) -> Path:
    """The interpreter of the environment ``name`` below ``folder``, built if it is not there as asked.

    Args:
        folder: Where environments are kept; made, and hidden from git, if it is not there.
        name: Of the environment.
        requirements: What is installed beside torch, under the project's constraints.

    Raises:
        EnvError: pip failed, or no environment can be made.
    """
    home, mark = folder / name, folder / name / "built.json"
    python = home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    wanted = {
        "python": sys.version,
        "requirements": list(requirements),
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
        for packages in (["torch"], list(requirements)):
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            done = subprocess.run([*pip, "-c", str(CONSTRAINTS), *packages], capture_output=True, text=True)
            if done.returncode:
                reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
                raise EnvError(f"pip install {' '.join(packages)}: {reasons[0] if reasons else done.returncode}")
    except (OSError, subprocess.CalledProcessError) as exc:
        raise EnvError(f"{home}: {exc}") from exc
    mark.write_text(json.dumps(wanted))
    return python
