"""Compile a Triton kernel for sm_80, run its grid in numpy, copy results back into the tensors."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .instructions import ENVIRONMENT, STORED, Translator, numpy_type
from .memory import UNSIGNED, Array, Copy, Faults, GlobalMemory, SharedMemory
from .parser import Instruction, parse
from .warp import matrix_rows

_SPECIALS = ("%ctaid", "%nctaid")


@dataclass
class Program:
    """A kernel ready to run: one Python function for every basic block, and how each block ends."""

    name: str
    functions: list[Callable[..., None]]
    ends: list[tuple[str, int, int | None, bool]]  # what, target block, register of the predicate, negated
    stored: list[str]
    smallest_shared: int
    instructions: list[int]  # of each block
    parameters: list[str]  # types


def translate(ptx: str) -> Program:
    kernel = parse(ptx)
    t = Translator(kernel)
    sources, ends, counts = [], [], []
    for block in kernel.blocks:
        t.lines, end = [], ("next", 0, None, False)
        for instruction in block.instructions:
            if instruction.opcode[0] in ("bra", "ret", "exit"):
                end = _end(t, instruction, kernel.labels)
            else:
                t.translate(instruction)
        sources.append("\n    ".join(["def block(R, G, P):", *t.lines, "pass"]))
        ends.append(end)
        counts.append(len(block.instructions))
    environment = {**ENVIRONMENT, **t.constants}
    functions = [_compiled(source, environment, t.places) for source in sources]
    return Program(kernel.name, functions, ends, t.stored, t.smallest_shared, counts, kernel.parameters)


def _end(t: Translator, to: Instruction, labels: dict[str, int]) -> tuple[str, int, int | None, bool]:
    register = None if to.predicate is None else t.register(to.predicate)
    if to.opcode[0] == "bra":
        return "bra", labels[to.operands[0]], register, to.negated
    return "ret", 0, register, to.negated


def _compiled(source: str, environment: dict[str, Any], places: list[Instruction]) -> Callable[..., None]:
    local: dict[str, Any] = {}
    exec(compile(source, "<ptx>", "exec"), environment, local)
    function = local["block"]
    return lambda registers, gang: function(registers, gang, places)


@dataclass
class Gang:
    """Thread blocks that have taken the same branches so far."""

    blocks: Array  # (blocks, 3): x, y, z of each in the grid
    numbers: Array  # of each block in the grid
    threads: int  # of one block
    grid: tuple[int, int, int]
    memory: GlobalMemory
    shared: SharedMemory
    parameters: list[Array]
    registers: list[Array] = field(default_factory=list)
    at: int = 0

    def __post_init__(self) -> None:
        n, one = len(self.blocks) * self.threads, np.arange(self.threads)
        self.size = n
        self.block = np.repeat(np.arange(len(self.blocks)), self.threads)
        self.thread = np.tile(one, len(self.blocks))
        self.warp = self.thread // 32
        self.number = self.numbers[self.block].astype(np.int32)
        self.special = {"%tid.x": self.thread.astype(np.uint32), "%ntid.x": self.full(self.threads, "u4")}
        for axis, name in enumerate("xyz"):
            self.special[f"%ctaid.{name}"] = self.blocks[self.block, axis].astype(np.uint32)
            self.special[f"%nctaid.{name}"] = self.full(self.grid[axis], "u4")
        self.special["%laneid"] = (self.thread & 31).astype(np.uint32)

    def full(self, value: Any, kind: Any) -> Array:
        return np.full(self.size, value, kind)

    def parameter(self, place: int, kind: str) -> Array:
        return self.full(self.parameters[place].view(kind), kind)

    def split(self, chosen: Array) -> Gang:
        """The blocks for which `chosen` holds, with all their state."""
        keep = np.flatnonzero(chosen)
        rows = lambda x: x.reshape(len(self.blocks), -1)[keep].reshape(-1)  # noqa: E731
        part = Gang(
            self.blocks[keep], self.numbers[keep], self.threads, self.grid, self.memory,
            self.shared.select(keep), self.parameters, [], self.at,
        )  # fmt: skip
        part.registers = [rows(register) for register in self.registers]
        return part

    # memory instructions: predicates become selections

    def _chosen(self, mask: Array | None) -> Array | slice:
        return slice(None) if mask is None else np.flatnonzero(mask)

    def _filled(self, mask: Array | None, items: Array) -> list[Array]:
        """(accesses, items) to one array over all threads for each item."""
        if mask is None:
            return [np.ascontiguousarray(items[:, i]) for i in range(items.shape[1])]
        whole = np.zeros((items.shape[1], self.size), items.dtype)
        whole[:, mask] = items.T
        return list(whole)

    def _stacked(self, values: list[Array], size: int, chosen: Array | slice) -> Array:
        wide = [np.broadcast_to(value, self.size)[chosen] for value in values]
        return np.stack(wide, 1).astype(UNSIGNED[size], copy=False)

    def load_global(
        self, address: Array, size: int, items: int, mask: Array | None, where: object
    ) -> list[Array]:
        chosen = self._chosen(mask)
        found = self.memory.read(address[chosen], size, items, self.number[chosen], where)
        return self._filled(mask, found)

    def store_global(
        self, address: Array, values: list[Array], size: int, mask: Array | None, where: object
    ) -> None:
        chosen = self._chosen(mask)
        data = self._stacked(values, size, chosen)
        self.memory.write(address[chosen], data, self.number[chosen], where)

    def load_shared(
        self, address: Array, size: int, items: int, mask: Array | None, where: object
    ) -> list[Array]:
        chosen = self._chosen(mask)
        place = (self.block[chosen], address[chosen])
        return self._filled(mask, self.shared.read(*place, size, items, self.warp[chosen], where))

    def store_shared(
        self, address: Array, values: list[Array], size: int, mask: Array | None, where: object
    ) -> None:
        chosen = self._chosen(mask)
        data = self._stacked(values, size, chosen)
        self.shared.write(self.block[chosen], address[chosen], data, self.warp[chosen], where)

    def copy_async(
        self, to: Array, origin: Array, size: int, real: Array, mask: Array | None, where: object
    ) -> None:
        """cp.async of `real` bytes out of `size`; the rest is zero. Triton uses all or none."""
        chosen = np.arange(self.size) if mask is None else np.flatnonzero(mask)
        real = np.broadcast_to(real, self.size)[chosen]
        if not np.isin(real, (0, size)).all():
            raise NotImplementedError(f"cp.async of a part of its bytes: {where}")
        data = np.zeros((chosen.size, size // 4), np.uint32)
        full = chosen[real > 0]
        data[real > 0] = self.memory.read(origin[full], 4, size // 4, self.number[full], where)
        self.shared.copy_async(Copy(self.block[chosen], to[chosen], data, self.warp[chosen], where))

    def ldmatrix(self, address: Array, count: int, transposed: bool, where: object) -> list[Array]:
        """Lane 8 m + r holds the address of row r of matrix m."""
        lanes = address.reshape(-1, 32)[:, : 8 * count].reshape(-1)
        every = np.arange(self.size).reshape(-1, 32)[:, : 8 * count].reshape(-1)
        halves = self.shared.read(self.block[every], lanes, 2, 8, self.warp[every], where)
        rows = halves.reshape(-1, count, 8, 8)
        return [matrix_rows(rows[:, m], transposed) for m in range(count)]


@dataclass
class Report:
    """What a number of launches did."""

    launches: list[str] = field(default_factory=list)
    blocks: int = 0
    instructions: int = 0  # of one thread, over all gangs
    faults: Faults = field(default_factory=Faults)


def run(
    program: Program,
    shared: int,
    threads: int,
    grid: tuple[int, ...],
    parameters: list[Any],
    memory: GlobalMemory,
    report: Report,
) -> None:
    """Run a grid. `parameters` are numbers; pointers are addresses in `memory`."""
    size = (*grid, 1, 1)[:3]
    blocks = np.stack(np.meshgrid(*map(np.arange, size), indexing="ij"), -1).reshape(-1, 3)
    space = SharedMemory(len(blocks), shared, program.smallest_shared, report.faults)
    values = [_bits(value, kind) for value, kind in zip(parameters, program.parameters, strict=True)]
    gang = Gang(blocks, np.arange(len(blocks)), threads, size, memory, space, values)
    zeros = {kind: np.zeros(gang.size, kind) for kind in set(STORED.values())}
    gang.registers = [zeros[kind] for kind in program.stored]
    report.launches.append(program.name)
    report.blocks += len(blocks)
    waiting = [gang]
    with np.errstate(all="ignore"):
        while waiting:
            waiting += _run_gang(program, waiting.pop(), report)


def _bits(value: Any, kind: str) -> Array:
    """One parameter as the bits of its declared type."""
    if kind == "f32":
        return np.array([value], np.float32).view(np.uint32)
    size = numpy_type(kind)[1]
    return np.array([int(value) & ((1 << 8 * int(size)) - 1)], f"u{size}")


def _run_gang(program: Program, gang: Gang, report: Report) -> Iterable[Gang]:
    """Until the gang ends or splits; returns the parts."""
    while gang.at < len(program.functions):
        at = gang.at
        program.functions[at](gang.registers, gang)
        report.instructions += program.instructions[at]
        what, target, register, negated = program.ends[at]
        elsewhere = len(program.functions) if what == "ret" else target
        if what == "next":
            gang.at = at + 1
        elif register is None:
            gang.at = elsewhere
        else:
            taken = _by_block(gang, gang.registers[register], negated)
            if taken.all() or not taken.any():
                gang.at = elsewhere if taken.all() else at + 1
            else:
                parts = gang.split(taken), gang.split(~taken)
                parts[0].at, parts[1].at = elsewhere, at + 1
                return parts
    return ()


def _by_block(gang: Gang, predicate: Array, negated: bool) -> Array:
    rows = predicate.reshape(len(gang.blocks), -1)
    if (rows != rows[:, :1]).any():
        raise NotImplementedError("threads of one block take different branches")
    return rows[:, 0] != negated


def tensor_bytes(tensor: torch.Tensor) -> Array:
    """The tensor's whole storage, as a numpy array over the same memory."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return np.zeros(0, np.uint8)
    return np.frombuffer((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr()), np.uint8)


_programs: dict[str, Program] = {}


def launch(
    ptx: str, shared: int, warps: int, grid: tuple[int, ...], arguments: list[Any], report: Report
) -> None:
    """Run PTX on tensors and numbers, in the order of the kernel's parameters (Triton adds two)."""
    key = hashlib.sha256(ptx.encode()).hexdigest()
    if key not in _programs:
        _programs[key] = translate(ptx)
    storages: dict[int, Array] = {}
    for value in arguments:
        if isinstance(value, torch.Tensor):
            storages.setdefault(value.untyped_storage().data_ptr(), tensor_bytes(value))
    places = {pointer: place for place, pointer in enumerate(storages)}
    memory = GlobalMemory([data.size for data in storages.values()], report.faults)
    for pointer, data in storages.items():
        memory.put(places[pointer], data)

    def number(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        start = value.untyped_storage().data_ptr()
        return memory.bases[places[start]] + value.data_ptr() - start

    parameters = [number(value) for value in arguments]
    parameters += [0] * (len(_programs[key].parameters) - len(parameters))  # scratch memory: not used
    run(_programs[key], shared, 32 * warps, grid, parameters, memory, report)
    for pointer, data in storages.items():
        data[:] = memory.get(places[pointer])
