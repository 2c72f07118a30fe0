"""Global and shared memory of a gang of thread blocks, with the detectors.

Reported as `Fault`s: shared-memory races (two warps touch the same place, one of them writes, and no
barrier lies between), shared memory read or overwritten while a cp.async to it is not waited for, and
global memory that one block writes and another touches in the same launch. Raised at once: accesses out of
bounds and misaligned ones, which would end a real launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
NOBODY, SEVERAL = -1, -2


class BadAccess(RuntimeError):
    """An access that ends a launch on a device: out of bounds or misaligned."""


@dataclass(frozen=True, order=True)
class Fault:
    kind: str
    where: str  # the instruction that completed it


@dataclass
class Faults:
    found: set[Fault] = field(default_factory=set)

    def add(self, kind: str, where: object) -> None:
        self.found.add(Fault(kind, str(where)))


class GlobalMemory:
    """One flat space that holds every tensor of a launch, with gaps between them that nobody may touch."""

    GAP = 256
    GRAIN = 2  # bytes; who wrote and who read is kept for every two

    def __init__(self, sizes: list[int], faults: Faults) -> None:
        self.bases, top = [], self.GAP
        for size in sizes:
            self.bases.append(top)
            top += (size + 2 * self.GAP - 1) // self.GAP * self.GAP
        self.bytes = np.zeros(top, np.uint8)
        self.views = {n: self.bytes.view(t) for n, t in UNSIGNED.items()}
        self.valid = np.zeros(top, bool)
        self.writer = np.full(top // self.GRAIN, NOBODY, np.int32)
        self.reader = np.full(top // self.GRAIN, NOBODY, np.int32)
        self.sizes, self.faults = sizes, faults

    def put(self, place: int, data: Array) -> None:
        base, size = self.bases[place], self.sizes[place]
        self.bytes[base : base + size] = data
        self.valid[base : base + size] = True

    def get(self, place: int) -> Array:
        return self.bytes[self.bases[place] : self.bases[place] + self.sizes[place]]

    def _check(self, address: Array, width: int, where: object) -> None:
        if (address % width).any():
            raise BadAccess(f"misaligned global access of {width} bytes: {where}")
        inside = (address >= 0) & (address + width <= self.bytes.size)
        if not inside.all() or not (self.valid[address] & self.valid[address + width - 1]).all():
            raise BadAccess(f"global access out of bounds: {where}")

    def _grains(self, address: Array, width: int) -> Array:
        return (address // self.GRAIN)[:, None] + np.arange(max(1, width // self.GRAIN))

    def read(self, address: Array, item: int, items: int, block: Array, where: object) -> Array:
        """(accesses, items) numbers of `item` bytes each; `block` says which thread block reads."""
        self._check(address, item * items, where)
        grains = self._grains(address, item * items)
        me = block[:, None]
        writer = self.writer[grains]
        if ((writer != NOBODY) & (writer != me)).any():
            self.faults.add("global memory read that another block writes", where)
        reader = self.reader[grains]
        self.reader[grains] = np.where((reader == NOBODY) | (reader == me), me, SEVERAL)
        return self.views[item][(address // item)[:, None] + np.arange(items)]

    def write(self, address: Array, data: Array, block: Array, where: object) -> None:
        item, items = data.dtype.itemsize, data.shape[1]
        self._check(address, item * items, where)
        grains, me = self._grains(address, item * items), block[:, None]
        for others in (self.writer[grains], self.reader[grains]):
            if ((others != NOBODY) & (others != me)).any():
                self.faults.add("global memory written that another block touches", where)
        self.writer[grains] = np.broadcast_to(me, grains.shape)
        if (self.writer[grains] != me).any():  # in one and the same instruction
            self.faults.add("global memory written that another block touches", where)
        places = (address // item)[:, None] + np.arange(items)
        self.views[item][places] = data
        if (self.views[item][places] != data).any():
            self.faults.add("two threads write different numbers to one place at once", where)


@dataclass
class Copy:
    """A cp.async on its way: what each thread copies where."""

    block: Array
    address: Array
    data: Array  # (threads, words) uint32
    warp: Array
    where: object


class SharedMemory:
    """Shared memory of `blocks` thread blocks, one after another. `grain` is the smallest access in bytes."""

    def __init__(self, blocks: int, size: int, grain: int, faults: Faults) -> None:
        self.blocks, self.size, self.grain, self.faults = blocks, size, grain, faults
        self.stride = max(16, (size + 15) // 16 * 16)
        self.bytes = np.full(blocks * self.stride, 0xFF, np.uint8)  # NaN until written
        self._views()
        grains = blocks * self.stride // grain
        self.epoch = 1  # counts barriers
        self.writer, self.reader = np.full(grains, NOBODY, np.int16), np.full(grains, NOBODY, np.int16)
        self.written, self.seen = np.zeros(grains, np.int32), np.zeros(grains, np.int32)
        self.pending = np.zeros(grains, bool)
        self.open: list[Copy] = []
        self.groups: list[list[Copy]] = []

    def _views(self) -> None:
        self.views = {n: self.bytes.view(t) for n, t in UNSIGNED.items()}

    def barrier(self) -> None:
        self.epoch += 1

    def _check(self, address: Array, width: int, where: object) -> None:
        if (address % width).any():
            raise BadAccess(f"misaligned shared access of {width} bytes: {where}")
        if address.size and (address.max() + width > self.size or address.min() < 0):
            raise BadAccess(f"shared access out of bounds ({self.size} bytes): {where}")

    def _grains(self, flat: Array, width: int) -> Array:
        return (flat // self.grain)[:, None] + np.arange(max(1, width // self.grain))

    def _note_read(self, grains: Array, warp: Array, where: object) -> None:
        me = warp[:, None]
        if self.pending[grains].any():
            self.faults.add("shared memory read before its cp.async was waited for", where)
        if ((self.written[grains] == self.epoch) & (self.writer[grains] != me)).any():
            self.faults.add("shared-memory race: read after another warp's write", where)
        others = (self.seen[grains] == self.epoch) & (self.reader[grains] != me)
        self.reader[grains] = np.where(others, SEVERAL, me)
        self.seen[grains] = self.epoch

    def _note_write(self, grains: Array, warp: Array, where: object) -> None:
        me = warp[:, None]
        if self.pending[grains].any():
            self.faults.add("shared memory written before its cp.async was waited for", where)
        if ((self.seen[grains] == self.epoch) & (self.reader[grains] != me)).any():
            self.faults.add("shared-memory race: write after another warp's read", where)
        if ((self.written[grains] == self.epoch) & (self.writer[grains] != me)).any():
            self.faults.add("shared-memory race: write after another warp's write", where)

    def _wrote(self, grains: Array, warp: Array) -> None:
        self.writer[grains] = np.broadcast_to(warp[:, None], grains.shape)
        self.written[grains] = self.epoch

    def read(self, block: Array, address: Array, item: int, items: int, warp: Array, where: object) -> Array:
        width = item * items
        self._check(address, width, where)
        flat = address + block * self.stride
        self._note_read(self._grains(flat, width), warp, where)
        return self.views[item][(flat // item)[:, None] + np.arange(items)]

    def write(self, block: Array, address: Array, data: Array, warp: Array, where: object) -> None:
        item, width = data.dtype.itemsize, data.dtype.itemsize * data.shape[1]
        self._check(address, width, where)
        flat = address + block * self.stride
        grains = self._grains(flat, width)
        self._note_write(grains, warp, where)
        self._wrote(grains, warp)
        places = (flat // item)[:, None] + np.arange(data.shape[1])
        self.views[item][places] = data
        if (self.views[item][places] != data).any():
            self.faults.add("two threads write different numbers to one place at once", where)

    def copy_async(self, copy: Copy) -> None:
        """Starts a copy: it lands at its wait, and nobody may touch the place before."""
        width = 4 * copy.data.shape[1]
        self._check(copy.address, width, copy.where)
        grains = self._grains(copy.address + copy.block * self.stride, width)
        self._note_write(grains, copy.warp, copy.where)
        self.pending[grains] = True
        self.open.append(copy)

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait(self, left: int) -> None:
        """Lands all but the last `left` groups; a barrier must follow before other warps may read them."""
        while len(self.groups) > left:
            for copy in self.groups.pop(0):
                flat = copy.address + copy.block * self.stride
                grains = self._grains(flat, 4 * copy.data.shape[1])
                self.pending[grains] = False
                self._wrote(grains, copy.warp)
                self.views[4][(flat // 4)[:, None] + np.arange(copy.data.shape[1])] = copy.data

    def select(self, blocks: Array) -> SharedMemory:
        """The shared memory of some of the blocks, for a gang that was split."""
        part = SharedMemory(0, self.size, self.grain, self.faults)
        part.blocks, part.epoch = len(blocks), self.epoch
        for name in ("bytes", "writer", "reader", "written", "seen", "pending"):
            whole = getattr(self, name)
            setattr(part, name, whole.reshape(self.blocks, -1)[blocks].reshape(-1))
        part._views()
        place = np.full(self.blocks, -1)
        place[blocks] = np.arange(len(blocks))

        def take(copy: Copy) -> Copy:
            mine = place[copy.block] >= 0
            fields = (copy.address[mine], copy.data[mine], copy.warp[mine])
            return Copy(place[copy.block[mine]], *fields, copy.where)

        part.open = [take(copy) for copy in self.open]
        part.groups = [[take(copy) for copy in group] for group in self.groups]
        return part
