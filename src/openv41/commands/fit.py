"""`openv41 fit`: does it fit, what takes the room, and how much more would."""

import argparse

from openv41.commands.output import print_json

CONTEXT = 131_072


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "fit",
        help="does the model fit on so many GPUs, and for which context and batch",
        description="What one GPU has to hold of weights, state and scratch, and the largest context and batch that "
        "fit. Exit code 1 where it does not fit.",
    )
    parser.add_argument(
        "--config", metavar="CONFIG", help="a config.json in either form, or its folder (default: the release)"
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument("--memory", type=float, required=True, metavar="GIB", help="of one GPU, in GiB")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs of a group that divide heads (default: 1)")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens a sequence (default: {CONTEXT}, or the model's if that is less)",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences in all (default: 1)")
    parser.add_argument(
        "--engram", choices=("device", "host", "disk"), default="host", help="where its tables lie (default: host)"
    )
    parser.add_argument("--no-draft", action="store_true", help="without the draft stages and their rings")
    parser.add_argument("--reserve", type=float, default=4.0, metavar="GIB", help="of a GPU, left alone (default: 4)")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def run(args: argparse.Namespace) -> int:
    from openv41.commands.explain import read_config
    from openv41.errors import InputError
    from openv41.explain.fit import GIB, Plan, as_text, fit

    for name in ("memory", "reserve"):
        value = getattr(args, name)
        if not 0 <= value < 1e9:
            raise InputError(f"--{name} is a number of GiB, 0 or more, got {value}")
    config = read_config(args.config)
    context = min(CONTEXT, config.context) if args.context is None else args.context
    plan = Plan(
        args.gpus, int(args.memory * GIB), args.tp, context, args.batch, args.engram, not args.no_draft,
        int(args.reserve * GIB),
    )  # fmt: skip
    answer = fit(config, plan)
    if args.json:
        print_json(answer.to_dict())
    else:
        print(as_text(answer))
    return 0 if answer.fits else 1
