"""The model that a command runs: the folder it was given; else openv41-mini, the package's own; else, in an
installation without it, the demo checkpoint, made on demand."""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from openv41._version import __version__
from openv41.commands.output import human_bytes, note
from openv41.errors import InputError

if TYPE_CHECKING:
    from openv41.api import Assistant

DEMO_SEED = 0
SETS = ("auto", "reference", "fast", "cpu", "hopper")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="a model folder (default: openv41-mini, the package's own)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    add_ops_option(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")


def add_ops_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", choices=SETS, default="auto", help="the set of operations (default: the fastest)")


def open_assistant(args: argparse.Namespace) -> "Assistant":
    """The assistant that the options ask for."""
    from openv41.api import load

    folder = default_folder() if args.model is None else Path(args.model)
    progress = _show_progress if sys.stderr.isatty() else None
    return load(folder, args.device, args.ops, threads=args.threads, progress=progress)


def default_folder() -> Path:
    """The model that runs when none is named."""
    from openv41.api import shipped

    return shipped() or demo_folder()


def demo_folder() -> Path:
    """The demo checkpoint in the user's cache, written if it is not there. It appears whole or not at all."""
    cache = _cache_folder()
    folder = cache / f"tiny-{__version__}-seed{DEMO_SEED}"
    if not folder.is_dir():
        try:
            _write_demo(folder)
        except OSError as error:
            reason = error.strerror or str(error)
            raise InputError(f"the demo model cannot be written to {cache}: {reason}; give --model DIR") from error
    note(
        f"no --model, and no openv41-mini in this installation: using the demo model in {folder}, whose random weights "
        "say nothing sensible"
    )
    return folder


def _cache_folder() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"  # a relative path is to be ignored
    except RuntimeError as error:
        raise InputError("no home folder to keep the demo model in; set XDG_CACHE_HOME or give --model DIR") from error
    return base / "openv41"


def _write_demo(folder: Path) -> None:
    """Under another name first: of two processes at once one comes too late, and takes the other's."""
    from openv41.weights.tiny import write_tiny

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as new:
        write_tiny(Path(new) / "tiny", DEMO_SEED)
        try:
            (Path(new) / "tiny").rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def _show_progress(name: str, done: int, total: int) -> None:
    """A line that is written over and over, and wiped at the end."""
    text = "" if done == total else f"loading {human_bytes(done)} of {human_bytes(total)}"
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
