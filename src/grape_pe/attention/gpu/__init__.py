"""Attention kernels for NVIDIA GPUs, in Triton (docs/kernels.md)."""
