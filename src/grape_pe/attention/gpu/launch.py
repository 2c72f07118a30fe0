"""From an `AttentionProblem` to launches: `allocate`, `forward` and `backward` (see problem.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from .. import pruning
from ..problem import TENSORS, AttentionProblem, as_two_floats
from . import compile as gpu
from .backward import delta_kernel, key_kernel, query_kernel
from .compile import Launch, Tile
from .decode import combine_kernel, decode_kernel
from .forward import forward_kernel, keys_kernel
from .store import Case, Tiles, describe, kept_tiles, padded
from .tile import PATCH as _PATCH
from .tile import Gradients, Inputs, Kind, Sizes, Strides

PATCH: int = _PATCH.value
#: bytes the path backward may spend on row sums at once; more heads follow one another
CARRY_BYTES = 256 * 2**20
#: tiles between two looks at whether a walk may stop
STRIDE = 4
#: rows (packed query heads x queries) up to which the decode kernel is used
DECODE_ROWS = 64

#: candidates of tiles, largest first; the head size and a path decide where the list begins
TILES = {
    "forward_kernel": (Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(128, 16, 8, 2), Tile(64, 16, 4, 1)),
    "query_kernel": (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(128, 16, 8, 2), Tile(64, 16, 4, 1)),
    "key_kernel": (Tile(64, 128, 8, 2), Tile(32, 128, 8, 2), Tile(16, 128, 8, 2), Tile(16, 64, 4, 1)),
    "decode_kernel": (Tile(16, 64, 4, 3), Tile(16, 32, 4, 2), Tile(16, 16, 4, 1)),
}
#: tiles for every call instead of the tuned ones; set in the child process that checks or times them
forced: Tiles | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """A problem with the arguments that its kernels share."""

    problem: AttentionProblem
    kind: Kind
    inputs: Inputs
    strides: Strides
    sizes: Sizes
    arch: int

    @classmethod
    def of(cls, p: AttentionProblem, arch: int = 80) -> Plan:
        if p.q.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(p.q.device)
            arch = 10 * major + minor
        kind, inputs = _kind(p), _inputs(p)
        strides = Strides(*(x.stride()[:3] for x in (inputs.q, inputs.k, inputs.v, inputs.q)))
        return cls(p, kind, inputs, strides, _sizes(p, kind, inputs), arch)

    def launch(self, kernel: Any, grid: tuple[int, ...], tile: Tile, more: dict[str, Any]) -> Launch:
        shared = {"INPUTS": self.inputs, "STRIDES": self.strides, "SIZES": self.sizes, "KIND": self.kind}
        sizes = {"BM": tile.queries, "BN": tile.keys, "BORDER": tile.keys}
        return Launch(kernel, grid, shared | sizes | more, tile, self.problem.q.device)

    def by_patches(self, kernel: Any, grid: tuple[int, ...], more: dict[str, Any]) -> Launch:
        """A launch in blocks of PATCH tokens."""
        return self.launch(kernel, grid, Tile(PATCH, PATCH, 4, 1), more)

    def fitting(
        self, kernel: Any, grid: Callable[[Tile], tuple[int, ...]], more: dict[str, Any], **constants: int
    ) -> Launch:
        """A launch with the tile that fits; `constants` are those of the kernel besides its kind."""
        name = kernel.__name__

        def make(tile: Tile) -> Launch:
            return self.launch(kernel, grid(tile), tile, more | constants)

        shares = self.sizes.H != self.sizes.HKV  # then gradients of k and v are float32
        key = name, self.arch, self.kind, self.problem.q.dtype, shares, *constants.values()
        return gpu.fitting(make, self.candidates(name), self.arch, key, lambda: self.tuned(name))

    def candidates(self, kernel: str) -> tuple[Tile, ...]:
        width = padded(max(self.kind.d, self.kind.dv)) * (self.problem.q.element_size() // 2)
        skip = (width >= 128) + (width >= 256) + self.kind.path
        return TILES[kernel][min(skip, len(TILES[kernel]) - 2) :]

    def tuned(self, kernel: str) -> Tile | None:
        """The tile `grape doctor --tune` kept for this kernel; only candidates count."""
        p, kept = self.problem, forced or {}
        if forced is None and p.q.device.type == "cuda":
            case = Case.of(p.q.dtype, p.q.shape[-1], p.v.shape[-1], p.bias_kind)
            kept = kept_tiles(describe(p.q.device), case)
        return next((tile for tile in TILES[kernel] if list(tile) == kept.get(kernel)), None)


def prunes(p: AttentionProblem) -> bool:
    """Whether the forward may stop a walk early; then the backward walks the same keys.

    Not with a table: it may rise again at any distance, and no bound of the distances to come is kept.
    """
    biased = (p.c_q is not None or p.probe_q is not None) and p.table is None
    return biased and p.causal and p.q.shape[2] >= PATCH and pruning.worthwhile(p, PATCH)


def exact(p: AttentionProblem) -> bool:
    """Whether row sums must be better than the output's dtype: only for gradients of the bias."""
    return p.bias_learns and p.q.dtype != torch.float32


# Arguments of the kernels


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_head(x: Tensor) -> Tensor:
    """(R, B, H, T) -> (B|1, H|1, R, T): axes that an expand made are one long again."""
    for axis in (1, 2):
        if x.stride(axis) == 0 and x.shape[axis] > 1:
            x = x.narrow(axis, 0, 1)
    return x.permute(1, 2, 0, 3)


def _in_two(c: Tensor) -> Tensor:
    """(R, B, H, T) float64 -> (B|1, H|1, R, 2, T): c as float32, and what that leaves out."""
    return torch.stack(as_two_floats(_by_head(c)), 3)


def first_of_document(documents: Tensor) -> Tensor:
    """For each token the first token of its document (B, T) int32: a name for the document, and a bound.

    Ids need not be sorted or contiguous. No T x T comparison and no synchronisation with the host.
    """
    order = documents.sort(dim=-1, stable=True)
    place = torch.arange(documents.shape[-1], device=documents.device).expand_as(documents)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = order.values[:, 1:] != order.values[:, :-1]
    leader = torch.where(new, place, 0).cummax(-1).values
    return torch.empty_like(order.indices).scatter_(-1, order.indices, order.indices.gather(-1, leader)).int()


def end_of_document(names: Tensor) -> Tensor:
    """For each token one more than the last token of its document, given `first_of_document`."""
    index = names.long()
    token = torch.arange(1, names.shape[-1] + 1, device=names.device, dtype=torch.int32).expand_as(names)
    last = torch.zeros_like(names).scatter_reduce_(-1, index, token, "amax")
    return last.gather(-1, index)


#: layouts of the tensors
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rate_q": _by_head, "rate_k": _by_head, "c_q": _in_two, "c_k": _in_two,
    "table": lambda x: x[:1] if x.stride(0) == 0 else x, "documents": first_of_document, "key_padding": Tensor.byte,
}  # fmt: skip


def _inputs(p: AttentionProblem) -> Inputs:
    found = dict.fromkeys(Inputs._fields, _dense(p.q)) | {"k": _dense(p.k), "v": _dense(p.v)}
    for name in TENSORS[3:-1]:  # key_bound is for decoding on a CPU
        if (x := getattr(p, name)) is not None:
            found[name] = (LAYOUTS[name](x) if name in LAYOUTS else x).contiguous()
    if p.place_q is not None:
        found["place_q"] = p.place_q - p.first
    return Inputs(**found)


def _kind(p: AttentionProblem) -> Kind:
    tf32 = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return Kind(
        d=p.q.shape[-1], dv=p.v.shape[-1], p=8 if p.probe_q is None else p.probe_q.shape[-1],
        precision=tf32 if p.q.dtype == torch.float32 else "ieee",
        causal=p.causal, window=0 < p.window < max(p.q.shape[2], p.k.shape[2]),
        documents=p.documents is not None, padding=p.key_padding is not None,
        prune=prunes(p), exact=exact(p), terms=0 if p.c_q is None else p.c_q.shape[0],
        rate_q=p.rate_q is not None, rate_k=p.rate_k is not None,
        path=p.probe_q is not None, bounded=p.bounded,
        tables=0 if p.table is None else p.table.shape[1], mixed=p.mix is not None, beyond=p.beyond,
    )  # fmt: skip


def _sizes(p: AttentionProblem, kind: Kind, inputs: Inputs) -> Sizes:
    def by_head(name: str) -> tuple[int, ...]:
        """Strides of batch and head; zero where the tensor is shared, or absent."""
        x = getattr(inputs, name)
        absent = getattr(p, name) is None
        return tuple(0 if absent or x.shape[n] == 1 else x.stride(n) for n in (0, 1))

    return Sizes(
        H=p.q.shape[1], HKV=p.k.shape[1], HP=1 if p.probe_q is None else p.probe_q.shape[1],
        TQ=p.q.shape[2], TK=p.k.shape[2], L=0 if p.table is None else p.table.shape[2],
        window=p.window if kind.window else 0, patches=triton.cdiv(p.k.shape[2], PATCH), scale=p.scale,
        rate_q=by_head("rate_q"), rate_k=by_head("rate_k"), c_q=by_head("c_q"), c_k=by_head("c_k"),
        table=by_head("table")[0],
    )  # fmt: skip


# The forward


def allocate(p: AttentionProblem) -> list[Tensor]:
    """[what out's dtype leaves out, the first key each PATCH rows reached]; empty if not needed."""
    rows = p.q.shape[:3]
    fine = p.q.new_empty((*rows, p.v.shape[-1]) if exact(p) else (0,))
    patches = -(-rows[2] // PATCH)
    first = p.q.new_empty((*rows[:2], patches) if prunes(p) else (0,), dtype=torch.int32)
    return [fine, first]


def forward(p: AttentionProblem, results: list[Tensor]) -> None:
    for step in plan_forward(Plan.of(p), results):
        gpu.start(step)


def plan_forward(plan: Plan, results: list[Tensor]) -> Iterator[Launch]:
    """Launches, each to be started before the next is requested; `work` is filled after the last."""
    out, lse, work, fine, first = results
    outputs = {"OUT": out, "FINE": fine, "LSE": lse, "FIRST": first}
    yield from (_plan_decode if _few(plan.problem) else _plan_walk)(plan, outputs, work)


def _plan_keys(plan: Plan, prune: bool) -> Launch:
    """What is to be known of the keys beforehand: which are not finite, and bounds for pruning."""
    batch, key_heads, keys = plan.problem.k.shape[:3]
    poison = plan.problem.k.new_empty((batch, key_heads, keys), dtype=torch.float32)
    heads, patches = plan.sizes.H if prune else key_heads, plan.sizes.patches
    bounds = poison.new_empty((batch, heads, 1 + 4 * plan.kind.terms, patches)) if prune else poison
    more = {"POISON": poison, "BOUNDS": bounds, "KIND": replace(plan.kind, prune=prune)}
    more["SIZES"] = plan.sizes._replace(H=heads)
    return plan.by_patches(keys_kernel, (patches, batch * heads), more)


def _plan_walk(plan: Plan, outputs: dict[str, Any], work: Tensor) -> Iterator[Launch]:
    p, prune = plan.problem, plan.kind.prune
    batch, heads, rows = p.q.shape[:3]
    keys = _plan_keys(plan, prune)
    yield keys
    bounds, poison = keys.arguments["BOUNDS"], keys.arguments["POISON"]
    if prune:
        bounds.copy_(bounds.cummax(-1).values)
    counts = poison.new_empty(batch * heads * triton.cdiv(rows, 64) * 2, dtype=torch.int32)
    more = outputs | {"WORK": counts, "BOUNDS": bounds, "INPUTS": plan.inputs._replace(poison=poison)}
    more["TAU"] = pruning.tau(p) if prune else poison
    grid = lambda tile: (triton.cdiv(rows, tile.queries), batch * heads)  # noqa: E731
    step = plan.fitting(forward_kernel, grid, more, STRIDE=STRIDE)
    yield step
    blocks = step.grid[0]
    torch.sum(counts[: batch * heads * blocks * 2].view(batch, heads, blocks, 2), 2, out=work)


# Few queries


def _pack(p: AttentionProblem) -> int:
    """Query heads that share a program: those of one key head, if they also share their probes."""
    group = p.q.shape[1] // p.k.shape[1]
    shares = p.probe_q is None or p.k.shape[1] % p.probe_q.shape[1] == 0
    return group if shares else 1


def _few(p: AttentionProblem) -> bool:
    return p.q.shape[2] * _pack(p) <= DECODE_ROWS and not prunes(p)


def _plan_decode(plan: Plan, outputs: dict[str, Any], work: Tensor) -> Iterator[Launch]:
    p = plan.problem
    work.zero_()
    batch, heads, rows = p.q.shape[:3]
    pack, keys = _pack(p), p.k.shape[2]
    start = max(0, keys - rows - plan.sizes.window + 1) if plan.kind.window and p.causal else 0
    programs = batch * heads // pack
    cuda = p.q.device.type == "cuda"
    wanted = 2 * torch.cuda.get_device_properties(p.q.device).multi_processor_count if cuda else 8
    parts = max(1, min(wanted // programs, triton.cdiv(keys - start, 256)))
    part_keys = triton.cdiv(triton.cdiv(keys - start, parts), 64) * 64
    parts = triton.cdiv(keys - start, part_keys)
    lse = outputs["LSE"]
    more = outputs | {"SIZES": plan.sizes._replace(key_from=start, part_keys=part_keys)}
    more |= {"PARTS": lse.new_empty((batch, heads, rows, parts, p.v.shape[-1])), "parts": parts}
    more["STATS"] = lse.new_empty((batch, heads, rows, parts, 3))
    yield plan.fitting(decode_kernel, lambda _: (parts, programs), more, PACK=pack, BM=padded(rows * pack))
    yield plan.launch(combine_kernel, (batch * heads * rows,), Tile(1, 1, 1, 1), more)


# The backward


def backward(
    p: AttentionProblem, wanted: list[str], d_out: Tensor, d_lse: Tensor | None, results: list[Tensor]
) -> dict[str, Tensor]:
    plan = Plan.of(p)
    grads = empty_gradients(plan, wanted)
    for step in plan_backward(plan, d_out, d_lse, results, grads):
        gpu.start(step)
    return {name: _gathered(p, name, grads[name], d_lse) for name in wanted}


def empty_gradients(plan: Plan, wanted: list[str]) -> dict[str, Tensor]:
    """Outputs of the two kernels, one for every query head; the sums over heads follow."""
    p, kind = plan.problem, plan.kind
    batch, heads, queries, keys = *p.q.shape[:3], p.k.shape[2]
    single = heads == p.k.shape[1]

    def room(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return p.q.new_empty((batch, heads, *size), dtype=dtype)

    grads = {
        "q": room(queries, p.q.shape[-1], dtype=p.q.dtype),
        "k": room(keys, p.k.shape[-1], dtype=p.k.dtype if single else torch.float32),
        "v": room(keys, p.v.shape[-1], dtype=p.v.dtype if single else torch.float32),
    }
    if kind.path:
        grads |= {"probe_q": room(queries, kind.p), "probe_k": room(keys, kind.p), "path_rate": room(queries)}
        grads["probe_k"][:, :, 0] = 0.0  # no key stands before token 0, so its edge is in no sum
    for name in ("rate", "c"):
        if {f"{name}_q", f"{name}_k"} & set(wanted):
            grads |= {f"{name}_q": room(kind.terms, queries), f"{name}_k": room(kind.terms, keys)}
    if p.table is not None and {"table", "mix"} & set(wanted):
        grads |= {"table": room(*p.table.shape[1:]), "mix": room(kind.tables, queries)}
    return grads


def plan_backward(
    plan: Plan, d_out: Tensor, d_lse: Tensor | None, results: list[Tensor], grads: dict[str, Tensor]
) -> Iterator[Launch]:
    p, docs = plan.problem, plan.inputs.documents
    out, lse, _, fine, first = results
    batch, heads, queries, keys = *p.q.shape[:3], p.k.shape[2]
    d_out, delta = _dense(d_out), torch.empty_like(lse)
    inputs = plan.inputs._replace(d_out=d_out, lse=lse, delta=delta, first=first)
    plan = replace(plan, inputs=inputs, strides=plan.strides._replace(d_out=d_out.stride()[:3]))
    more: dict[str, Any] = {"OUT": out, "FINE": fine, "DELTA": delta}
    more["D_LSE"] = None if d_lse is None else d_lse.contiguous()
    yield plan.by_patches(delta_kernel, (triton.cdiv(queries, PATCH), batch * heads), more)
    keys_step = _plan_keys(plan, False)
    yield keys_step

    kind = replace(plan.kind, d_rate="rate_q" in grads, d_c="c_q" in grads, d_table="table" in grads)
    plan = replace(plan, kind=kind, inputs=inputs._replace(poison=keys_step.arguments["POISON"]))
    more = dict.fromkeys(("CARRY", "RIGHT", "TOTAL", "D_TABLE"), lse)
    more["GRADIENTS"] = Gradients(**dict.fromkeys(Gradients._fields, lse) | grads)
    more["DOC_ENDS"] = end_of_document(docs) if kind.documents else docs
    # The key kernel's tile first: its keys are the borders at which the query kernel keeps sums.
    key = plan.fitting(key_kernel, lambda tile: (triton.cdiv(keys, tile.keys), 1), more)
    border: dict[str, Any] = {"BORDER": key.tile.keys} if kind.path else {}
    query = plan.fitting(query_kernel, lambda tile: (triton.cdiv(queries, tile.queries), 1), more | border)
    borders, at_once = key.grid[0], batch * heads
    sizes = {"CARRY": borders * queries, "RIGHT": borders * queries, "TOTAL": queries} if kind.path else {}
    tables = query.grid[0], kind.tables, plan.sizes.L + 2  # of each program, with both sides beyond
    if kind.d_table:
        sizes["D_TABLE"] = math.prod(tables)
    at_once = max(1, min(at_once, CARRY_BYTES // (4 * max(1, sum(sizes.values())))))
    sums = {name: lse.new_empty(at_once * size) for name, size in sizes.items()}
    for start in range(0, batch * heads, at_once):
        count = min(at_once, batch * heads - start)
        if kind.d_table:
            sums["D_TABLE"].zero_()
        numbers = {"SIZES": plan.sizes._replace(heads_from=start, borders=borders)}
        for step in (query, key):
            yield replace(step, grid=(step.grid[0], count), arguments=step.arguments | sums | numbers)
        if kind.d_table:
            found = sums["D_TABLE"].view(at_once, *tables)[:count].sum(1)
            found[..., 1] += found[..., 0]
            found[..., -2] += found[..., -1]
            grads["table"].flatten(0, 1)[start : start + count] = found[..., 1:-1]


def _gathered(p: AttentionProblem, name: str, grad: Tensor, d_lse: Tensor | None) -> Tensor:
    """A gradient in the shape and dtype of its field; heads that share a tensor are summed in order."""
    like = getattr(p, name)
    if name == "path_rate":
        grad = grad.sum((0, 2))
    elif name == "table":
        grad = grad.sum(0)
    elif name == "mix":
        grad = grad.mT
    elif name not in ("c_q", "c_k", "rate_q", "rate_k"):
        if like.shape[1] != grad.shape[1]:
            grad = grad.unflatten(1, (like.shape[1], -1)).sum(2)
    else:
        grad = grad.permute(2, 0, 1, 3)
        if name == "c_q" and p.rate_k is None:
            grad = torch.zeros_like(grad)
        if name == "c_q" and p.rate_q is not None and d_lse is not None:
            grad = grad - p.rate_q * d_lse  # a row of dS sums to d lse
        grad = grad.to(like.dtype, copy=True, memory_format=torch.contiguous_format)
    return grad.to(like.dtype)
