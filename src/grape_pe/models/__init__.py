"""Models built on encodings. `kv_shift` mixes each key and value with the previous one."""

from .kv_shift import KVShift

__all__ = ["KVShift"]
