"""Compiles kernels for sm_90a on any machine, and counts what came out: registers, spills, matrix instructions.

    python -m openv41.ops.hopper.compiled [NAME ...] [--json]

No GPU is needed: the compiler that Triton brings assembles for any chip. A kernel that spills, or that left the tensor
cores, shows here long before it is timed. Each launch module of this package lists its `SPECIMENS`.
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

MODULES = (
    "attend", "attend_gluon", "backward", "score", "rows", "products", "products_direct", "sinkhorn", "streams",
    "rounding", "rotate", "gated", "index_plain",
)  # fmt: skip
"""Launch modules of this package whose kernels are compiled."""

COUNTED = ("HGMMA", "QGMMA", "HMMA", "WARPGROUP", "LDL", "STL", "LDG", "LDGSTS", "LDSM", "STG", "BAR", "PRMT", "FADD")
"""Instructions told apart: HGMMA and QGMMA are Hopper's matrix products, LDL and STL are spills."""


@dataclass(frozen=True)
class Specimen:
    """A kernel as one launch compiles it: types of its arguments, and the values of its constants."""

    name: str
    kernel: Any
    signature: Mapping[str, str]
    """Types of the arguments that are no constants: "*bf16", "i32", "fp32" ..."""
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    gluon: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    multiples: tuple[str, ...] = ()
    """Arguments that are multiples of 16 beside the pointers: a launch tells the compiler so of every integer."""


@dataclass(frozen=True)
class Found:
    """What the assembler says of a compiled kernel. `stack`: bytes a thread keeps in memory, spills among them."""

    name: str
    registers: int
    stack: int
    shared: int
    instructions: Mapping[str, int]


def compile_for_hopper(specimen: Specimen) -> Found:
    """Compile for sm_90a and read the result. Raises what the compiler raises."""
    kernel, constants = specimen.kernel, specimen.constants
    names = kernel.arg_names
    kinds = {name: "constexpr" if name in constants else specimen.signature[name] for name in names}
    aligned: dict[Any, Any] = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if kinds[name].startswith("*") or name in specimen.multiples
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = _source_of(specimen)(kernel, kinds, values, aligned)
    options = {"num_warps": specimen.warps, "num_stages": specimen.stages, **specimen.options}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(made.asm["cubin"])
        usage, code = _dump(binary, "--dump-resource-usage"), _dump(binary, "--dump-sass")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of the registers of {specimen.name}: {usage[-200:]!r}")
    counts = Counter(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", code, re.MULTILINE))
    kept = {name: counts[name] for name in COUNTED if counts[name]}
    return Found(specimen.name, int(found[1]), int(found[2]), made.metadata.shared, kept)


def _source_of(specimen: Specimen) -> Any:
    if not specimen.gluon:
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _dump(binary: Path, what: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, what, binary], capture_output=True, text=True, check=True).stdout


def specimens() -> list[Specimen]:
    """Of all launch modules."""
    modules = (importlib.import_module(f"openv41.ops.hopper.{name}") for name in MODULES)
    return [specimen for module in modules for specimen in module.SPECIMENS]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="specimens whose name contains one of these")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if triton.knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: unset it, the interpreter compiles nothing", file=sys.stderr)
        return 2
    chosen = [one for one in specimens() if not args.names or any(name in one.name for name in args.names)]
    results = [compile_for_hopper(one) for one in chosen]
    if args.json:
        print(json.dumps([asdict(one) for one in results]))
        return 0
    for one in results:
        counts = ", ".join(f"{count} {name}" for name, count in one.instructions.items())
        print(f"{one.name:40} {one.registers:3} registers, {one.stack:4} B stack, {one.shared:6} B shared; {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
