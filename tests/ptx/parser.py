"""PTX text to basic blocks. Only what Triton emits: one kernel without functions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Instruction:
    """`@!%p1 ld.shared.v2.b32 {%r1, %r2}, [%r3+16];` taken apart."""

    opcode: tuple[str, ...]  # ("ld", "shared", "v2", "b32")
    operands: tuple[str, ...]  # ("{%r1, %r2}", "[%r3+16]")
    predicate: str | None
    negated: bool
    text: str
    line: str  # of the kernel's source, from the last .loc

    def __str__(self) -> str:
        return f"{self.text} (source line {self.line})"


@dataclass
class Block:
    """Instructions that run one after another; only the last may branch."""

    instructions: list[Instruction] = field(default_factory=list)


@dataclass
class Kernel:
    name: str
    parameters: list[str]  # types, in order: "u64", "u32", "f32", …
    blocks: list[Block]
    labels: dict[str, int]


_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", re.S)
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)$", re.S)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_IGNORED = (".file", ".section", ".reg", ".pragma", ".b8", ".b32", ".b64", ".loc")


def parse(text: str) -> Kernel:
    """The one kernel of a PTX module."""
    entry = _ENTRY.search(text)
    if entry is None:
        raise ValueError("the PTX text holds no .entry")
    parameters = re.findall(r"\.param\s+\.(\w+)", entry[2])
    kernel = Kernel(entry[1], parameters, [Block()], {})
    line = "?"
    for statement in _statements(text[entry.end() :]):
        if statement.startswith(".loc"):
            line = statement.split()[2]
        elif statement.startswith("$") and statement.endswith(":"):
            _start_block(kernel)
            kernel.labels[statement[:-1]] = len(kernel.blocks) - 1
        elif not statement.startswith(_IGNORED):
            _append(kernel, statement, line)
    return kernel


def _statements(body: str) -> Iterator[str]:
    """Labels, .loc lines and statements of the kernel, without comments and the braces of inline assembly."""
    waiting = ""
    for raw in body.split("$L__func_end0")[0].split("\n"):
        line = " ".join(re.sub(r"//.*", "", raw).split())
        if not waiting and (line.startswith(".loc") or re.fullmatch(r"\$[\w$]+:", line)):
            yield line
        elif line not in ("{", "}") or waiting:
            waiting = f"{waiting} {line}".strip()
            if waiting.endswith((";", "}")):
                pieces = (
                    re.sub(r"^[{}\s]+(?=[@.a-z])|^}$", "", piece.strip()) for piece in waiting.split(";")
                )
                yield from (piece for piece in pieces if piece)
                waiting = ""


def _start_block(kernel: Kernel) -> None:
    if kernel.blocks[-1].instructions:
        kernel.blocks.append(Block())


def _append(kernel: Kernel, statement: str, line: str) -> None:
    match = _INSTRUCTION.match(statement)
    if match is None:
        raise ValueError(f"cannot read the PTX statement {statement!r}")
    negated, predicate, opcode, rest = match.groups()
    operands = tuple(operand.strip() for operand in _OPERAND.findall(rest))
    parts = tuple(part for part in re.split(r"\.|::", opcode) if part)
    kernel.blocks[-1].instructions.append(
        Instruction(parts, operands, predicate, bool(negated), statement, line)
    )
    if parts[0] in ("bra", "ret", "exit"):
        kernel.blocks.append(Block())
