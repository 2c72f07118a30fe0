"""Estimated time of a step on a GPU, from its data sheet and four assumptions.

- Matrix products reach the share `products` of the peak, for large products in bfloat16.
- Everything else is bound by memory, at 80 % of its bandwidth.
- Messages reach 70 % of the link and overlap with computation.
- Nodes have eight GPUs; messages between nodes take the network.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_SHARE, LINK_SHARE, NODE = 0.8, 0.7, 8


@dataclass(frozen=True)
class Work:
    """Work of one process in a step. `near` bytes are sent in a group of `group` ranks, `far` bytes among all `ranks`,
    `ring` bytes among the `sharing` ranks of a sequence."""

    flops: float
    moved: float
    near: float
    far: float
    group: int
    ranks: int
    ring: float = 0.0
    sharing: int = 1


@dataclass(frozen=True)
class GPU:
    """The vendor's figures for one GPU of a node: dense bf16 FLOP/s, and bytes a second each way."""

    peak: float
    memory: float
    link: float
    network: float
    products: float

    def computing(self, work: Work) -> float:
        return work.flops / (self.peak * self.products) + work.moved / (self.memory * MEMORY_SHARE)

    def sending(self, work: Work) -> float:
        sent = (work.near, work.group), (work.far, work.ranks), (work.ring, work.sharing)
        links = (count / (self.link if ranks <= NODE else self.network) for count, ranks in sent)
        return sum(links) / LINK_SHARE

    def seconds(self, work: Work) -> float:
        return max(self.computing(work), self.sending(work))


#: SXM modules by a word in the device's name
GPUS = {
    "A100": GPU(312e12, 2.0e12, 300e9, 25e9, 0.6),
    "H100": GPU(989e12, 3.35e12, 450e9, 50e9, 0.55),
    "H200": GPU(989e12, 4.8e12, 450e9, 50e9, 0.55),
    "B200": GPU(2250e12, 8.0e12, 900e9, 50e9, 0.5),
}
