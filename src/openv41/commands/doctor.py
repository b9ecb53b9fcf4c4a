"""`openv41 doctor`: the machine, the set of operations chosen for it op by op, and a quick check that it is right."""

import argparse
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openv41.commands.loading import add_ops_option
from openv41.commands.output import human_bytes, print_json, table

if TYPE_CHECKING:
    from torch import Tensor

    from openv41.ops import Ops

LIMIT = 2.0**-7
"""Largest difference that the check lets pass, relative to the largest value: one step of bf16."""

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="the machine, the chosen operations op by op, and a quick check of them",
        description="What this machine has, the operations chosen on it, which of them are the set's own, and "
        "whether some of them agree with the reference on small random inputs (exit code 1 if not).",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    add_ops_option(parser)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    from openv41.api import find_device
    from openv41.ops import choose

    device = find_device(args.device)
    chosen = choose(device, args.ops)
    checks = agreement(chosen, str(device))
    report = {"machine": machine(), "ops": operations(chosen, str(device)), "agreement": checks}
    if args.json:
        print_json(report)
    else:
        print(format_report(report))
    return 0 if all(check["agrees"] for check in checks) else 1


# The machine


def machine() -> dict[str, Any]:
    import torch

    from openv41._version import __version__
    from openv41.api import free_memory
    from openv41.ops.cpu import native_bf16

    name, flags = _processor()
    return {
        "openv41": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "flags": [flag for flag in FLAGS if flag in flags],
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "native_bf16_products": native_bf16(),
        "memory_bytes": _memory(),
        "free_memory_bytes": free_memory(),
        "gpus": [_gpu(number) for number in range(torch.cuda.device_count())],
    }


def _processor() -> tuple[str, set[str]]:
    """The CPU's name and its flags, as far as Linux tells them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown", set()
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    name = values.get("model name") or platform.processor() or platform.machine()
    return name, set(values.get("flags", values.get("Features", "")).split())


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _gpu(number: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(number)
    capability = f"{properties.major}.{properties.minor}"
    return {"name": properties.name, "memory_bytes": properties.total_memory, "compute_capability": capability}


# The operations


def operations(ops: "Ops", device: str) -> dict[str, Any]:
    """For every operation of the protocol, and those that the set has besides, the class whose method it is. Inherited
    ones call the set's helpers."""
    from openv41.ops import BESIDES, Ops

    kind = type(ops)
    protocols = (Ops, *(besides for besides in BESIDES if isinstance(ops, besides)))
    members = [item for protocol in protocols for item in vars(protocol).items()]
    asked = [name for name, member in members if callable(member) and not name.startswith("_")]
    owners = {name: next(base.__name__ for base in kind.__mro__ if name in vars(base)) for name in asked}
    helpers = [
        name
        for name, member in vars(kind).items()
        if callable(member) and not name.startswith("_") and name not in owners and hasattr(kind.__mro__[1], name)
    ]
    return {"set": ops.name, "device": device, "class": kind.__name__, "owners": owners, "own_helpers": helpers}


# The check


def agreement(ops: "Ops", device: str) -> list[dict[str, Any]]:
    """Some operations on small random inputs, against the reference on the same device."""
    from openv41.ops import choose

    reference = choose(device, "reference")
    checks = []
    for name, arguments in _inputs(reference, device):
        expected, got = (getattr(one, name)(*arguments) for one in (reference, ops))
        difference = _difference(expected, got)
        checks.append({"op": name, "difference": difference, "limit": LIMIT, "agrees": difference <= LIMIT})
    return checks


def _inputs(reference: "Ops", device: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    import torch

    from openv41.formats import INDEX, pack_fp8_weight

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> "Tensor":
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    def rows(count: int, table: int) -> "Tensor":
        return torch.randint(-1, table, (24, count), generator=generator).to(device)

    weight, scale = pack_fp8_weight(normal(96, 128).float())
    yield "linear", (normal(24, 128), weight, scale)
    near, far, sink = (normal(40, 64), rows(16, 40)), (normal(90, 64), rows(70, 90)), torch.zeros(4, device=device)
    yield "sparse_attention", (normal(24, 4, 64), *near, *far, sink, 0.125)
    queries, keys = (reference.quantise(x, INDEX) for x in (normal(24, 4, 32), normal(50, 32)))
    yield "index_scores", (queries, normal(24, 4), keys)
    scores = normal(24, 50).mul(4).round()  # many equal ones: ties must go to the lower position
    yield "pick", (scores, torch.arange(1, 49, 2, device=device), 16)


def _difference(expected: "Tensor", got: "Tensor") -> float:
    """Relative to the largest value; whole numbers must be equal, and one that is not counts as 1."""
    if not expected.is_floating_point():
        return float((expected != got).any())
    return float((expected.double() - got.double()).abs().max() / expected.double().abs().max())


# The text


def format_report(report: dict[str, Any]) -> str:
    machine, ops = report["machine"], report["ops"]
    gpus = [f"{gpu['name']}, {human_bytes(gpu['memory_bytes'])}" for gpu in machine["gpus"]]
    memory = f"{human_bytes(machine['memory_bytes'])}, {human_bytes(machine['free_memory_bytes'])} free"
    bf16 = "bf16 products" if machine["native_bf16_products"] else "no bf16 products of its own"
    facts = [
        ["openv41", f"{machine['openv41']}, torch {machine['torch']}, Python {machine['python']}, {machine['system']}"],
        ["CPU", f"{machine['cpu']}: {', '.join(machine['flags']) or 'no flags known'}; {bf16}"],
        ["threads", f"{machine['threads']} of {machine['cores']} cores"],
        ["memory", memory],
        ["GPUs", "; ".join(gpus) or "none"],
        ["ops", f"{ops['set']} on {ops['device']}"],
    ]
    owners = [[f"  {name}", _origin(owner, ops["class"])] for name, owner in ops["owners"].items()]
    helpers = [f"  own helpers, which inherited ones call: {', '.join(ops['own_helpers'])}"] * bool(ops["own_helpers"])
    checks = [
        [f"  {check['op']}", "agrees" if check["agrees"] else "DIFFERS", f"by {check['difference']:.2g}"]
        for check in report["agreement"]
    ]
    heading = f"against the reference (at most {LIMIT:.2g} of the largest value)"
    return "\n".join([table(facts), table(owners), *helpers, heading, table(checks)])


def _origin(owner: str, own: str) -> str:
    return f"own ({owner})" if owner == own else f"inherited from {owner}"
