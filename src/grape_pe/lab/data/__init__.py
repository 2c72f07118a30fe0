"""Preparing text as shards of tokens, and reading them as batches."""

from ...extras import require

require("numpy", "lab")

from .adopt import adopt  # noqa: E402
from .batches import Batch, Batches, DatasetBatches  # noqa: E402
from .dataset import Dataset, open_dataset, verify  # noqa: E402
from .manifest import Manifest  # noqa: E402
from .prefetch import prefetch  # noqa: E402
from .prepare import builtin, prepare  # noqa: E402
from .shards import Shard, read_shard, write_shard  # noqa: E402
from .sources import Source, default_tokenizer, open_source  # noqa: E402
from .tokenizer import TextTokenizer, hf_tokenizer, load_tokenizer  # noqa: E402

__all__ = [
    "Batch",
    "Batches",
    "Dataset",
    "DatasetBatches",
    "Manifest",
    "Shard",
    "Source",
    "TextTokenizer",
    "adopt",
    "builtin",
    "default_tokenizer",
    "hf_tokenizer",
    "load_tokenizer",
    "open_dataset",
    "open_source",
    "prefetch",
    "prepare",
    "read_shard",
    "verify",
    "write_shard",
]
