"""`openv41`: one command line for all that the library does. The commands are in `openv41.commands`.

Exit codes: 0 done; 1 a check failed; 2 bad input, told in one line; 130 interrupted.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from openv41._version import __version__
from openv41.errors import OpenV41Error

COMMANDS = ("generate", "score", "explain", "fit", "plan", "tiny", "train", "parity", "bench", "doctor")
BAD_INPUT, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Options that do not parse end the process, as argparse does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a text may hold what the terminal cannot show
    args = build_parser().parse_args(argv)
    try:
        code: int = _command(args.command).run(args)
        sys.stdout.flush()
        return code
    except OpenV41Error as error:
        return _complain(error)
    except BrokenPipeError:  # the reader has had enough, which is no fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains as it ends
        return 0
    except OSError as error:
        return _complain(error)
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openv41", description="An open implementation of DeepSeek-V4.1-Flash.")
    parser.add_argument("--version", action="version", version=f"openv41 {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name in COMMANDS:
        _command(name).add_parser(subparsers)
    return parser


def _command(name: str) -> ModuleType:
    return import_module(f"openv41.commands.{name}")


def _complain(error: Exception) -> int:
    """A message of several lines becomes one: its first line announces the others."""
    first, *others = [line.strip() for line in str(error).splitlines()] or [type(error).__name__]
    print(f"openv41: error: {' '.join([first, '; '.join(others)]).strip()}", file=sys.stderr)
    return BAD_INPUT
