"""Streaming: `StreamingCache`, its `Table` of tokens, and the `Layout` of the tokens of one call."""

from .layout import Layout, Tail, arrange
from .seen import Norms, Seen, check_packing, encode
from .stream import StreamingCache
from .table import Table

__all__ = ["Layout", "Norms", "Seen", "StreamingCache", "Table", "Tail", "arrange", "check_packing", "encode"]
