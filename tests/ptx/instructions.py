"""One PTX instruction to Python source over numpy arrays: the semantics of about 60 opcodes.

A register is a flat array over all threads of a gang, stored as its bits: bool for predicates, unsigned
integers of its size for all others. `R` in the source is the list of registers, `G` the gang (launcher.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import warp
from .memory import Array
from .parser import Instruction, Kernel

STORED = {"%p": "?", "%rs": "u2", "%r": "u4", "%f": "u4", "%rd": "u8", "%fd": "u8"}
_SIZE = {"8": 1, "16": 2, "32": 4, "64": 8}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_COMPARE |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_SPECIAL = ("%tid", "%ntid", "%ctaid", "%nctaid", "%laneid", "%warpid")


def numpy_type(ptx: str) -> str:
    """ "s32" -> "i4", "b16" -> "u2", "f32" -> "f4"."""
    if ptx == "pred":
        return "?"
    return {"s": "i", "u": "u", "b": "u", "f": "f"}[ptx[0]] + str(_SIZE[ptx[1:]])


def truncated_division(a: Array, b: Array) -> Array:
    """Integers, towards zero; a divisor of zero gives what a device may give: anything."""
    if a.dtype.kind == "u":
        return a // np.maximum(b, 1)
    quotient = np.abs(a) // np.maximum(np.abs(b), 1)
    return np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype)


def shifted(a: Array, by: Array, left: bool) -> Array:
    """shl and shr: a shift by the width or more clears the number (or leaves its sign)."""
    bits = 8 * a.dtype.itemsize
    amount = np.minimum(by, bits - 1).astype(a.dtype)
    moved = a << amount if left else a >> amount
    return moved if a.dtype.kind == "i" and not left else np.where(by < bits, moved, a.dtype.type(0))


def permuted(a: Array, b: Array, selector: Array) -> Array:
    """prmt.b32 without a mode: four bytes chosen from the eight of a and b."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    total = np.zeros(both.shape, np.uint64)
    for place in range(4):
        pick = (selector.astype(np.uint64) >> np.uint64(4 * place)) & np.uint64(15)
        byte = (both >> (np.uint64(8) * (pick & np.uint64(7)))) & np.uint64(255)
        sign = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        total |= np.where(pick >= 8, sign, byte) << np.uint64(8 * place)
    return total.astype(np.uint32)


def logic3(a: Array, b: Array, c: Array, table: int) -> Array:
    """lop3.b32: any function of three bits, from its table of eight."""
    total = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for row in range(8):
        if table >> row & 1:
            terms = (x if row & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1)))
            first, second, third = terms
            total |= first & second & third
    return total


ENVIRONMENT: dict[str, Any] = {
    "np": np, "warp": warp, "truncated_division": truncated_division, "shifted": shifted,
    "permuted": permuted, "logic3": logic3, "f4": np.float32, "f8": np.float64, "u4": np.uint32,
}  # fmt: skip


@dataclass
class Translator:
    """Collects the registers and constants of one kernel while its instructions become source."""

    kernel: Kernel
    registers: dict[str, int] = field(default_factory=dict)
    stored: list[str] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    places: list[Instruction] = field(default_factory=list)
    smallest_shared: int = 4

    # operands

    def register(self, name: str) -> int:
        if name not in self.registers:
            kind = re.match(r"%[a-z]+", name)
            self.registers[name] = len(self.stored)
            self.stored.append(STORED[kind[0] if kind else name])
        return self.registers[name]

    def constant(self, text: str, kind: str) -> str:
        if text.startswith(("0f", "0d", "0F", "0D")):
            bits = int(text[2:], 16)
        elif text == "global_smem":
            bits = 0
        else:
            bits = int(text, 0)
        size = 1 if kind == "?" else int(kind[1])
        raw = np.array([bits & ((1 << 8 * size) - 1)], f"u{size}")
        name = f"k{kind[0] if kind != '?' else 'p'}{size}_{bits & ((1 << 64) - 1):x}"
        self.constants[name] = raw.astype(bool) if kind == "?" else raw.view(kind)
        return name

    def source(self, operand: str, kind: str) -> str:
        """The operand's value as an array of a numpy kind ("f4", "i4", "?"…)."""
        if operand.startswith(_SPECIAL):
            name = f"G.special[{operand!r}]"
            return name if kind == "u4" else f"{name}.view('{kind}')"
        if not operand.startswith("%"):
            return self.constant(operand, kind)
        place = self.register(operand)
        stored = self.stored[place]
        if kind == stored:
            return f"R[{place}]"
        if kind[1:] == stored[1:]:
            return f"R[{place}].view('{kind}')"
        return f"R[{place}].astype('u{kind[1]}').view('{kind}')"  # the low part of a wider register

    def address(self, operand: str) -> str:
        base, offset = re.match(r"\[\s*(%?\w+)\s*(?:\+\s*(-?\d+))?\s*\]", operand).groups()  # type: ignore[union-attr]
        if not base.startswith("%"):
            return f"G.full({int(offset or 0)}, np.int64)"
        value = f"R[{self.register(base)}].astype(np.int64)"
        return f"({value} + {offset})" if offset and offset != "0" else value

    def assign(self, to: Instruction, register: str, expression: str, kind: str) -> None:
        """register = expression, whose elements are of a numpy kind; predicated if the instruction is."""
        if register == "_":
            return
        place = self.register(register)
        stored = self.stored[place]
        if stored != "?" and kind != stored:
            same = kind[1:] == stored[1:]
            expression = f"({expression}).view('{stored}')" if same else f"({expression}).astype('{stored}')"
        if to.predicate:
            expression = f"np.where({self.predicate(to)}, {expression}, R[{place}])"
        self.lines.append(f"R[{place}] = {expression}")

    def predicate(self, to: Instruction) -> str:
        if to.predicate is None:
            return "None"
        name = f"R[{self.register(to.predicate)}]"
        return f"~{name}" if to.negated else name

    def where(self, to: Instruction) -> str:
        self.places.append(to)
        return f"P[{len(self.places) - 1}]"

    def translate(self, to: Instruction) -> None:
        try:
            _TABLE[to.opcode[0]](self, to)
        except (KeyError, IndexError, AttributeError, ValueError) as error:
            raise NotImplementedError(f"PTX instruction {to}: {error!r}") from error


def members(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{} ").split(",")]


def _kind(to: Instruction) -> str:
    return numpy_type(to.opcode[-1])


def _arithmetic(expression: Callable[[list[str], str, tuple[str, ...]], str]) -> Callable[..., None]:
    """An instruction whose operands and result have one type."""

    def translate(t: Translator, to: Instruction) -> None:
        kind = _kind(to)
        values = [t.source(operand, kind) for operand in to.operands[1:]]
        t.assign(to, to.operands[0], expression(values, kind, to.opcode), kind)

    return translate


def _multiply(t: Translator, to: Instruction) -> None:
    """mul and mad: .lo, .hi, .wide, or of floats."""
    kind, add = _kind(to), to.opcode[0] == "mad"
    a, b = (t.source(operand, kind) for operand in to.operands[1:3])
    result = kind
    if "wide" in to.opcode:
        result = kind[0] + str(2 * int(kind[1]))
        value = f"{a}.astype('{result}') * {b}.astype('{result}')"
    elif "hi" in to.opcode:
        wide = kind[0] + str(2 * int(kind[1]))
        value = f"(({a}.astype('{wide}') * {b}.astype('{wide}')) >> {8 * int(kind[1])}).astype('{kind}')"
    else:
        value = f"{a} * {b}"
    if add:
        value = f"{value} + {t.source(to.operands[3], result)}"
    t.assign(to, to.operands[0], value, result)


def _fused(v: list[str], kind: str, _: tuple[str, ...]) -> str:
    return f"({v[0]}.astype(f8) * {v[1]} + {v[2]}).astype(f4)"


def _extreme(v: list[str], kind: str, opcode: tuple[str, ...]) -> str:
    quiet = kind[0] == "f" and "NaN" not in opcode
    name = ("np.f" if quiet else "np.") + opcode[0] + ("" if quiet else "imum")
    value = f"{name}({v[0]}, {v[1]})"
    return (
        f"np.maximum({value}, {(kind[0] == 'f' and '0.0') or '0'}).astype('{kind}')"
        if "relu" in opcode
        else value
    )


def _divide(v: list[str], kind: str, _: tuple[str, ...]) -> str:
    return f"{v[0]} / {v[1]}" if kind[0] == "f" else f"truncated_division({v[0]}, {v[1]})"


def _remainder(v: list[str], kind: str, _: tuple[str, ...]) -> str:
    return f"{v[0]} - truncated_division({v[0]}, {v[1]}) * {v[1]}"


def _shift(t: Translator, to: Instruction) -> None:
    kind = _kind(to)
    a, by = t.source(to.operands[1], kind), t.source(to.operands[2], "u4")
    t.assign(to, to.operands[0], f"shifted({a}, {by}, {to.opcode[0] == 'shl'})", kind)


def _extract(t: Translator, to: Instruction) -> None:
    """bfe with constant place and length."""
    place, length = int(to.operands[2], 0), int(to.operands[3], 0)
    a = t.source(to.operands[1], "u4")
    if to.opcode[-1] == "u32":
        t.assign(to, to.operands[0], f"({a} >> u4({place})) & u4({(1 << length) - 1})", "u4")
    else:
        value = f"({a} << u4({32 - place - length})).view('i4') >> np.int32({32 - length})"
        t.assign(to, to.operands[0], value, "i4")


def _compare(t: Translator, to: Instruction) -> None:
    kind, test = _kind(to), to.opcode[1]
    a, b = t.source(to.operands[1], kind), t.source(to.operands[2], kind)
    unordered = f"(np.isnan({a}) | np.isnan({b}))" if kind[0] == "f" else ""
    if test in ("nan", "num"):
        value = unordered if test == "nan" else f"~{unordered}"
    elif test in _COMPARE:
        value = f"({a} {_COMPARE[test]} {b})"
        if kind[0] == "f" and test == "ne":
            value = f"({value} & ~{unordered})"
    else:  # ltu, neu, …: also true where a number is NaN
        value = f"(({a} {_COMPARE[test[:-1]]} {b}) | {unordered})"
    if to.opcode[2] in ("and", "or", "xor"):
        sign = {"and": "&", "or": "|", "xor": "^"}[to.opcode[2]]
        value = f"({value} {sign} {t.source(to.operands[3], '?')})"
    t.assign(to, to.operands[0], value, "?")


def _select(t: Translator, to: Instruction) -> None:
    kind = _kind(to)
    a, b = t.source(to.operands[1], kind), t.source(to.operands[2], kind)
    t.assign(to, to.operands[0], f"np.where({t.source(to.operands[3], '?')}, {a}, {b})", kind)


def _convert(t: Translator, to: Instruction) -> None:
    target, origin = (part for part in to.opcode[1:] if re.fullmatch(r"[subf]\d+|b?f16(x2)?|tf32", part))
    half = {"bf16": "bf16", "f16": "f16", "bf16x2": "bf16", "f16x2": "f16"}
    if target in half and origin == "f32":
        bits = [f"warp.{half[target]}_bits({t.source(operand, 'u4')})" for operand in to.operands[1:]]
        value = f"({bits[0]} << u4(16)) | {bits[1]}" if target.endswith("x2") else bits[0]
        t.assign(to, to.operands[0], value, "u4")
    elif target == "tf32":
        t.assign(to, to.operands[0], f"warp.tf32_bits({t.source(to.operands[1], 'u4')})", "u4")
    elif origin == "bf16":
        t.assign(to, to.operands[0], f"{t.source(to.operands[1], 'u2')}.astype(u4) << u4(16)", "u4")
    elif origin == "f16":
        value = f"{t.source(to.operands[1], 'u2')}.view(np.float16).astype('{numpy_type(target)}')"
        t.assign(to, to.operands[0], value, numpy_type(target))
    else:
        # A narrow register may stand for a wide one and the other way round: take the origin's type first.
        value = t.source(to.operands[1], numpy_type(origin))
        if target[0] in "su" and origin[0] == "f":
            value = f"np.trunc({value})" if "rzi" in to.opcode else f"np.rint({value})"
        t.assign(to, to.operands[0], f"{value}.astype('{numpy_type(target)}')", numpy_type(target))


def _move(t: Translator, to: Instruction) -> None:
    kind = _kind(to)
    size = int(kind[1]) if kind != "?" else 1
    target, origin = to.operands[0], to.operands[1]
    if origin.startswith("{"):
        parts = members(origin)
        small = size // len(parts)
        moved = (
            f"({t.source(part, f'u{small}')}.astype('{kind}') << np.array({8 * small * i}, '{kind}'))"
            for i, part in enumerate(parts)
        )
        t.assign(to, target, " | ".join(moved), kind)
    elif target.startswith("{"):
        parts = members(target)
        small = size // len(parts)
        for i, part in enumerate(parts):
            value = f"({t.source(origin, kind)} >> np.array({8 * small * i}, '{kind}')).astype('u{small}')"
            t.assign(to, part, value, f"u{small}")
    elif origin.startswith("%"):
        t.assign(to, target, t.source(origin, kind), kind)
    else:
        t.assign(to, target, f"G.full({t.source(origin, kind)}, '{kind}')", kind)


def _memory_type(to: Instruction) -> tuple[str, int]:
    kind = _kind(to)
    return kind, int(kind[1])


def _space(t: Translator, to: Instruction, width: int) -> str:
    if "shared" in to.opcode:
        t.smallest_shared = min(t.smallest_shared, width)
        return "shared"
    if "global" in to.opcode:
        return "global"
    raise NotImplementedError(f"memory space of {to}")


def _load(t: Translator, to: Instruction) -> None:
    if "param" in to.opcode:
        place = int(re.search(r"param_(\d+)", to.operands[1])[1])  # type: ignore[index]
        kind = _kind(to)
        t.assign(to, to.operands[0], f"G.parameter({place}, '{kind}')", kind)
        return
    kind, size = _memory_type(to)
    targets = members(to.operands[0])
    space = _space(t, to, size)
    where = f"{t.predicate(to)}, {t.where(to)}"
    t.lines.append(f"x = G.load_{space}({t.address(to.operands[1])}, {size}, {len(targets)}, {where})")
    for i, target in enumerate(targets):
        t.assign(to, target, f"x[{i}]", f"u{size}")


def _store(t: Translator, to: Instruction) -> None:
    _, size = _memory_type(to)
    values = ", ".join(t.source(value, f"u{size}") for value in members(to.operands[1]))
    space = _space(t, to, size)
    where = f"{t.predicate(to)}, {t.where(to)}"
    t.lines.append(f"G.store_{space}({t.address(to.operands[0])}, [{values}], {size}, {where})")


def _copy_async(t: Translator, to: Instruction) -> None:
    if "commit_group" in to.opcode:
        t.lines.append("G.shared.commit()")
    elif "wait_group" in to.opcode or "wait_all" in to.opcode:
        t.lines.append(f"G.shared.wait({to.operands[0] if to.operands else 0})")
    else:
        size = int(to.operands[2], 0)
        real = t.source(to.operands[3], "u4") if len(to.operands) > 3 else f"u4({size})"
        ends = f"{t.address(to.operands[0])}, {t.address(to.operands[1])}"
        t.lines.append(f"G.copy_async({ends}, {size}, {real}, {t.predicate(to)}, {t.where(to)})")


def _ldmatrix(t: Translator, to: Instruction) -> None:
    targets = members(to.operands[0])
    options = f"{len(targets)}, {'trans' in to.opcode}, {t.where(to)}"
    t.lines.append(f"x = G.ldmatrix({t.address(to.operands[1])}, {options})")
    for i, target in enumerate(targets):
        t.assign(to, target, f"x[{i}]", "u4")


def _mma(t: Translator, to: Instruction) -> None:
    kind = next(kind for kind in ("tf32", "bf16", "f16") if kind in to.opcode)
    if to.opcode[-1] != "f32":
        raise ValueError("accumulates in something other than float32")
    a, b, c = ("[" + ", ".join(t.source(x, "u4") for x in members(o)) + "]" for o in to.operands[1:4])
    t.lines.append(f"x = warp.mma('{kind}', {a}, {b}, {c})")
    for i, target in enumerate(members(to.operands[0])):
        t.assign(to, target, f"x[{i}]", "u4")


def _shuffle(t: Translator, to: Instruction) -> None:
    x, by, clamp = (t.source(operand, "u4") for operand in to.operands[1:4])
    t.assign(to, to.operands[0].split("|")[0], f"warp.shuffle('{to.opcode[2]}', {x}, {by}, {clamp})", "u4")


def _reduce(t: Translator, to: Instruction) -> None:
    kind = _kind(to)
    t.assign(to, to.operands[0], f"warp.reduce('{to.opcode[2]}', {t.source(to.operands[1], kind)})", kind)


def _barrier(t: Translator, to: Instruction) -> None:
    if to.opcode[1] == "warp":
        return
    if to.opcode[1] != "sync" or to.operands != ("0",) or to.predicate:
        raise ValueError("only bar.sync 0 of the whole block is known")
    t.lines.append("G.shared.barrier()")


def _logic3(t: Translator, to: Instruction) -> None:
    a, b, c = (t.source(operand, "u4") for operand in to.operands[1:4])
    t.assign(to, to.operands[0], f"logic3({a}, {b}, {c}, {int(to.operands[4], 0)})", "u4")


def _trap(t: Translator, to: Instruction) -> None:
    t.lines.append("raise RuntimeError('the kernel reached a trap')")


def _unary(name: str) -> Callable[..., None]:
    return _arithmetic(lambda v, kind, _: f"{name}({v[0]})")


def _binary(sign: str) -> Callable[..., None]:
    return _arithmetic(lambda v, kind, _: f"{v[0]} {sign} {v[1]}")


_TABLE: dict[str, Callable[..., None]] = {
    "add": _binary("+"), "sub": _binary("-"), "and": _binary("&"), "or": _binary("|"), "xor": _binary("^"),
    "not": _unary("~"), "neg": _unary("-"), "abs": _unary("np.abs"), "ex2": _unary("np.exp2"),
    "lg2": _unary("np.log2"), "sqrt": _unary("np.sqrt"), "rcp": _unary("f4(1) / "),
    "min": _arithmetic(_extreme), "max": _arithmetic(_extreme), "fma": _arithmetic(_fused),
    "div": _arithmetic(_divide), "rem": _arithmetic(_remainder), "mul": _multiply, "mad": _multiply,
    "shl": _shift, "shr": _shift, "bfe": _extract, "setp": _compare, "selp": _select, "cvt": _convert,
    "mov": _move, "ld": _load, "st": _store, "cp": _copy_async, "ldmatrix": _ldmatrix, "mma": _mma,
    "shfl": _shuffle, "redux": _reduce, "bar": _barrier, "barrier": _barrier, "lop3": _logic3, "trap": _trap,
    "prmt": _arithmetic(lambda v, kind, _: f"permuted({v[0]}, {v[1]}, {v[2]})"),
}  # fmt: skip
