"""Runs Gluon kernels without partitions on the `gluon_machine`: a grid of programs, one after another in random order.

What such kernels use besides: several axes, products of a warp's own registers, atomic counters, codes of two bytes.
"""

import builtins
import functools
import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.ops.hopper import gluon_machine
from tests.ops.hopper.gluon_machine import Machine, execute, joined, signed, values


class Pointer(gluon_machine.Pointer):
    """Into a tensor's storage, all of which is in reach."""

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + more)

    def to(self, dtype: torch.dtype, bitcast: bool) -> "Pointer":
        assert bitcast and self.offset * self.memory.itemsize % dtype.itemsize == 0
        return Pointer(self.memory.view(dtype), self.offset * self.memory.itemsize // dtype.itemsize)

    def exchange(self, value: int) -> int:
        before = int(self.memory[self.offset])
        self.memory[self.offset] = value
        return before

    def add(self, value: int) -> int:
        return self.exchange(int(self.memory[self.offset]) + value)


def into_storage(x: Tensor) -> Pointer:
    return Pointer(x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0), x.storage_offset())


def run_grid(
    kernel: str, grid: tuple[int, ...], given: Mapping[str, Any], paths: Mapping[str, Path], seed: int
) -> None:
    """`paths`: kernel files in order, each of which may import those before it; `kernel`: a name of the last."""
    arguments = {name: into_storage(x) if isinstance(x, Tensor) else x for name, x in given.items()}
    programs = list(itertools.product(*map(range, grid)))
    random.Random(seed).shuffle(programs)
    for number, program in enumerate(programs):
        machine = Machine(seed + number)
        run = load_kernels(paths, machine, program, grid)[kernel]
        machine.specialize([(functools.update_wrapper(functools.partial(run, **arguments), run), ())], [], None)


def language(machine: Machine, program: tuple[int, ...], grid: tuple[int, ...]) -> SimpleNamespace:
    gl = gluon_machine.language(machine, 0, 1)
    vars(gl).update(
        language=gl,  # as `import triton.language as tl` finds it
        program_id=lambda axis: program[axis],
        num_programs=lambda axis: grid[axis],
        num_warps=lambda: 4,
        thread_barrier=lambda: None,
        load=lambda pointer, mask=None, other=0, cache_modifier="": pointer.read(mask, other),
        store=lambda pointer, value, mask=None: pointer.write(
            value, torch.ones_like(value, dtype=torch.bool) if mask is None else mask
        ),
        atomic_add=lambda pointer, value, sem, scope: pointer.add(value),
        atomic_xchg=lambda pointer, value, sem, scope: pointer.exchange(value),
        abs=torch.abs,
        div_rn=torch.div,
        split=lambda x: x.unbind(-1),
        reshape=lambda x, shape: x.reshape(shape),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        inline_asm_elementwise=run_assembly,
    )
    return gl


def load_kernels(
    paths: Mapping[str, Path], machine: Machine, program: tuple[int, ...], grid: tuple[int, ...]
) -> dict[str, Any]:
    gl, kernels = language(machine, program, grid), SimpleNamespace()
    jit = lambda function=None, **options: function or (lambda f: f)  # noqa: E731
    groups = CopyGroups(machine)
    copies = SimpleNamespace(
        async_copy_global_to_shared=machine.copy, commit_group=groups.commit, wait_group=groups.wait
    )
    modules: dict[str, Any] = {
        "triton": SimpleNamespace(jit=jit),
        "triton.language": gl,
        "triton.experimental": SimpleNamespace(gluon=SimpleNamespace(jit=jit, constexpr_function=lambda f: f)),
        "triton.experimental.gluon": SimpleNamespace(language=gl),
        "triton.experimental.gluon.language.nvidia.ampere": SimpleNamespace(async_copy=copies, mma_v2=product),
        "triton.experimental.gluon.language.nvidia.hopper": SimpleNamespace(
            fence_async_shared=machine.fence,
            warpgroup_mma=machine.product,
            warpgroup_mma_wait=machine.wait_products,
        ),
        "triton.language.extra.cuda": SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None),
        "openv41.ops.kernels": kernels,
    }
    scope = {**vars(builtins), "__import__": lambda name, *_: modules[name]}
    names: dict[str, Any] = {}
    for name, path in paths.items():
        names = {"__builtins__": scope, "__name__": name}
        exec(compile(path.read_text(), str(path), "exec"), names)
        modules[name] = SimpleNamespace(**names)
        setattr(kernels, name.rpartition(".")[2], modules[name])
    return names


class CopyGroups:
    """Copies that are waited for together. They land in their order, whenever it is their turn."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.committed, self.landed = machine, 0, 0

    def commit(self) -> None:
        self.machine.step()
        self.committed += 1
        self.machine.queues[self.machine.actor].append(self._land)

    def _land(self) -> None:
        self.landed += 1

    def wait(self, outstanding: int) -> None:
        machine = self.machine
        machine.step(lambda: self.committed - self.landed <= outstanding)
        machine.clocks[machine.actor] = joined(
            machine.clocks[machine.actor], machine.clocks[f"copies of {machine.actor}"]
        )


def product(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    return values(total.as_subclass(Tensor) + a.as_subclass(Tensor).float() @ b.as_subclass(Tensor).float())


def run_assembly(
    text: str, constraints: str, args: list[Tensor], dtype: Any, is_pure: bool, pack: int
) -> tuple[Tensor, ...]:
    """PTX from words to words or to their halves, element by element."""
    kinds = constraints.split(",")
    outputs = constraints.count("=")
    assert pack == 1 and is_pure and all(kind == "r" for kind in kinds[outputs:])
    registers = {f"${outputs + i}": x.as_subclass(Tensor).long() & 0xFFFFFFFF for i, x in enumerate(args)}
    for line in text.strip()[1:-1].split(";"):
        operation, _, rest = line.strip().partition(" ")
        if operation == "mov.b32":  # {low, high}, word
            low, high, word = (name.strip(" {}") for name in rest.split(","))
            registers[low], registers[high] = registers[word] & 0xFFFF, registers[word] >> 16
        elif operation and operation != ".reg":
            target, *sources = (word.strip() for word in rest.split(","))
            operands = [registers[x] if x in registers else int(x, 0) for x in sources]
            registers[target] = arithmetic(operands) if ".lo.u32" in operation else execute(operation, operands)
    return tuple(of_kind(registers[f"${i}"], kinds[i]) for i in range(outputs))


def arithmetic(x: list[Any]) -> Tensor:
    """mul.lo.u32 and mad.lo.u32."""
    return (x[0] * x[1] + (x[2] if len(x) > 2 else 0)) & 0xFFFFFFFF


def of_kind(words: Tensor, kind: str) -> Tensor:
    """Words, or their lower halves as bf16."""
    if kind == "=r":
        return values(signed(words))
    assert kind == "=h", kind
    return values(torch.where(words >= 2**15, words - 2**16, words).to(torch.int16).view(torch.bfloat16))
