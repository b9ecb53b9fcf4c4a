"""`openv41 tiny`: a small checkpoint in the released format."""

import argparse
from pathlib import Path

from openv41.commands.output import human_bytes
from openv41.errors import InputError


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "tiny",
        help="write a tiny checkpoint in the released format",
        description="A small model in the form of the release: every part and every role, random weights, a vocabulary "
        "of its own. The folder appears at once and whole, or not at all.",
    )
    parser.add_argument("out", metavar="OUT", help="the folder to write, which must be new or empty")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="chooses the weights (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace the model that is there")


def run(args: argparse.Namespace) -> int:
    if args.seed < 0:
        raise InputError(f"seed must be a whole number, 0 or more, got {args.seed}; any such number will do")
    from openv41.weights.tiny import write_tiny

    folder = Path(args.out)
    config = write_tiny(folder, args.seed, args.overwrite)
    size = human_bytes(sum(path.stat().st_size for path in folder.iterdir()))
    print(f"wrote {folder}: {config.n_layers} layers and {config.n_mtp_layers} draft stages, {size}, seed {args.seed}")
    return 0
