"""The texts that a command is given: an argument, files, standard input, lines of JSON.

A text is taken as it is, with a final newline if it has one.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openv41.errors import InputError

if TYPE_CHECKING:
    from openv41.texts import Prompt

STDIN = "-"
OPTIONS: dict[str, tuple[str, tuple[type, ...]]] = {
    "max_new_tokens": ("a whole number", (int,)),
    "temperature": ("a number", (int, float)),
    "top_p": ("a number", (int, float)),
    "top_k": ("a whole number", (int,)),
    "stop": ("a text or a list of texts", (str, list)),
    "seed": ("a whole number", (int,)),
    "images": ("a list of files", (list,)),
}
"""What a line of JSON may set beside its prompt, and the types that it may have."""


def read_text(name: str) -> str:
    """The text of a file, or of standard input for "-". Raises `InputError` for what is no text in UTF-8."""
    where = "standard input" if name == STDIN else name
    try:
        data = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{where} cannot be read: {reason}; give a text file") from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        byte = f"byte {data[error.start]:#04x} at {error.start}"
        raise InputError(f"{where} must be text in UTF-8, got {byte}; convert it") from error


def read_argument(text: str) -> str:
    """A text of the command line, "-" being standard input."""
    if text == STDIN:
        return read_text(STDIN)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError("the text on the command line must be UTF-8; give it in a file and convert that") from error
    return text


def named_texts(argument: str | None, files: list[str] | None, what: str) -> list[tuple[str, str]]:
    """Names and texts, from either the argument or the files."""
    if argument is not None and files:
        raise InputError(f"the {what} must come from one place, got both an argument and --file; leave one out")
    if (files or []).count(STDIN) > 1:
        raise InputError("standard input can be read once, got --file - twice; leave one out")
    if files:
        return [(file, read_text(file)) for file in files]
    if argument is None:
        raise InputError(f"no {what} given: write it in quotes, or give --file FILE, or - for standard input")
    return [("standard input" if argument == STDIN else what, read_argument(argument))]


def read_prompts(args: argparse.Namespace) -> list[tuple[str, "Prompt"]]:
    """The prompts with their names. Their places tell them apart, so that equal ones draw different random numbers.

    Images are looked at here, and again when they are used: a broken file shows before a model is loaded.
    """
    from openv41.texts import Prompt

    options = {name: getattr(args, name) for name in OPTIONS if name not in ("stop", "images")}
    options["stop"] = args.stop or []
    images: list[str] = args.image or []
    if args.jsonl is not None:
        if args.prompt is not None or args.file:
            raise InputError("the prompts must come from one place, got --jsonl and others; leave one out")
        if images:
            raise InputError('--image must go with a prompt or --file; in a line of JSON write "images": ["FILE"]')
        return list(_json_lines(args.jsonl, Prompt("x", **options)))
    texts = named_texts(args.prompt, args.file, "prompt")
    shares = _deal(images, [text for _, text in texts])
    _look_at(images)
    return [
        (name, Prompt(text, stream=place, images=share, **options))
        for place, ((name, text), share) in enumerate(zip(texts, shares, strict=True))
    ]


def _look_at(images: list[str]) -> None:
    from openv41.inputs.image import read_image

    for file in images:
        read_image(file)


def _deal(images: list[str], texts: list[str]) -> list[list[str]]:
    """Each text's images: as many as it has places for, in order."""
    from openv41.inputs.image import PLACEHOLDER

    places = [text.count(PLACEHOLDER) for text in texts]
    if sum(places) != len(images):
        raise InputError(
            f"there must be one {PLACEHOLDER} for each --image, got {sum(places)} in the prompt and {len(images)} "
            f"images; where {PLACEHOLDER} is meant as text, give the prompt by --jsonl"
        )
    rest = iter(images)
    return [[next(rest) for _ in range(count)] for count in places]


def _json_lines(name: str, pattern: "Prompt") -> Iterator[tuple[str, "Prompt"]]:
    """One prompt a line. A line with a seed of its own gives the same text in any batch."""
    lines = [(number, line) for number, line in enumerate(read_text(name).split("\n"), 1) if line.strip()]
    if not lines:
        raise InputError(f"{name} must hold one JSON object a line, got none; write {{\"prompt\": \"...\"}}")
    for place, (number, line) in enumerate(lines):
        where = f"line {number}"
        try:
            values = _json_object(line)
            text = values.pop("prompt")
            stream = 0 if "seed" in values else place
            _look_at(values.get("images", []))
            yield where, dataclasses.replace(pattern, text=text, stream=stream, **values)
        except InputError as error:
            raise InputError(f"{name}, {where}: {error}") from error


def _json_object(line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"each line must be a JSON object, but: {error}; see openv41 generate --help") from error
    if not isinstance(values, dict) or not isinstance(values.get("prompt"), str):
        raise InputError('each line must be a JSON object with a text under "prompt"; write {"prompt": "..."}')
    if unknown := sorted(values.keys() - {"prompt", *OPTIONS}):
        raise InputError(f"unknown keys {', '.join(unknown)}; a line may set {', '.join(OPTIONS)} beside its prompt")
    for name, value in values.items():
        kind, types = OPTIONS.get(name, ("a text", (str,)))
        items = value if isinstance(value, list) else []
        if type(value) not in types or not all(isinstance(item, str) for item in items):
            raise InputError(f"{name} must be {kind}, got {json.dumps(value)}; leave it out for the option's value")
    return values
