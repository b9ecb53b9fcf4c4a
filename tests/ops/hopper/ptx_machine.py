"""Runs compiled kernels on the CPU: the PTX that Triton made for sm_90a, one program after the other.

What Triton's interpreter cannot show is shown here: layouts, copies, barriers, what the compiler makes of an index.
The threads of a program go in step, those that are furthest behind first. Registers are rows of 64-bit numbers, one for
each thread.

Copies land when they are waited for, and for the threads that wait alone; until then their place holds rubbish. Between
two barriers no warp may touch what another one has written, nor write what another one has read: that is a `Race`. A
product reads shared memory past a fence only. Of PTX there is what the kernels tested here are made of.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction

Words = numpy.ndarray
U64 = numpy.uint64
WIDTHS = {"bf16": 16, "bf16x2": 32, "pred": 1, **{f"{kind}{bits}": bits for kind in "busf" for bits in (8, 16, 32, 64)}}
RUBBISH = 0xEEEEEEEEEEEEEEEE
SEVERAL = 255
"""In place of a warp's number."""


class Race(Exception):
    """Two warps use the same bytes with no barrier in between, or a product those that nothing has fenced."""


def mask_of(bits: int) -> Any:
    return U64((1 << bits) - 1)


def signed(x: Words, bits: int) -> Words:
    shift = 64 - bits
    return (x << U64(shift)).astype(numpy.int64) >> numpy.int64(shift)


def floats(x: Words) -> Words:
    return (x & mask_of(32)).astype(numpy.uint32).view(numpy.float32)


def words(x: Words) -> Words:
    return x.astype(numpy.float32).view(numpy.uint32).astype(U64)


def of_bf16(x: Words) -> Words:
    return floats((x & mask_of(16)) << U64(16))


def to_bf16(x: Words) -> Words:
    bits = words(x)
    return (bits + U64(0x7FFF) + ((bits >> U64(16)) & U64(1))) >> U64(16) & mask_of(16)


def of_e4m3(codes: Words) -> Words:
    return torch.from_numpy(codes.astype(numpy.uint8)).view(torch.float8_e4m3fn).double().numpy()


class Memory:
    """Bytes, and who touched them since the last barrier: warps by number, 0 for none."""

    def __init__(self, size: int) -> None:
        self.bytes = numpy.full(size, 0xCB, numpy.uint8)
        self.fenced = numpy.ones(size, bool)
        self.forget()

    def forget(self) -> None:
        """A barrier."""
        self.written, self.read_by = numpy.zeros((2, len(self.bytes)), numpy.uint8)

    def places(self, address: Words, size: int, who: Words) -> Words:
        place = address[who].astype(numpy.int64)
        if (place % size).any():
            raise IndexError(f"an address is no multiple of {size}")
        if len(place) and not 0 <= place.min() <= place.max() + size <= len(self.bytes):
            raise IndexError(f"{place.min()} to {place.max()} of {len(self.bytes)} bytes")
        return place

    def load(self, address: Words, size: int, who: Words) -> Words:
        place, warp = self.places(address, size, who), numpy.nonzero(who)[0] // 32 + 1
        result = numpy.zeros(len(who), U64)
        for i in range(size):
            if ((self.written[place + i] != 0) & (self.written[place + i] != warp)).any():
                raise Race("a warp reads what another one has just written")
            before = self.read_by[place + i]
            self.read_by[place + i] = numpy.where((before == 0) | (before == warp), warp, SEVERAL)
            result[who] |= self.bytes[place + i].astype(U64) << U64(8 * i)
        return result

    def store(self, address: Words, value: Words, size: int, who: Words) -> None:
        place, warp = self.places(address, size, who), numpy.nonzero(who)[0] // 32 + 1
        for i in range(size):
            for touched in (self.written[place + i], self.read_by[place + i]):
                if ((touched != 0) & (touched != warp)).any():
                    raise Race("a warp writes where another one has just read or written")
            self.written[place + i], self.fenced[place + i] = warp, False
            self.bytes[place + i] = (value[who] >> U64(8 * i)).astype(numpy.uint8)


class Kernel:
    """PTX as a list of (guard, operation, operands), the places of its labels, and its parameters' names."""

    def __init__(self, ptx: str) -> None:
        self.steps: list[tuple[str, str, list[str]]] = []
        self.labels: dict[str, int] = {}
        text = re.sub(r"//[^\n]*", "", ptx)
        self.parameters = re.findall(r"\.param \.\w+(?: \.ptr \.global \.align \d+)? (\w+)", text)
        body = text[text.index("{", text.index(".entry")) + 1 :]
        body = re.sub(r"(?m)^\s*[{}]\s*$|^\s*\{(?=\s*\.reg)|\}\s*$", "", body)  # braces of scopes
        for statement in re.split(r";|(?<=:)\s*\n|\n(?=\s*\$)", body):
            self._take(re.sub(r"^(\s*\.(loc|file|section|pragma)[^\n]*\n?|\s)+", "", statement).strip())

    def _take(self, statement: str) -> None:
        label = re.match(r"(\$\w+):\s*(.*)$", statement, re.DOTALL)
        if label:
            self.labels[label[1]] = len(self.steps)
            return self._take(re.sub(r"^(\s*\.(loc|file)[^\n]*\n?|\s)+", "", label[2]).strip())
        if not statement or statement.startswith((".", "{", "}")):
            return None
        guard, rest = re.match(r"(?:@(!?%?\w+)\s+)?(.*)$", statement, re.DOTALL).groups()  # type: ignore[union-attr]
        operation, *operands = rest.split(None, 1)
        found = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{\[\s][^,{\[]*", operands[0]) if operands else []
        self.steps.append((guard or "", operation, [operand.strip() for operand in found]))
        return None


class Machine:
    """One program: its registers, shared memory, and copies on their way."""

    def __init__(self, kernel: Kernel, memory: Memory, threads: int, shared: int) -> None:
        self.kernel, self.memory, self.threads = kernel, memory, threads
        self.shared = Memory(shared)
        self.registers: dict[str, Words] = {}
        self.copies: list[list[tuple[Words, list[Words], Words]]] = [[]]
        self.lane = numpy.arange(threads) % 32
        self.first = numpy.arange(threads) - self.lane  # of each thread's warp

    def run(self, arguments: list[int], program: tuple[int, ...], programs: tuple[int, ...]) -> None:
        self.special = {
            "%tid.x": numpy.arange(self.threads, dtype=U64),
            **{f"%ctaid.{axis}": self._all(at) for axis, at in zip("xyz", program, strict=True)},
            **{f"%nctaid.{axis}": self._all(count) for axis, count in zip("xyz", programs, strict=True)},
            "global_smem": self._all(0),
        }
        self.arguments = dict(zip(self.kernel.parameters, arguments, strict=False))
        place, alive = numpy.zeros(self.threads, numpy.int64), numpy.ones(self.threads, bool)
        while alive.any():
            at = place[alive].min()
            guard, operation, operands = self.kernel.steps[at]
            who = alive & (place == at)
            place[who] += 1
            if guard:
                who &= ~self.predicate(guard[1:]) if guard[0] == "!" else self.predicate(guard)
            if operation.startswith("bra"):
                place[who] = self.kernel.labels[operands[0]]
            elif operation == "ret":
                alive &= ~who
            else:
                self.step(operation.split("."), operands, who)

    def step(self, parts: list[str], operands: list[str], who: Words) -> None:
        name, kind = parts[0], parts[-1]
        special = getattr(self, f"do_{name}", None)
        if special is not None and not (name == "mul" and kind == "bf16x2"):
            special(parts, operands, who)
        elif kind == "pred":
            values = [self.predicate(x) for x in operands[1:]]
            self.set(operands[0], PREDICATES[name](*values), 1, who)
        elif kind == "f32":
            values = [floats(self.value(x)) for x in operands[1:]]
            self.set(operands[0], words(FLOATS[name](*values)), 32, who)
        elif kind == "bf16x2":
            a, b = (self.value(x) for x in operands[1:])
            high, low = (to_bf16(of_bf16(a >> U64(s)) * of_bf16(b >> U64(s))) for s in (16, 0))
            self.set(operands[0], high << U64(16) | low, 32, who)
        else:
            values = [self.integer(x, kind) for x in operands[1:]]
            self.set(operands[0], INTEGERS[name](*values).astype(U64), WIDTHS[kind], who)

    # Registers

    def _all(self, value: int) -> Words:
        return numpy.full(self.threads, value & (2**64 - 1), U64)

    def value(self, operand: str) -> Words:
        if operand in self.registers:
            return self.registers[operand]
        if operand in self.special:
            return self.special[operand]
        return self._all(int(operand[2:], 16) if operand[:2] == "0f" else int(operand.rstrip("U"), 0))

    def predicate(self, operand: str) -> Words:
        return self.value(operand) != 0

    def integer(self, operand: str, kind: str) -> Words:
        x = self.value(operand) & mask_of(WIDTHS[kind])
        return signed(x, WIDTHS[kind]) if kind[0] == "s" else x

    def set(self, register: str, value: Words, bits: int, who: Words) -> None:
        if register != "_":
            old = self.registers.get(register, self._all(RUBBISH))
            self.registers[register] = numpy.where(who, value.astype(U64) & mask_of(bits), old)

    def address(self, operand: str) -> Words:
        base, _, offset = operand.strip("[] ").partition("+")
        return self.value(base.strip()) + self._all(int(offset or "0", 0))

    def do_mov(self, parts: list[str], operands: list[str], who: Words) -> None:
        (target, source), bits = operands, WIDTHS[parts[-1]]
        if target[0] == "{":
            targets = several(target)
            for i, one in enumerate(targets):
                self.set(one, self.value(source) >> U64(bits // len(targets) * i), bits // len(targets), who)
        elif source[0] == "{":
            sources = several(source)
            shifted = (self.value(x) << U64(bits // len(sources) * i) for i, x in enumerate(sources))
            self.set(target, numpy.bitwise_or.reduce(list(shifted)), bits, who)
        else:
            self.set(target, self.value(source), bits, who)

    def do_cvt(self, parts: list[str], operands: list[str], who: Words) -> None:
        target, *sources = operands
        if parts[-1] == "f32":
            numbers = [floats(self.value(x)) for x in sources]
            if "relu" in parts:
                numbers = [numpy.maximum(x, 0) for x in numbers]
            made = to_bf16(numbers[-1]) | (to_bf16(numbers[0]) << U64(16) if len(numbers) > 1 else U64(0))
            self.set(target, made, 16 * len(numbers), who)
        elif parts[-1] == "bf16":
            self.set(target, words(of_bf16(self.value(sources[0]))), 32, who)
        else:
            self.set(target, self.integer(sources[0], parts[-1]).astype(U64), WIDTHS[parts[-2]], who)

    def do_setp(self, parts: list[str], operands: list[str], who: Words) -> None:
        kind = parts[-1]
        if kind in ("f32", "bf16"):
            a, b = ((floats if kind == "f32" else of_bf16)(self.value(x)) for x in operands[1:])
        else:
            a, b = (self.integer(x, kind) for x in operands[1:])
        self.set(operands[0], COMPARISONS[parts[1]](a, b), 1, who)

    def do_selp(self, parts: list[str], operands: list[str], who: Words) -> None:
        a, b, chosen = self.value(operands[1]), self.value(operands[2]), self.predicate(operands[3])
        self.set(operands[0], numpy.where(chosen, a, b), WIDTHS[parts[-1]], who)

    def do_mul(self, parts: list[str], operands: list[str], who: Words) -> None:
        if parts[-1] == "f32":
            a, b = (floats(self.value(x)) for x in operands[1:])
            return self.set(operands[0], words(a * b), 32, who)
        bits = WIDTHS[parts[-1]]
        a, b = (self.integer(x, parts[-1]) for x in operands[1:3])
        made = (a * b).astype(U64) if bits < 64 else a.astype(U64) * b.astype(U64)
        if parts[1] == "hi":
            made = (signed(made, 2 * bits) >> numpy.int64(bits)).astype(U64)
        more = self.value(operands[3]) if len(operands) > 3 else U64(0)
        return self.set(operands[0], made + more, 2 * bits if parts[1] == "wide" else bits, who)

    def do_mad(self, parts: list[str], operands: list[str], who: Words) -> None:
        self.do_mul(parts, operands, who)

    def do_shl(self, parts: list[str], operands: list[str], who: Words) -> None:
        bits, by = WIDTHS[parts[-1]], self.value(operands[2]) & mask_of(32)
        far, by = by >= bits, numpy.minimum(by, U64(63))
        x = self.integer(operands[1], parts[-1])
        if parts[0] == "shl":
            made = numpy.where(far, U64(0), x.astype(U64) << by)
        elif parts[-1][0] == "s":
            made = (x >> by.astype(numpy.int64)).astype(U64)
        else:
            made = numpy.where(far, U64(0), x >> by)
        self.set(operands[0], made, bits, who)

    do_shr = do_shl

    def do_bfe(self, parts: list[str], operands: list[str], who: Words) -> None:
        first, count = int(operands[2]), int(operands[3])
        x = self.value(operands[1]) >> U64(first) & mask_of(count)
        self.set(operands[0], signed(x, count).astype(U64) if parts[-1][0] == "s" else x, 32, who)

    def do_lop3(self, parts: list[str], operands: list[str], who: Words) -> None:
        a, b, c = (self.value(x) for x in operands[1:4])
        rows = [(a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8)]
        chosen = [row for i, row in enumerate(rows) if int(operands[4], 0) >> i & 1]
        self.set(operands[0], numpy.bitwise_or.reduce(chosen), 32, who)

    def do_prmt(self, parts: list[str], operands: list[str], who: Words) -> None:
        eight = self.value(operands[1]) & mask_of(32) | self.value(operands[2]) << U64(32)
        choice, made = self.value(operands[3]), self._all(0)
        for i in range(4):
            nibble = choice >> U64(4 * i) & U64(15)
            byte = eight >> (nibble & U64(7)) * U64(8) & U64(255)
            byte = numpy.where(nibble & U64(8), numpy.where(byte & U64(128), U64(255), U64(0)), byte)
            made |= byte << U64(8 * i)
        self.set(operands[0], made, 32, who)

    # Memory

    def do_ld(self, parts: list[str], operands: list[str], who: Words) -> None:
        kind, targets = parts[-1], several(operands[0])
        if parts[1] == "param":
            return self.set(targets[0], self._all(self.arguments[operands[1].strip("[]")]), 64, who)
        memory, size = self.memory if "global" in parts else self.shared, WIDTHS[kind] // 8
        address = self.address(operands[1])
        memory.places(address, size * len(targets), who)
        for i, target in enumerate(targets):
            self.set(target, memory.load(address + U64(size * i), size, who), max(8 * size, 16), who)
        return None

    def do_st(self, parts: list[str], operands: list[str], who: Words) -> None:
        memory, size = self.memory if "global" in parts else self.shared, WIDTHS[parts[-1]] // 8
        address, sources = self.address(operands[0]), several(operands[1])
        memory.places(address, size * len(sources), who)
        for i, source in enumerate(sources):
            memory.store(address + U64(size * i), self.value(source), size, who)

    def do_cp(self, parts: list[str], operands: list[str], who: Words) -> None:
        if parts[-1] == "commit_group":
            self.copies.append([])
        elif parts[-1] == "wait_group":
            while len(self.copies) > int(operands[0]) + 1:
                for target, halves, copying in self.copies.pop(0):
                    for i, half in enumerate(halves):
                        self.shared.store(target + U64(8 * i), half, 8, copying)
        else:
            target, source, size = self.address(operands[0]), self.address(operands[1]), self.value(operands[3])
            assert parts[2] == "cg" and operands[2] == "0x10"
            full = who & (size != 0)
            self.memory.places(source, 16, full)
            halves = [self.memory.load(source + U64(8 * i), 8, full) for i in (0, 1)]
            for i in (0, 1):
                self.shared.store(target + U64(8 * i), self._all(RUBBISH), 8, who)
            self.copies[-1].append((target, halves, who.copy()))

    # What threads do together

    def do_bar(self, parts: list[str], operands: list[str], who: Words) -> None:
        assert who.all()
        self.memory.forget()
        self.shared.forget()

    def do_fence(self, parts: list[str], operands: list[str], who: Words) -> None:
        self.shared.fenced[:] = True

    def do_shfl(self, parts: list[str], operands: list[str], who: Words) -> None:
        assert who.all()
        by = self.value(operands[2]).astype(numpy.int64)
        source = {"bfly": self.lane ^ by, "up": self.lane - by, "idx": by & 31}[parts[2]]
        source = numpy.where(source < 0, self.lane, source)
        self.set(operands[0], self.value(operands[1])[self.first + source], 32, who)

    def do_redux(self, parts: list[str], operands: list[str], who: Words) -> None:
        assert who.all()
        lanes = self.integer(operands[1], parts[-1]).astype(numpy.int64).reshape(-1, 32)
        made = {"add": numpy.sum, "max": numpy.max, "min": numpy.min}[parts[2]](lanes, 1)
        self.set(operands[0], made.repeat(32).astype(U64), 32, who)

    def do_ldmatrix(self, parts: list[str], operands: list[str], who: Words) -> None:
        rows, minor, major = self.address(operands[1]), self.lane % 4, self.lane // 4
        for i, target in enumerate(several(operands[0])):
            if "trans" in parts:
                places = (rows[self.first + 8 * i + 2 * minor + j] + (2 * major).astype(U64) for j in (0, 1))
                low, high = (self.shared.load(place, 2, who) for place in places)
                self.set(target, low | high << U64(16), 32, who)
            else:
                place = rows[self.first + 8 * i + major] + (4 * minor).astype(U64)
                self.set(target, self.shared.load(place, 4, who), 32, who)

    def do_stmatrix(self, parts: list[str], operands: list[str], who: Words) -> None:
        assert "trans" not in parts
        rows = self.address(operands[0])
        for i, source in enumerate(several(operands[1])):
            place = rows[self.first + 8 * i + self.lane // 4] + (4 * (self.lane % 4)).astype(U64)
            self.shared.store(place, self.value(source), 4, who)

    def do_wgmma(self, parts: list[str], operands: list[str], who: Words) -> None:
        """m64nNk32 of e4m3, the left side in registers, the right one in rows of 32 bytes, swizzled; no sum before."""
        if parts[1] != "mma_async":
            return
        columns, descriptor = int(parts[4].removeprefix("m64n").removesuffix("k32")), int(self.value(operands[2])[0])
        assert who.all() and parts[5:] == ["f32", "e4m3", "e4m3"] and operands[3] == "0" and descriptor >> 62 == 3
        place = ((descriptor & 0x3FFF) << 4) + numpy.arange(32 * columns).reshape(columns, 32)
        place ^= (place >> 7 & 1) << 4
        if self.shared.written[place].any() or not self.shared.fenced[place].all():
            raise Race("a product reads what was stored with no fence and barrier in between")
        row, left = 16 * (numpy.arange(128) // 32) + self.lane // 4, numpy.zeros((64, 32))
        for i, source in enumerate(several(operands[1])):
            for byte in range(4):
                codes = self.value(source) >> U64(8 * byte) & U64(255)
                left[row + 8 * (i % 2), 4 * (self.lane % 4) + 16 * (i // 2) + byte] = of_e4m3(codes)
        made = left @ of_e4m3(self.shared.bytes[place]).T
        for i, target in enumerate(several(operands[0])):
            at = row + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (self.lane % 4) + i % 2
            self.set(target, words(made[at]), 32, who)


def several(operand: str) -> list[str]:
    return [one.strip() for one in operand.strip("{} ").split(",")]


def fused(a: Words, b: Words, c: Words) -> Words:
    return a.astype(numpy.float64) * b + c


PREDICATES = {"and": numpy.logical_and, "or": numpy.logical_or, "xor": numpy.logical_xor, "not": numpy.logical_not}
FLOATS: dict[str, Callable[..., Words]] = {
    "add": numpy.add, "sub": numpy.subtract, "fma": fused, "max": numpy.fmax, "min": numpy.fmin, "abs": numpy.abs,
    "neg": numpy.negative, "div": numpy.divide,
}  # fmt: skip
INTEGERS: dict[str, Callable[..., Words]] = {
    "add": numpy.add, "sub": numpy.subtract, "and": numpy.bitwise_and, "or": numpy.bitwise_or,
    "xor": numpy.bitwise_xor, "not": numpy.invert, "min": numpy.minimum, "max": numpy.maximum,
    "abs": numpy.abs, "neg": numpy.negative, "popc": numpy.vectorize(lambda x: int(x).bit_count()),
}  # fmt: skip
COMPARISONS: dict[str, Callable[[Words, Words], Words]] = {
    "lt": numpy.less, "le": numpy.less_equal, "gt": numpy.greater, "ge": numpy.greater_equal, "eq": numpy.equal,
    "ne": numpy.not_equal, "neu": numpy.not_equal,
}  # fmt: skip


# Launches


KINDS = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg")
compiled: dict[Any, Any] = {}


def launch(self: Any, *given: Any, grid: tuple[int, ...], warmup: bool = False, **named: Any) -> None:
    """What `JITFunction.run` does, here: compile as a launch would, and run all programs."""
    options = {name: named.pop(name) for name in OPTIONS if named.get(name) is not None}
    values = dict(zip(self.arg_names, given, strict=False)) | {k: v for k, v in named.items() if k not in OPTIONS}
    made = compile_for(self, values, options)
    tensors = [x for name, x in values.items() if isinstance(x, torch.Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    memory, starts = Memory(8192 + sum(storage.nbytes() + 1024 for storage in storages.values())), {}
    top = 4096
    for place, storage in storages.items():
        starts[place] = top
        memory.bytes[top : top + storage.nbytes()] = view(storage)
        top += (storage.nbytes() + 511) // 256 * 256
    arguments = []
    for parameter in self.params:
        x = values[parameter.name]
        if isinstance(x, torch.Tensor):
            arguments.append(starts[x.untyped_storage().data_ptr()] + x.storage_offset() * x.element_size())
        elif not (parameter.is_constexpr or x is None or x == 1):
            arguments.append(int(x))
    kernel, threads = Kernel(made.asm["ptx"]), 32 * made.metadata.num_warps
    programs = (*grid, 1, 1)[:3]
    for z, y, x in itertools.product(*(range(count) for count in reversed(programs))):
        memory.forget()
        machine = Machine(kernel, memory, threads, made.metadata.shared + 64)
        machine.run([*arguments, 0, 0], (x, y, z), programs)
    for place, storage in storages.items():
        view(storage)[:] = memory.bytes[starts[place] : starts[place] + storage.nbytes()]


def view(storage: torch.UntypedStorage) -> Words:
    return torch.tensor([], dtype=torch.uint8).set_(storage).numpy()


def compile_for(kernel: JITFunction, values: dict[str, Any], options: dict[str, Any]) -> Any:
    signature, constants, aligned = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name, x = parameter.name, values[parameter.name]
        if parameter.is_constexpr or x is None or (type(x) is int and x == 1):
            signature[name], constants[(place,)] = "constexpr", x
            continue
        signature[name] = f"*{KINDS[x.dtype]}" if isinstance(x, torch.Tensor) else "i32"
        if (x.data_ptr() if isinstance(x, torch.Tensor) else x) % 16 == 0:
            aligned[(place,)] = [["tt.divisibility", 16]]
    key = (kernel.fn.__qualname__, str(signature), str(constants), str(aligned), str(options))
    if key not in compiled:
        source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
        target = GPUTarget("cuda", 90, 32)
        compiled[key] = triton.compile(source(kernel, signature, constants, aligned), target=target, options=options)
    return compiled[key]
