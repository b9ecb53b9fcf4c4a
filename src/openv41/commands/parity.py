"""`openv41 parity FOLDER`: is what this package computes what the published code computed?"""

import argparse
from collections import Counter
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from openv41.commands.loading import add_ops_option
from openv41.commands.output import print_json

if TYPE_CHECKING:
    from openv41.parity import Result


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "parity",
        help="compare with tensors recorded from the published code",
        description="Runs a folder of golden cases and says how near each comes to what was recorded. "
        "Exit code 1 when a case fails, 2 when the folder cannot be used.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="holds an index.json and the files that it names")
    add_ops_option(parser)
    parser.add_argument("--group", action="append", default=[], metavar="NAME", help="only this group; may be repeated")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only this case; may be repeated")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    from openv41.parity import Folder, ops_named, run_cases, select

    cases, ops = select(Folder(args.folder), args.group, args.case), ops_named(args.ops)
    results = []
    width = max(len(case.name) for case in cases)
    for result in run_cases(cases, ops):
        results.append(result)
        if not args.json:
            print(f"{result.status} {result.name:{width}}  {result.text}", flush=True)
    count = Counter(result.status for result in results)
    totals = {"passed": count["PASS"], "failed": count["FAIL"], "skipped": count["SKIP"]}
    if args.json:
        print_json({"folder": args.folder, "ops": ops.name, "cases": [_told(result) for result in results], **totals})
    else:
        print(", ".join(f"{number} {kind}" for kind, number in totals.items()))
    return 1 if count["FAIL"] else 0


def _told(result: "Result") -> dict[str, Any]:
    """`used` is the part of the tolerance that was used up: null where none was given and something was found."""
    told = asdict(result) | {"seconds": round(result.seconds, 3)}
    for finding in told["findings"]:
        finding["used"] = finding["used"] if isfinite(finding["used"]) else None
    return told
