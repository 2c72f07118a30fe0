"""Streaming: `StreamingCache`, its `Table` of tokens, and the `Layout` of the tokens of one call."""

from .layout import Layout, Tail, arrange
from .seen import Seen, check_packing, encode
from .stream import StreamingCache
from .table import Table

__all__ = ["Layout", "Seen", "StreamingCache", "Table", "Tail", "arrange", "check_packing", "encode"]
