"""`openv41 explain`: what each component takes, gives, keeps and costs."""

import argparse
import sys
from pathlib import Path
from typing import Any

from openv41.commands.output import print_json


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "explain",
        help="a component's shapes, parameters, state and cost",
        description="Runs the real model without memory and shows one component of it: shapes in and out, parameters, "
        "state, FLOPs and bytes of a call, and why it is there. Without a component: all of them, as a tree.",
    )
    parser.add_argument("component", nargs="?", metavar="COMPONENT", help="as in the tree (without one: the tree)")
    parser.add_argument(
        "--config", metavar="CONFIG", help="a config.json in either form, or its folder (default: the release)"
    )
    parser.add_argument(
        "--layer", type=int, metavar="L", help="layers, then draft stages (default: the first with one)"
    )
    parser.add_argument("--mode", choices=("prefill", "decode"), default="decode", help="(default: decode)")
    parser.add_argument(
        "--position", type=int, metavar="P", help="tokens that the sequence holds before (decode: 1000, prefill: 0)"
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="tokens of the call, a sequence each (decode: 1; prefill: 4096)"
    )
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences in the call (default: 1)")
    parser.add_argument(
        "--slack", type=int, default=0, metavar="N", help="rows that rings hold for drafts (default: 0)"
    )
    parser.add_argument("--machine", default="h200", metavar="NAME", help="for floors: h200, h100, cpu, or a JSON file")
    parser.add_argument(
        "--chunk", type=int, default=4096, metavar="N", help="a longer prompt of model is read in chunks"
    )
    parser.add_argument(
        "--prefill", choices=("halo", "full"), default="halo", help="which tokens the upper layers run (model alone)"
    )
    parser.add_argument("--image-size", metavar="WxH", help="for vision and aligner, in pixels (default: 1344x896)")
    parser.add_argument(
        "--what-if", action="append", default=[], metavar="KEY=VALUE", help="change the configuration; repeatable"
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="one JSON document")
    shown.add_argument("--markdown", action="store_true", help="tables in Markdown")


def run(args: argparse.Namespace) -> int:
    from openv41.explain.cost import machine_named
    from openv41.explain.panel import Question, explain
    from openv41.explain.render import as_markdown, as_text, show
    from openv41.explain.whatif import changed, compare

    config = read_config(args.config)
    if args.component is None:
        _without_component(args)
        return _tree(changed(config, args.what_if)[0], args)
    if args.chunk < 1:
        from openv41.errors import InputError

        raise InputError(f"--chunk must be 1 or more, got {args.chunk}")
    question = Question(
        args.component, args.layer, args.mode, args.position, args.tokens, args.batch, args.slack, args.prefill,
        args.chunk, _size(args.image_size),
    )  # fmt: skip
    machine = machine_named(args.machine)
    progress = _progress if sys.stderr.isatty() else lambda done, total: None
    if args.what_if:
        panel = compare(config, args.what_if, question, machine, progress)
    else:
        panel = explain(config, question, machine, progress)
    if progress is _progress and question.mode == "prefill":
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    if args.json:
        print_json(panel.to_dict())
    elif args.markdown:
        print(as_markdown(panel))
    elif sys.stdout.isatty():
        show(panel)
    else:
        print(as_text(panel))
    return 0


def _without_component(args: argparse.Namespace) -> None:
    """The tree is of the whole model, in no call."""
    from openv41.errors import InputError

    for name in ("layer", "position", "tokens", "image_size"):
        if getattr(args, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} goes with a component: name one, or leave it out")


def read_config(name: str | None) -> Any:
    from openv41.config import Config

    if name is None:
        return Config.released()
    path = Path(name)
    return Config.from_json(path / "config.json" if path.is_dir() else path)


def _size(text: str | None) -> tuple[int, int] | None:
    from openv41.errors import InputError

    if text is None:
        return None
    width, cross, height = text.lower().partition("x")
    if not (cross and width.isascii() and width.isdigit() and height.isascii() and height.isdigit() and len(text) < 24):
        raise InputError(f"--image-size is WIDTHxHEIGHT in pixels, such as 1344x896, got {text!r}")
    return int(width), int(height)


def _progress(done: int, total: int) -> None:
    print(f"\ropenv41: {done} of up to {total} chunks counted", end="", file=sys.stderr, flush=True)


def _tree(config: Any, args: argparse.Namespace) -> int:
    from openv41.explain.ledger import checkpoint_tallies, runtime_tallies, total, tree
    from openv41.explain.render import tree_as_text

    tallies: dict[str, dict[str, Any]] = {}
    for source, parts in (("runtime", runtime_tallies(config)), ("checkpoint", checkpoint_tallies(config))):
        tallies[source] = {str(part): tally.to_dict() for part, tally in parts.items()}
        tallies[source]["total"] = total(parts).to_dict()
    whole = tree(config)
    if args.json:
        print_json({"tree": whole, **tallies, "lines": LINES})
    elif args.markdown:
        print("```text\n" + tree_as_text(whole, tallies) + "\n```\n\n" + "\n".join(f"- {line}" for line in LINES))
    else:
        print(tree_as_text(whole, tallies))
        print("\n" + "\n".join(LINES))
    return 0


LINES = [
    "parameters: scales are not counted, a byte of fp4 codes holds two",
    "runtime: wo_a in bf16 without scales, embedding and head named once more by each draft stage, image delimiters "
    "with vision, float32 where the model computes in it",
    "checkpoint: as on disk, image delimiters beside the embedding (backbone)",
]
