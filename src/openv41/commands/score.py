"""`openv41 score`: how likely the model holds a text, token by token and as a whole."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from openv41.commands.loading import add_model_options, open_assistant
from openv41.commands.output import print_json, table
from openv41.commands.reading import named_texts
from openv41.errors import InputError

if TYPE_CHECKING:
    from openv41.texts import Score, TokenScore


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "score",
        help="log-probability of each token of a text, perplexity, bits per byte",
        description="How likely the model holds a text, read after the begin token: the natural log-probability of "
        "each token, the perplexity per token, and bits per byte of the UTF-8 text.",
    )
    parser.add_argument("text", nargs="?", metavar="TEXT", help="the text, or - for standard input")
    parser.add_argument("--file", metavar="FILE", help="the text from a file")
    parser.add_argument("--top", type=int, default=0, metavar="N", help="show the N likeliest tokens at each place")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.top < 0:
        raise InputError(f"top must be a whole number, 0 or more, got {args.top}; 0 shows none")
    [(_, text)] = named_texts(args.text, None if args.file is None else [args.file], "text")
    if not text:
        raise InputError("the text to score must not be empty; give at least one character")
    assistant = open_assistant(args)
    score = assistant.score(text, args.top)
    if args.json:
        print_json({**document(score), "ops": assistant.ops.name, "model": str(assistant.folder)})
    else:
        print(format_score(score))
    return 0


def format_score(score: "Score") -> str:
    rows = [["token", "log-probability"] + ["likeliest"] * any(token.likeliest for token in score.tokens)]
    for token in score.tokens:
        shown = "  ".join(f"{_quoted(other)} {other.logprob:.3f}" for other in token.likeliest)
        rows.append([_quoted(token), f"{token.logprob:.4f}"] + [shown] * (len(rows[0]) - 2))
    return (
        f"{table(rows)}\n\n{len(score.tokens)} tokens, {score.bytes} bytes, log-probability {score.logprob:.4f}, "
        f"perplexity {score.perplexity:.4f}, {score.bits_per_byte:.4f} bits per byte"
    )


def document(score: "Score") -> dict[str, Any]:
    tokens = [_token(token) | {"likeliest": [_token(other) for other in token.likeliest]} for token in score.tokens]
    return {
        "tokens": tokens,
        "count": len(score.tokens),
        "bytes": score.bytes,
        "logprob": score.logprob,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
    }


def _token(token: "TokenScore") -> dict[str, Any]:
    return {"id": token.id, "text": token.text, "logprob": token.logprob}


def _quoted(token: "TokenScore") -> str:
    return json.dumps(token.text, ensure_ascii=False)
