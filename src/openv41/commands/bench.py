"""`openv41 bench`: how fast a part runs here, told only after it has been found right."""

import argparse
import os

from openv41.commands.output import note, print_json, table
from openv41.errors import InputError

WEIGHTS = ("stored", "bf16", "fp32", "cached")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time a part at its real size, beside what this machine reads and multiplies",
        description="Runs a benchmark, or lists them. Each compares with the reference operations before it measures; "
        "where the two differ it prints no figure, and the exit code is 1.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a benchmark (without one: list them)")
    parser.add_argument(
        "--ops",
        choices=("cpu", "reference", "fast", "hopper"),
        default="cpu",
        help="what is timed (default: cpu); fast is for speculate alone, there on a GPU if there is one",
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="how the cpu and fast operations hold them (default: cached, in what is fastest here)",
    )
    parser.add_argument("--threads", type=_count, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--position", type=int, default=1000, metavar="P", help="the token's (default: 1000)")
    parser.add_argument("--prompt", type=_count, default=1000, metavar="N", help="its tokens (default: 1000)")
    parser.add_argument(
        "--repeats", type=_count, default=5, metavar="N", help="runs of the prompt; a token's are four times as many"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="on a GPU: the cases whose name holds TEXT")
    parser.add_argument("--skip-reference", action="store_true", help="do not time the reference (only compare)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    from openv41.bench import BENCHMARKS, Settings, find, format_report
    from openv41.commands.doctor import machine

    if args.name is None:
        listed = [{"name": benchmark.name, "what": benchmark.what} for benchmark in BENCHMARKS]
        if args.json:
            print_json(listed)
        else:
            print(table([[one["name"], one["what"]] for one in listed]))
        return 0
    benchmark = find(args.name)
    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    if args.ops == "fast" and args.name != "speculate":
        raise InputError(f"--ops fast goes with speculate, got {args.name}: take cpu, reference or hopper")
    if args.weights and args.ops not in ("cpu", "fast"):
        raise InputError(
            f"--weights goes with --ops cpu and fast, got {args.weights} for {args.ops}, which reads them as they are "
            "stored: leave it out"
        )
    weights = args.weights or ("cached" if args.ops in ("cpu", "fast") else None)
    settings = Settings(args.ops, weights, args.position, args.prompt, args.repeats, not args.skip_reference, args.only)
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if busy > 0.5:
        note(f"others are at work here (load {busy:.1f} in the last minute): the figures will say less")
    report, here = benchmark.run(settings, note), {**machine(), "load_before": round(busy, 2)}
    if args.json:
        print_json({"machine": here, **report.to_dict()})
    else:
        flags = ", ".join(here["flags"]) or "no flags known"
        print(f"{here['cpu']} ({flags}), threads: {here['threads']} of {here['cores']} cores, torch {here['torch']}")
        print(format_report(report))
    return 0 if report.agreement.passed else 1


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
