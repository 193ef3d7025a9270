"""``python -m hapi.launch [options] train.py [args]``, and the same as ``hapirun``.

Example:
    ``python -m hapi.launch --gpus 0,1 train.py --epochs 3``
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from hapi.distributed.launcher import LaunchError, LaunchOptions, run
from hapi.errors import suggest

__all__ = ["main", "parse"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hapi.launch",
        usage="python -m hapi.launch [options] train.py [arguments of train.py]\n"
        "       python -m hapi.launch [options] -m package.train [arguments]",
        description="Run a training script on all GPUs of a machine, or of several machines.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--gpus",
        "--devices",
        dest="devices",
        metavar="0,1",
        help="GPUs to use, or 'cpu'; default: all visible",
    )
    add("--nproc", "--nproc_per_node", type=int, help="processes on this machine; default: one per GPU, or 1")
    add("--ips", help="addresses of all machines, a,b; run the same command on each", default="")
    add("--nnodes", help="number of machines, N or MIN:MAX")
    add("--master", metavar="HOST:PORT", help="where the machines meet")
    add("--master_port", "--start_port", type=int, help="port on the master for --ips; default: 29500")
    add("--node_rank", "--rank", type=int, help="this machine's place, 0 is the master")
    add("--log_dir", default="log", help="folder for workerlog.RANK")
    add("--max_restarts", "--max_restart", type=int, default=0, help="restarts of all ranks after a failure")
    add("--backend", default="auto", help="gloo, nccl or auto")
    add("--grace", type=float, default=30.0, metavar="S", help="seconds to finish after SIGTERM or Ctrl-C")
    add("--timeout", type=float, default=300.0, metavar="S", help="seconds to wait for the other machines")
    add("--peer_timeout", type=float, default=60.0, metavar="S", help="seconds of silence = machine lost")
    add("--dry_run", action="store_true", help="print what would be run, and end")
    add("-m", "--module", action="store_true", help="train.py is the name of a module")
    return parser


def parse(argv: Sequence[str]) -> LaunchOptions:
    """Read the command line. Options are ours up to the script's name, and the script's after it.

    Args:
        argv: Without the program's name. ``--log-dir`` and ``--log_dir`` are the same.

    Raises:
        SystemExit: With code 2 and a text on stderr, for what is not understood; with 0 for ``--help``.
        ValueError: The values contradict each other.
    """
    parser = _parser()
    actions = {name: action for action in parser._actions for name in action.option_strings}
    ours: list[str] = []
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        token = rest.pop(0)
        if token == "--":
            break
        name, equals, value = token.partition("=")
        if name.startswith("--"):
            name = "--" + name[2:].replace("-", "_")
        if name not in actions:
            guess = suggest(name.lstrip("-"), [known.lstrip("-") for known in actions])
            parser.error(f"unknown option {token!r} before the script{guess}; options of the script follow its name")
        ours.append(name + equals + value)
        if not equals and actions[name].nargs is None and rest:
            ours.append(rest.pop(0))
    given = vars(parser.parse_args(ours))
    if not rest:
        parser.error("name the script to run, for example: python -m hapi.launch train.py")
    given["ips"] = tuple(ip.strip() for ip in given["ips"].split(",") if ip.strip())
    return LaunchOptions(target=rest[0], args=tuple(rest[1:]), **given)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: of the rank that failed first, or 2 for a wrong command line."""
    try:
        return run(parse(sys.argv[1:] if argv is None else argv))
    except (ValueError, LaunchError) as exc:
        print(f"hapi.launch: error: {exc}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(exc, ValueError) else 1


def command() -> None:
    """The process: :func:`main`, whose exit code stays what it is if a signal comes while Python shuts down."""
    code = main()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    command()
