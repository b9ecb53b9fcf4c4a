"""The scripts of mini/ as modules, and a small corpus and run for them to work on."""

import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "mini") not in sys.path:
    sys.path.insert(0, str(ROOT / "mini"))

NAMES = ("total", "count", "name", "value", "items", "result", "left", "right")


def code(seed):
    """A module of a few functions; `ast.parse` takes it."""
    draw = random.Random(seed)
    lines = [f'"""Module {seed}."""', "", f"import {draw.choice(('os', 'sys', 'json'))}", ""]
    for number in range(12):
        a, b = draw.sample(NAMES, 2)
        lines += ["", f"def {draw.choice(NAMES)}_{number}({a}, {b}):", f"    {a} = {a} + {draw.randint(1, 9)}",
                  f"    for {b} in {a}:", f"        print({a}, {b})", f"    return {b}", ""]  # fmt: skip
    return "\n".join(lines)


def write_corpus(folder, counts):
    """What mini/corpus.py leaves: documents of two packages as lines."""
    for name, count in counts.items():
        seeds = range(1000, 1000 + count) if name == "validation" else range(count)
        rows = [{"package": f"{name}{seed % 2}", "path": f"m{seed}.py", "text": code(seed)} for seed in seeds]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
