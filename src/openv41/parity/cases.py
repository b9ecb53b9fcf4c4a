"""Run golden cases: one `Result` a case, whatever happens in it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from openv41.errors import OpenV41Error
from openv41.ops import Ops, choose
from openv41.parity.compare import Finding, Sheet
from openv41.parity.folder import BadCase, Case, Folder, FolderError, Skip
from openv41.parity.groups import (
    block,
    compressor,
    indexer,
    model,
    quant,
    real,
    rope,
    sparse_attn,
    stack,
    vision,
    window,
)

Runner = Callable[[Case, Ops, Sheet], None]
Status = Literal["PASS", "FAIL", "SKIP"]


GROUPS: dict[str, Runner] = {
    "rope": rope.run,
    "quant": quant.run,
    "sparse_attn": sparse_attn.run,
    "compressor": compressor.run,
    "indexer": indexer.run,
    "window": window.run,
    "stack": stack.run,
    "block": block.run,
    "model": model.run,
    "vision": vision.run,
    "real": real.run,
}

LARGE = {"real"}
"""Groups whose tensors are worth more than one thread: on small ones threads only wait for each other."""


@dataclass(frozen=True)
class Result:
    group: str
    name: str
    status: Status
    text: str
    findings: tuple[Finding, ...]
    seconds: float


def ops_named(name: str) -> Ops:
    """The operations to judge. Those of the CPU keep dequantised weights: the same numbers, sooner."""
    return choose("cpu", name, weights="cached") if name in ("auto", "cpu") else choose("cpu", name)


def select(folder: Folder, groups: Sequence[str] = (), names: Sequence[str] = ()) -> list[Case]:
    """Cases in the order of the index; all where nothing is named. Raises `FolderError` for what the folder lacks."""
    for group in groups:
        if group not in folder.groups:
            raise FolderError(f"{folder.path} has no group {group!r}: it has {', '.join(folder.groups)}")
    cases = [case for group in groups or folder.groups for case in folder.groups[group]]
    for name in names:
        if not any(case.name == name for case in cases):
            raise FolderError(f"{folder.path} has no case {name!r} in {', '.join(groups or folder.groups)}")
    return [case for case in cases if not names or case.name in names]


def run_cases(cases: Sequence[Case], ops: Ops) -> Iterator[Result]:
    for case in cases:
        yield run_case(case, ops)


@torch.no_grad()
def run_case(case: Case, ops: Ops) -> Result:
    sheet, began = Sheet(), time.perf_counter()
    status: Status = "FAIL"
    try:
        if case.fault:
            raise BadCase(case.fault)
        if case.group not in GROUPS:
            raise Skip(f"openv41 knows no group {case.group!r}")
        with threads(torch.get_num_threads() if case.group in LARGE else 1):
            GROUPS[case.group](case, ops, sheet)
        status, text = ("PASS" if sheet.passed else "FAIL"), _summary(sheet)
        if not sheet.values and not sheet.reported and status == "PASS":
            status, text = "FAIL", "nothing was compared"
    except Skip as reason:
        status, text = ("SKIP", str(reason)) if sheet.passed else ("FAIL", _summary(sheet))
    except OpenV41Error as reason:
        text = str(reason)
    except Exception as error:  # whatever a foreign file makes of it, the other cases run on
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return Result(case.group, case.name, status, text, tuple(sheet.findings), time.perf_counter() - began)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _summary(sheet: Sheet) -> str:
    worst = sheet.worst
    if worst is None or not worst.used:
        text = "" if sheet.reported else f"{sheet.values} values equal"
    else:
        text = f"worst {worst.text} ({worst.what})"
    return "; ".join(filter(None, [text, *sheet.notes]))
