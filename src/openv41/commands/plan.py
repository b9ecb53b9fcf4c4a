"""`openv41 plan`: the role of every layer, and whom it reads."""

import argparse
from pathlib import Path

from openv41.commands.output import print_json


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "plan",
        help="each layer's role, and whom it reads",
        description="The table of layers that follows from a configuration: roles, ratios, whose latents and picks "
        "each layer reads, where the memory is and what the draft taps.",
    )
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="a config.json in either form, or its folder (default: the release)"
    )
    parser.add_argument("--json", action="store_true", help="a JSON list with one object a layer")


def run(args: argparse.Namespace) -> int:
    from openv41.config import Config
    from openv41.plan import format_plan, plan_rows

    if args.config is None:
        config = Config.released()
    else:
        path = Path(args.config)
        config = Config.from_json(path / "config.json" if path.is_dir() else path)
    if args.json:
        print_json(plan_rows(config))
    else:
        print(format_plan(config))
    return 0
