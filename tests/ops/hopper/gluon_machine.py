"""Runs Gluon kernels with specialised warps on the CPU: the kernel's own source, with Gluon's names meaning this.

Tensors are PyTorch's, layouts are nothing, partitions are threads of which one runs at a time. Whenever one touches
shared memory or a barrier, the next to go on is drawn from the seed; so is when a copy lands, in the order of its
queue. Products read their operands at the last moment, when they are waited for.

Each actor (a partition, and the queue of its copies) has a vector clock, which barriers pass on, and everything kept in
shared memory remembers who wrote and read it when. So an access that nothing has put in order is a `Race`, however the
threads happened to run; waiting for ever is a `Deadlock`.
"""

import builtins
import math
import random
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

THREADS = 128
"""Of a partition: what a copy's arrival counts for."""

Clock = dict[str, int]


class Race(Exception):
    """Two accesses to the same memory that no barrier orders, or a product that reads what no fence has shown it."""


class Deadlock(Exception):
    """All that are left wait for barriers."""


class Stopped(Exception):
    """Another partition has failed."""


def joined(a: Clock, b: Clock) -> Clock:
    return {actor: max(a.get(actor, 0), b.get(actor, 0)) for actor in a.keys() | b.keys()}


class Values(torch.Tensor):
    """A tensor with Gluon's `to`."""

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)


def values(x: Tensor) -> Tensor:
    return x.as_subclass(Values)


class Pointer:
    """Into a tensor's memory: `offset` in elements, a number or a tensor of them."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + more)

    def to(self, dtype: torch.dtype, bitcast: bool) -> "Pointer":
        assert bitcast
        return Pointer(self.memory.view(dtype), self.offset * (self.memory.itemsize // dtype.itemsize))

    def places(self, mask: Tensor) -> Tensor:
        places = torch.as_tensor(self.offset).broadcast_to(mask.shape)[mask]
        if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < self.memory.numel():
            raise IndexError(f"{int(places.min())} to {int(places.max())} of {self.memory.numel()}")
        return places

    def read(self, mask: Any, other: float) -> Tensor:
        mask = torch.ones_like(self.offset, dtype=torch.bool) if mask is None else mask
        mask = mask.broadcast_to(torch.broadcast_shapes(mask.shape, self.offset.shape)).as_subclass(Tensor)
        result = torch.full(mask.shape, other, dtype=self.memory.dtype)
        result[mask] = self.memory[self.places(mask)]
        return values(result)

    def write(self, value: Tensor, mask: Any) -> None:
        mask = mask.broadcast_to(value.shape).as_subclass(Tensor)
        self.memory[self.places(mask)] = value.as_subclass(Tensor)[mask]


class Cell:
    """A piece of shared memory with one history: who wrote it, who fenced that, who has read it, who is reading it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.written: tuple[str, int] | None = None
        self.fenced: Clock = {}
        self.read: Clock = {}
        self.reading: list[str] = []


class Barrier:
    def __init__(self) -> None:
        self.count = self.missing = 0
        self.flips = 0
        self.arrived: Clock = {}
        self.passed: Clock = {}

    def arrive(self, arrivals: int, clock: Clock) -> None:
        assert arrivals <= self.missing, f"{arrivals} arrivals where {self.missing} are missing"
        self.missing -= arrivals
        self.arrived = joined(self.arrived, clock)
        if self.missing == 0:
            self.passed = joined(self.passed, self.arrived)
            self.missing, self.flips = self.count, self.flips + 1


class Shared:
    """A view of shared memory, and its cells by place and half of the rows; or barriers, by place."""

    def __init__(self, machine: "Machine", data: Tensor, cells: Any, barriers: list[Barrier] | None = None) -> None:
        self.machine, self.data, self.cells, self.barriers = machine, data, cells, barriers

    def index(self, place: int) -> "Shared":
        if self.barriers is not None:
            return Shared(self.machine, self.data, [], [self.barriers[place]])
        return Shared(self.machine, self.data[place], self.cells[place])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        if dim == 1:
            return Shared(self.machine, self.data[:, start : start + length], self.cells)
        assert length * 2 == self.data.shape[0] and start in (0, length)
        return Shared(self.machine, self.data[start : start + length], [self.cells[start // length]])

    def permute(self, order: tuple[int, int]) -> "Shared":
        return Shared(self.machine, self.data.permute(order), self.cells)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Shared":
        """The first bytes, as another type and shape; what is kept in them does not depend on the layout."""
        count = math.prod(shape) * dtype.itemsize
        view = self.data.reshape(-1).view(torch.uint8)[:count].view(dtype).view(shape)
        return Shared(self.machine, view, self.cells)

    def store(self, value: Tensor) -> None:
        self.machine.step()
        assert value.shape == self.data.shape, (value.shape, self.data.shape)
        actor = self.machine.actor
        self.machine.write(self.cells, actor, self.machine.clocks[actor])
        self.data.copy_(value.to(self.data.dtype))

    def load(self, layout: Any) -> Tensor:
        self.machine.step()
        self.machine.read(self.cells)
        return values(self.data.clone())


class Product:
    """An accumulator that products are being added to."""

    def __init__(self, start: Tensor) -> None:
        self.start, self.terms = start, []


class Machine:
    """Shared memory, partitions and their clocks of one program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clocks: dict[str, Clock] = {}
        self.fences: Clock = {}
        self.cells: list[Cell] = []
        self.queues: dict[str, list[Callable[[], None]]] = {}
        self.committed: dict[str, int] = {}
        self.landed: dict[str, list[Clock]] = {}
        self.products: dict[str, list[tuple[Any, Any]]] = {}
        self.waiting: dict[str, Callable[[], bool]] = {}
        self.batons: dict[str, threading.Semaphore] = {}
        self.failure: BaseException | None = None
        self.finished = threading.Event()
        self.names = threading.local()

    @property
    def actor(self) -> str:
        return str(self.names.actor)

    # Order: who may do what, by the clocks

    def tick(self, actor: str) -> int:
        self.clocks[actor][actor] = self.clocks[actor].get(actor, 0) + 1
        return self.clocks[actor][actor]

    def write(self, cells: list[Cell], actor: str, before: Clock) -> None:
        """`before`: what is known to have happened before the write."""
        for cell in cells:
            if cell.reading:
                raise Race(f"{actor} overwrites {cell.name} while a product of {cell.reading[0]} reads it")
            known = [cell.written] if cell.written else []
            for other, when in [*known, *cell.read.items()]:
                if other != actor and when > before.get(other, 0):
                    raise Race(f"{actor} overwrites {cell.name}, which {other} may still use")
            cell.written, cell.fenced, cell.read = (actor, self.tick(actor)), {}, {}

    def read(self, cells: list[Cell], as_product: bool = False) -> None:
        clock = self.clocks[self.actor]
        for cell in cells:
            if cell.written is None or cell.written[1] > clock.get(cell.written[0], 0):
                raise Race(f"{self.actor} reads {cell.name} before it is known to be written")
            if as_product:
                # A thread's own stores are to be fenced before they are announced, others' copies after they arrived.
                fencing = self.actor if cell.written[0].startswith("copies") else cell.written[0]
                if not 0 < cell.fenced.get(fencing, 0) <= clock.get(fencing, 0):
                    raise Race(f"{self.actor} gives {cell.name} to a product without a fence of {fencing}")
                cell.reading.append(self.actor)
            else:
                cell.read[self.actor] = self.tick(self.actor)

    def fence(self) -> None:
        self.step()
        clock, when = self.clocks[self.actor], self.tick(self.actor)
        for cell in self.cells:
            if cell.written and cell.written[1] <= clock.get(cell.written[0], 0):
                cell.fenced.setdefault(self.actor, when)

    # Barriers

    def init(self, view: Shared, count: int) -> None:
        (barrier,) = view.barriers or []
        barrier.count = barrier.missing = count

    def arrive(self, view: Shared) -> None:
        self.step()
        (barrier,) = view.barriers or []
        self.tick(self.actor)
        barrier.arrive(1, self.clocks[self.actor])

    def wait(self, view: Shared, phase: int) -> None:
        assert phase in (0, 1)
        (barrier,) = view.barriers or []
        self.step(lambda: barrier.flips & 1 != phase)
        self.clocks[self.actor] = joined(self.clocks[self.actor], barrier.passed)

    # Copies

    def copy(self, target: Shared, source: Pointer, mask: Tensor | None = None) -> None:
        self.step()
        actor, before = self.actor, dict(self.clocks[self.actor])
        queue = f"copies of {actor}"
        data = source.read(mask, 0)  # memory outside does not change

        def land() -> None:
            self.clocks[queue] = joined(self.clocks[queue], before)
            self.write(target.cells, queue, before)
            target.data.copy_(data)

        self.queues[actor].append(land)

    def copies_arrive(self, view: Shared, increment_count: bool) -> None:
        assert not increment_count
        self.step()
        actor, before = self.actor, dict(self.clocks[self.actor])
        (barrier,) = view.barriers or []
        self.queues[actor].append(lambda: barrier.arrive(THREADS, joined(before, self.clocks[f"copies of {actor}"])))

    def commit_copies(self) -> None:
        """The copies so far are a group."""
        self.step()
        actor = self.actor
        self.committed[actor] += 1
        self.queues[actor].append(lambda: self.landed[actor].append(dict(self.clocks[f"copies of {actor}"])))

    def wait_copies(self, outstanding: int) -> None:
        """All but the last groups have landed; with none outstanding, all copies."""
        queue, landed = self.queues[self.actor], self.landed[self.actor]
        if outstanding == 0:
            self.step(lambda: not queue)
            known = self.clocks[f"copies of {self.actor}"]
        else:
            least = self.committed[self.actor] - outstanding
            self.step(lambda: len(landed) >= least)
            known = landed[least - 1] if least > 0 else {}
        self.clocks[self.actor] = joined(self.clocks[self.actor], known)

    # Products

    def product(self, a: Any, b: Shared, total: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        self.step()
        running = total if isinstance(total, Product) else Product(total if use_acc else torch.zeros_like(total))
        for operand in (a, b):
            if isinstance(operand, Shared):
                self.read(operand.cells, as_product=True)
        running.terms.append((a, b))
        self.products[self.actor].append((a, b))
        return running

    def wait_products(self, outstanding: int = 0, deps: list[Any] | None = None) -> Any:
        """They read their operands now, at the last moment."""
        assert outstanding == 0 and deps
        self.step()
        results = [self._result(x) if isinstance(x, Product) else x for x in deps]
        for operand in (x for pair in self.products[self.actor] for x in pair if isinstance(x, Shared)):
            for cell in operand.cells:
                cell.reading.remove(self.actor)
                cell.read[self.actor] = self.tick(self.actor)
        self.products[self.actor].clear()
        return results[0] if len(results) == 1 else tuple(results)

    def _result(self, product: Product) -> Tensor:
        result = product.start.as_subclass(Tensor)
        for a, b in product.terms:
            left = a.data if isinstance(a, Shared) else a.as_subclass(Tensor)
            result = result + left.float() @ b.data.float()
        return values(result)

    # Threads

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        if layout == "barriers":
            return Shared(self, torch.empty(0), [], [Barrier() for _ in range(shape[0])])
        name = f"memory {len(self.cells)} {shape}"
        count = shape[0] if len(shape) > 1 else 1
        places = [[Cell(f"{name}[{i}] half {half}") for half in (0, 1)] for i in range(count)]
        self.cells += [cell for place in places for cell in place]
        data = torch.full(shape, -1, dtype=torch.int8).to(dtype)
        return Shared(self, data, places if len(shape) > 1 else places[0])

    def specialize(self, partitions: list[tuple[Callable[..., None], tuple]], warps: list[int], registers: Any) -> None:
        names = [function.__name__ for function, _ in partitions]
        assert len(warps) == len(partitions) - 1
        for name, (function, arguments) in zip(names, partitions, strict=True):
            self.clocks |= {name: {name: 0}, f"copies of {name}": {}}
            self.queues[name], self.products[name] = [], []
            self.committed[name], self.landed[name] = 0, []
            self.batons[name], self.waiting[name] = threading.Semaphore(0), lambda: True
            threading.Thread(target=self._run, args=(name, function, arguments), daemon=True).start()
        self._next()
        assert self.finished.wait(60), "the machine stands still"
        if self.failure:
            raise self.failure

    def _run(self, name: str, function: Callable[..., None], arguments: tuple) -> None:
        self.names.actor = name
        self.batons[name].acquire()
        try:
            if not self.failure:
                function(*arguments)
        except Stopped:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        del self.waiting[name]
        self._next()

    def step(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let another go on, perhaps; come back when `ready`."""
        if self.failure:
            raise Stopped
        self.waiting[self.actor] = ready
        self._next()
        self.batons[self.actor].acquire()
        if self.failure:
            raise Stopped

    def _next(self) -> None:
        while True:
            able = [name for name, ready in self.waiting.items() if self.failure or ready()]
            landing = [] if self.failure else [name for name, queue in self.queues.items() if queue]
            if not self.waiting and not landing:
                self.finished.set()
                return
            if not able and not landing:
                stuck = ", ".join(self.waiting)
                self.failure = Deadlock(f"waiting for ever: {stuck}")
                continue
            chosen = self.random.choice(able + ["land " + name for name in landing])
            if chosen in able:
                self.batons[chosen].release()
                return
            try:
                self.queues[chosen.removeprefix("land ")].pop(0)()
            except BaseException as error:
                self.failure = self.failure or error


# Gluon's names


def where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Tensor):
        return a if condition else b
    a, b = (x if isinstance(x, Tensor) else torch.tensor(x) for x in (a, b))
    return torch.where(condition, a, b)


def extreme(of_tensors: Callable[..., Tensor], of_numbers: Callable[..., Any], a: Any, b: Any) -> Any:
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return of_numbers(a, b)
    return of_tensors(*(x if isinstance(x, Tensor) else torch.tensor(x, dtype=y.dtype) for x, y in ((a, b), (b, a))))


def language(machine: Machine, program: int, programs: int) -> SimpleNamespace:
    nothing = {
        name: (lambda *args, **named: None)
        for name in ("BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "NVMMASharedLayout",
                     "SwizzledSharedLayout", "DistributedLinearLayout")
    }  # fmt: skip
    return SimpleNamespace(
        **nothing,
        **{name: getattr(torch, name) for name in ("int16", "int32", "int64", "uint8", "bfloat16", "float32", "exp2")},
        tensor=None,
        shared_memory_descriptor=None,
        constexpr=lambda x: x,
        pointer_type=lambda dtype: dtype,
        program_id=lambda axis: program,
        num_programs=lambda axis: programs,
        static_range=range,
        arange=lambda start, end, layout: values(torch.arange(start, end, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout: values(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype, layout: values(torch.full(shape, value, dtype=dtype)),
        load=lambda pointer, mask=None, other=0: pointer.read(mask, other),
        store=lambda pointer, value, mask: pointer.write(value, mask),
        cast=lambda x, dtype: x if isinstance(x, int) else x.to(dtype),
        where=where,
        minimum=lambda a, b: extreme(torch.minimum, min, a, b),
        maximum=lambda a, b: extreme(torch.maximum, max, a, b),
        max=lambda x, axis: x.amax(axis),
        fma=lambda a, b, c: (a.double() * b + c).float(),
        sum=lambda x, axis: x.sum(axis),
        join=lambda a, b: torch.stack((a, b), -1),
        convert_layout=lambda x, layout: x,
        inline_asm_elementwise=run_assembly,
        allocate_shared_memory=machine.allocate,
        warp_specialize=machine.specialize,
    )


def load_kernels(
    paths: Mapping[str, Path], machine: Machine, program: int, programs: int, changed: Mapping[str, str]
) -> dict[str, Any]:
    """The names of kernel files, in order, each of which may import from those before it. `changed`: other sources."""
    gl = language(machine, program, programs)
    jit = lambda function=None, **options: function or (lambda f: f)  # noqa: E731
    hopper = SimpleNamespace(
        async_copy=SimpleNamespace(
            async_copy_global_to_shared=machine.copy,
            mbarrier_arrive=machine.copies_arrive,
            commit_group=machine.commit_copies,
            wait_group=machine.wait_copies,
        ),
        mbarrier=SimpleNamespace(
            init=machine.init, arrive=machine.arrive, wait=machine.wait, MBarrierLayout=lambda: "barriers"
        ),
        fence_async_shared=machine.fence,
        warpgroup_mma=machine.product,
        warpgroup_mma_wait=machine.wait_products,
    )
    modules: dict[str, Any] = {
        "triton.experimental": SimpleNamespace(gluon=SimpleNamespace(jit=jit, constexpr_function=lambda f: f)),
        "triton.experimental.gluon": SimpleNamespace(language=gl),
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.language.core": SimpleNamespace(_aggregate=lambda cls: cls),
        "triton.language.extra.cuda": SimpleNamespace(gdc_launch_dependents=lambda: None),
    }
    scope = {**vars(builtins), "__import__": lambda name, *_: modules[name]}
    found: dict[str, Any] = {}
    for name, path in paths.items():
        names: dict[str, Any] = {"__builtins__": scope, "__name__": name}
        exec(compile(changed.get(name, path.read_text()), str(path), "exec"), names)
        modules[name] = SimpleNamespace(**names)
        found |= names
    return found


def run(launch: Any, paths: Mapping[str, Path], seed: int, changed: Mapping[str, str] | None = None) -> None:
    """A launch (see `attend_gluon.prepare`), one program after the other."""
    memory = {name: Pointer(x.view(-1)) if isinstance(x, Tensor) else x for name, x in launch.arguments.items()}
    for program in range(launch.programs):
        kernels = load_kernels(paths, Machine(seed + program), program, launch.programs, changed or {})
        kernels[launch.kernel.fn.__name__](**memory, **launch.constants)


# Inline assembly


def run_assembly(
    text: str, constraints: str, args: list[Tensor], dtype: Any, is_pure: bool, pack: int
) -> tuple[Tensor, ...]:
    """PTX on 32-bit words, element by element; only the instructions that decoders use."""
    assert pack == 1 and is_pure and all(kind.strip("=") == "r" for kind in constraints.split(","))
    outputs = constraints.count("=")
    registers = {f"${outputs + i}": x.as_subclass(Tensor).long() & 0xFFFFFFFF for i, x in enumerate(args)}
    for line in re.sub(r"[{}]", "", text).split(";"):
        operation, _, rest = line.strip().partition(" ")
        if operation and operation != ".reg":
            target, *sources = (word.strip() for word in rest.split(","))
            registers[target] = execute(operation, [registers[x] if x in registers else int(x, 0) for x in sources])
    return tuple(values(signed(registers[f"${i}"])) for i in range(outputs))


def execute(operation: str, x: list[Any]) -> Tensor:
    if operation == "shr.b32":
        return x[0] >> x[1]
    if operation == "shl.b32":
        return (x[0] << x[1]) & 0xFFFFFFFF
    if operation == "and.b32":
        return x[0] & x[1]
    if operation == "lop3.b32":
        a, b, c, table = x
        rows = ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1)
        return sum(rows) & 0xFFFFFFFF
    if operation == "prmt.b32":
        eight = [(word >> 8 * i) & 0xFF for word in x[:2] for i in range(4)]
        chosen = [(x[2] >> 4 * i) & 0xF for i in range(4)]
        assert max(chosen) < 8, "the mode that repeats signs is not modelled"
        return sum(eight[place] << 8 * i for i, place in enumerate(chosen))
    assert operation == "mul.rn.bf16x2", operation
    a, b = (signed(word).contiguous().view(torch.bfloat16) for word in x)
    return (a * b).view(torch.int32).long() & 0xFFFFFFFF


def signed(words: Tensor) -> Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
