"""How many sampled completions are Python, and how many pieces of real code are, cut in the same way.

A prompt is the beginning of a held-out file up to and with the first line, or lines, of a function at its top level.
The model continues it by at most so many tokens. A limit may fall anywhere, so what is judged is prompt and completion

    as a whole, where the model ended the text itself;
    else without the last line, if that is not whole, and without the last top-level statement that the completion
    begins, with decorators and comments right above it, since nobody knows whether it would have gone on;
    where it begins none (the function is still open), all whole lines.

It is valid if `ast.parse` takes it and the completion has given at least one line of code to it. The reference is the
real rest of the same files, cut to as many tokens and then judged in the same way: what it lacks to 1 is the rule's
own doing, such as a bracket or a string that is open where the limit falls.
"""

import ast
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openv41.api import Assistant
from openv41.errors import InputError
from openv41.inputs.tokenizer import Tokenizer
from openv41.texts import Prompt

LONGEST_PROMPT = 2000
GOES_ON = ("else", "elif", "except", "finally")
TEMPERATURE, TOP_P, TOKENS, BATCH = 0.6, 0.95, 256, 50


@dataclass(frozen=True)
class Task:
    """A prompt, and what follows it in the file."""

    prompt: str
    rest: str


@dataclass(frozen=True)
class Verdict:
    """Whether it is Python; whether the completion came to the end of what the prompt had begun."""

    valid: bool
    ended: bool


def tasks(documents: Sequence[dict[str, Any]], count: int) -> list[Task]:
    """Of the first files in which there is a function to begin with: one task each."""
    found = (task_of(one["text"]) for one in documents if one["path"].endswith(".py"))
    return [task for task in found if task is not None][:count]


def task_of(text: str) -> Task | None:
    tree = parsed(text)
    lines = text.split("\n")
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno > node.lineno and len(node.body) > 1:
            prompt = "\n".join(lines[: node.body[0].lineno - 1]) + "\n"
            return Task(prompt, text[len(prompt) :]) if len(prompt) <= LONGEST_PROMPT else None
    return None


def parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strange escapes in strings
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def judge(prompt: str, completion: str, complete: bool) -> Verdict:
    """See above. `complete`: nothing was cut off."""
    lines, own = (prompt + completion).split("\n"), prompt.count("\n")
    ended = complete
    if not complete:
        lines = lines[:-1]
        begun = [place for place in range(own, len(lines)) if begins(lines[place])]
        ended = bool(begun)
        last = begun[-1] if begun else len(lines)
        while begun and last > own and lines[last - 1].startswith(("@", "#")):
            last -= 1
        lines = lines[:last]
    gave = any(line.strip() and not line.lstrip().startswith("#") for line in lines[own:])
    return Verdict(gave and parsed("\n".join(lines) + "\n") is not None, ended)


def begins(line: str) -> bool:
    """Whether a line begins a statement at the top level."""
    first = line[:1]
    return bool(first) and not first.isspace() and first not in ")]}#" and not line.startswith(GOES_ON)


def measure(
    assistant: Assistant, documents: Sequence[dict[str, Any]], count: int = 200, tokens: int = TOKENS, seed: int = 0
) -> dict[str, Any]:
    """`count` completions, of as many prompts as there are, in turn."""
    given = tasks(documents, count)
    if not given:
        raise InputError("no held-out file begins with a short function: build the corpus anew")
    drawn = [given[number % len(given)] for number in range(count)]
    verdicts = []
    for first in range(0, count, BATCH):
        prompts = [
            Prompt(task.prompt, stream=first + place, max_new_tokens=tokens, temperature=TEMPERATURE, top_p=TOP_P,
                   seed=seed)
            for place, task in enumerate(drawn[first : first + BATCH])
        ]  # fmt: skip
        done = assistant.generate(prompts, draft="off")
        verdicts += [
            judge(prompt.text, one.text, one.finish_reason == "eos") for prompt, one in zip(prompts, done, strict=True)
        ]
    real = [judge(task.prompt, *beginning(assistant.tokenizer, task.rest, tokens)) for task in given]
    return {
        "prompts": len(given), "tokens": tokens, "temperature": TEMPERATURE, "top_p": TOP_P, "seed": seed,
        "model": shares(verdicts), "real": shares(real),
    }  # fmt: skip


def beginning(tokenizer: Tokenizer, text: str, tokens: int) -> tuple[str, bool]:
    """The first tokens of a text, and whether they are all."""
    ids = tokenizer.encode(text, bos=False, markers=False)
    return tokenizer.decode(ids[:tokens]), len(ids) < tokens


def shares(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    ended = [one for one in verdicts if one.ended]
    return {
        "count": len(verdicts), "valid": sum(one.valid for one in verdicts) / len(verdicts), "ended": len(ended),
        "valid_of_ended": sum(one.valid for one in ended) / len(ended) if ended else None,
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    rows = []
    for key, words in (("model", "sampled from the model"), ("real", "real code, cut alike")):
        one = found[key]
        share = "-" if one["valid_of_ended"] is None else f"{one['valid_of_ended']:.1%}"
        rows.append(f"| {words} | {one['count']} | {one['valid']:.1%} | {one['ended']} | {share} |")
    head = "| completions | count | valid | of them came to the function's end | valid among these |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])
