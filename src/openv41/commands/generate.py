"""`openv41 generate`: continue one prompt as it comes, or several as one batch."""

import argparse
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from openv41.commands.loading import add_model_options, open_assistant
from openv41.commands.output import human_bytes, note, print_json
from openv41.commands.reading import read_prompts

if TYPE_CHECKING:
    from openv41.api import Assistant
    from openv41.generate.loop import Generation
    from openv41.generate.policy import Length
    from openv41.texts import Completion, Piece, Stream

INTERRUPTED = 130

DESCRIPTION = """\
Continue a prompt. The text comes on standard output as it is made, a summary on standard error.
A prompt is taken as it is (a file with its final newline) and read after the begin token.
Several prompts (--file repeated, or --jsonl) run as one batch, and their texts are printed one after another."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "generate",
        help="continue one or several prompts",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt, or - for standard input")
    parser.add_argument("--file", action="append", metavar="FILE", help="a prompt from a file (repeatable)")
    parser.add_argument(
        "--jsonl",
        metavar="FILE",
        help='a JSON object a line: {"prompt": "..."}, with max_new_tokens, temperature, top_p, top_k, stop, seed if '
        'other than the options here, and "images": [FILE, ...]; - for standard input',
    )
    parser.add_argument(
        "--image",
        action="append",
        metavar="FILE",
        help="an image for the next <image> in the prompt or prompts (repeatable)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="at most (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest token (default)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="likeliest tokens that make up P")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="the K likeliest tokens (default 0: all)")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed, the same text (default: 0)")
    parser.add_argument(
        "--draft",
        type=draft_length,
        default="auto",
        metavar="auto|off|N",
        help="tokens that the model's draft proposes for a step to verify: as many as pay (default), none, or N",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    named = read_prompts(args)
    assistant = open_assistant(args)
    stream = assistant.stream([prompt for _, prompt in named], draft=args.draft)
    code = 0
    printer = None if args.json else Printer([name for name, _ in named])
    with closing(stream):
        try:
            for piece in stream:
                if printer:
                    printer.put(piece)
        except KeyboardInterrupt:
            code = INTERRUPTED
    if printer:
        printer.finish()
        note(summary(assistant, stream))
    else:
        print_json(document(assistant, stream, several=len(named) > 1 or args.jsonl is not None))
    return code


def draft_length(text: str) -> "Length":
    """What --draft says; the model's own limit is checked where the model is known."""
    if text in ("auto", "off"):
        return "auto" if text == "auto" else "off"
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be auto, off or a number of tokens, got {text!r}")
    return int(text)


class Printer:
    """Prints the texts one after another: the first unfinished one as it comes, those behind it when it is done."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.waiting = [""] * len(names)
        self.done = [False] * len(names)
        self.at = 0
        self.begun = False

    def put(self, piece: "Piece") -> None:
        self.waiting[piece.sequence] += piece.text
        self.done[piece.sequence] = piece.finish_reason is not None
        while self.at < len(self.names):
            self._print_waiting()
            if not self.done[self.at]:
                return
            self._end()

    def finish(self) -> None:
        """What is left when the batch was interrupted."""
        while self.at < len(self.names):
            self._print_waiting()
            self._end()

    def _print_waiting(self) -> None:
        if not self.begun and len(self.names) > 1:
            print(f"==> {self.at + 1}: {self.names[self.at]} <==")
        self.begun = True
        if self.waiting[self.at]:
            print(self.waiting[self.at], end="", flush=True)
            self.waiting[self.at] = ""

    def _end(self) -> None:
        print(flush=True)
        self.at, self.begun = self.at + 1, False


def summary(assistant: "Assistant", stream: "Stream") -> str:
    completions, generation = stream.completions, stream.generation
    kinds = {kind: count for kind, count in generation.cache.nbytes().items() if count}
    cache = ", ".join(f"{kind} {human_bytes(count)}" for kind, count in kinds.items())
    reasons = dict.fromkeys(completion.finish_reason or "interrupted" for completion in completions)
    return (
        f"{generation.prefill.tokens} prompt tokens at {generation.prefill.rate:.1f} tokens/s, "
        f"{sum(completion.tokens for completion in completions)} new tokens ({', '.join(reasons)}) "
        f"at {generation.decode.rate:.1f} tokens/s, "
        f"{drafts(generation)}cache {human_bytes(sum(kinds.values()))} ({cache}), {assistant.ops.name} ops"
    )


def drafts(generation: "Generation") -> str:
    """Of the summary: what drafts came to. Nothing where none was to be made."""
    if generation.speculation is None:
        return ""
    tally, seconds = generation.speculation.tally, generation.decode.seconds
    if not tally.drafts:
        return "no drafts, "
    shares = [f"{part} {took / seconds:.0%}" for part, took in tally.seconds.items()]
    rates = " ".join("-" if rate is None else f"{rate:.2f}" for rate in tally.acceptance)
    return (
        f"{tally.drafts} drafts with {tally.mean_accepted:.2f} tokens accepted on average "
        f"(by place {rates}; {', '.join(shares)} of the time), "
    )


def document(assistant: "Assistant", stream: "Stream", several: bool) -> dict[str, Any]:
    """The JSON form. A `finish_reason` of null: interrupted."""
    common = {
        "draft": draft_document(stream.generation),
        "cache_bytes": stream.generation.cache.nbytes(),
        "ops": assistant.ops.name,
        "model": str(assistant.folder),
    }
    each = [_completion(completion) for completion in stream.completions]
    return {"completions": each, "seconds": stream.seconds, **common} if several else {**each[0], **common}


def draft_document(generation: "Generation") -> dict[str, Any] | None:
    """What drafts came to, lists by place in the draft; null where none was to be made. `plain` seconds are those of
    decoding without a draft."""
    if generation.speculation is None:
        return None
    tally, decode = generation.speculation.tally, generation.decode.seconds
    seconds = {"prefill": generation.prefill.seconds, **tally.seconds}
    return {
        "most": generation.speculation.most,
        "rounds": tally.rounds,
        "drafts": tally.drafts,
        "drafted": tally.drafted,
        "reached": tally.reached,
        "accepted": tally.accepted,
        "acceptance": tally.acceptance,
        "mean_accepted": tally.mean_accepted,
        "seconds": {**seconds, "plain": max(0.0, decode - sum(tally.seconds.values()))},
        "share": {part: took / decode if decode else 0.0 for part, took in tally.seconds.items()},
    }


def _completion(completion: "Completion") -> dict[str, Any]:
    return {
        "prompt_tokens": completion.prompt_tokens,
        "tokens": completion.tokens,
        "text": completion.text,
        "ids": list(completion.ids),
        "finish_reason": completion.finish_reason,
        "seconds": completion.seconds,
        "tokens_per_second": completion.tokens_per_second,
        "seed": completion.seed,
    }
