"""Fused attention kernels for every slope and path bias, on NVIDIA GPUs. Imported without Triton."""

from .api import attend_triton, why_not_triton

__all__ = ["attend_triton", "why_not_triton"]
