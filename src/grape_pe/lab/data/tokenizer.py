"""Tokenizers: GPT-2's, plain bytes, or a byte-pair encoding trained on the data itself.

Each is stored as `tokenizer/tokenizer.json`, the format of the `tokenizers` library.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ...extras import require
from ..errors import LabError
from ..files import damaged, read_json, replacing, sha256_of, write_json, write_text
from .shards import Tokens, token_bytes

END = "<|endoftext|>"
USUAL_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>")
FOLDER, FILE, CONFIG, VOCAB, MERGES = (
    "tokenizer", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
)  # fmt: skip
#: the largest byte-pair encoding that is trained
MAX_BPE = 1 << 16
#: needs no network
DEFAULT_TOKENIZER = "bpe-8192"
SAMPLE_CHARACTERS = 16_000_000  # from the start of the data, to train a byte-pair encoding on


class TextTokenizer:
    """Text to ids and back. `end` is the token before each document, `eos` its id."""

    def __init__(self, inner: Any, end: str):
        self.inner, self.end = inner, end
        self.inner.encode_special_tokens = True  # text that spells <|endoftext|> must not end a document
        self.inner.no_truncation()  # a saved tokenizer may truncate or pad
        self.inner.no_padding()
        self.vocab_size = 1 + max(inner.get_vocab().values(), default=-1)  # ids may have gaps
        self.eos: int = inner.token_to_id(end)
        # The library takes a second per megabyte for plain bytes; numpy takes none.
        self._bytes = self.vocab_size == 257 and inner.get_vocab() == _byte_vocabulary() | {end: 256}

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self.encode_document(text)[1:]]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; the end token is left out."""
        return str(self.inner.decode(list(ids), skip_special_tokens=True))

    def encode_document(self, text: str) -> Tokens:
        return self.encode_documents([text])[0]

    def encode_documents(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each document, the end token first."""
        if self._bytes:
            parts = [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        else:
            found = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
            parts = [np.array(one.ids, dtype=np.uint32) for one in found]
        kind = f"u{token_bytes(self.vocab_size)}"
        return [np.concatenate([[self.eos], part]).astype(kind) for part in parts]

    def save(self, directory: Path) -> None:
        """Write `directory/tokenizer/` atomically."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.end, "bos_token": self.end}
        with replacing(directory / FOLDER) as scratch:
            write_text(scratch / FILE, self.inner.to_str(pretty=True))
            write_json(scratch / CONFIG, config)


def load_tokenizer(directory: str | os.PathLike[str]) -> TextTokenizer:
    """The tokenizer of a prepared dataset, or of any directory with a tokenizer.json in it.

    Args:
        directory: a dataset, or a directory with tokenizer.json.
    """
    directory = Path(directory)
    inside = directory / FOLDER
    return _from_path(inside if inside.is_dir() else directory)


def hf_tokenizer(directory: str | os.PathLike[str]) -> Any:
    """A `transformers.PreTrainedTokenizerFast` with its end token, to save with a model.

    Args:
        directory: as for `load_tokenizer`.
    """
    ours = load_tokenizer(directory)
    ours.inner.encode_special_tokens = False  # users may type the end token
    kind = require("transformers", "lab").PreTrainedTokenizerFast
    return kind(tokenizer_object=ours.inner, eos_token=ours.end, bos_token=ours.end)


def tokenizer_setting(name: str) -> str:
    """A tokenizer in the settings of a dataset: its name, or hashes of its local files."""
    path = Path(name).expanduser()
    if _is_trained(name) or name == "bytes" or not path.exists():
        return name
    files = [path] if path.is_file() else [path / FILE, path / VOCAB, path / MERGES]
    digests = [sha256_of(file)[:16] for file in files if file.is_file()]
    return f"{path.name} (sha256 {' '.join(digests) or 'of nothing'})"


def build_tokenizer(name: str, texts: Iterable[str]) -> TextTokenizer:
    """`bytes`, `bpe-N` (trained on the first of `texts`), a local file or directory, or a name on the Hub."""
    if name == "bytes":
        return _bytes()
    if _is_trained(name):
        return _train(int(name.removeprefix("bpe-")), texts)
    if Path(name).expanduser().exists():
        return _from_path(Path(name).expanduser())
    return _from_hub(name)


def _is_trained(name: str) -> bool:
    return re.fullmatch(r"bpe-\d+", name) is not None


def _byte_vocabulary() -> dict[str, int]:
    """The character that stands for each byte in byte-level tokenizers, as GPT-2 chose them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _byte_level(model: Any, *, words: bool = True) -> Any:
    library = require("tokenizers", "lab")
    inner = library.Tokenizer(model)
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    inner.decoder = library.decoders.ByteLevel()
    return inner


def _bytes() -> TextTokenizer:
    models = require("tokenizers", "lab").models
    inner = _byte_level(models.BPE(vocab=_byte_vocabulary(), merges=[]), words=False)
    inner.add_special_tokens([END])
    return TextTokenizer(inner, END)


def _train(size: int, texts: Iterable[str]) -> TextTokenizer:
    if not 257 <= size <= MAX_BPE:
        raise LabError(f"bpe-N takes N from 257 (256 bytes and an end token) to {MAX_BPE}, got {size}")
    library = require("tokenizers", "lab")
    inner = _byte_level(library.models.BPE())
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(_sample(texts), trainer)
    return TextTokenizer(inner, END)


def _sample(texts: Iterable[str]) -> Iterable[str]:
    """Documents from the start, SAMPLE_CHARACTERS of them."""
    characters = 0
    for text in texts:
        yield text
        characters += len(text)
        if characters >= SAMPLE_CHARACTERS:
            return


def _from_path(path: Path) -> TextTokenizer:
    """A tokenizer.json, or a directory with one or with vocab.json and merges.txt."""
    library = require("tokenizers", "lab")
    folder, file = (path, path / FILE) if path.is_dir() else (path.parent, path)
    try:
        if file.is_file():
            inner = library.Tokenizer.from_file(str(file))
        elif (folder / VOCAB).is_file() and (folder / MERGES).is_file():
            inner = _byte_level(library.models.BPE.from_file(str(folder / VOCAB), str(folder / MERGES)))
        else:
            raise LabError(f"no tokenizer in {path}: it needs {FILE}, or {VOCAB} and {MERGES}")
    except LabError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise LabError(f"the tokenizer in {path} cannot be read: {error}") from error
    return _checked(inner, path, _configured_end(folder / CONFIG))


def _from_hub(name: str) -> TextTokenizer:
    """From the cache of the Hugging Face Hub, or from the Hub; fails at once without a network."""
    hub = require("huggingface_hub", "lab")
    try:
        try:
            path = hub.hf_hub_download(name, FILE, local_files_only=True)
        except hub.errors.LocalEntryNotFoundError:
            _check_network()
            path = hub.hf_hub_download(name, FILE)
        inner = require("tokenizers", "lab").Tokenizer.from_file(path)
    except ImportError:
        raise
    except Exception as error:  # no network, no such name, a broken file
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise LabError(
            f"tokenizer {name!r} is neither bytes, bpe-N nor a local path, and could not be fetched from the "
            f"Hugging Face Hub ({why}); without a network give --tokenizer {DEFAULT_TOKENIZER}, which is "
            f"trained on the data, or the path of a {FILE}"
        ) from error
    return _checked(inner, Path(name), None)


def _check_network() -> None:
    """Fail at once if the Hub's name cannot be resolved; its own retries take half a minute."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return  # a proxy resolves names itself
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    socket.getaddrinfo(address.hostname, address.port or 443)


def _configured_end(config: Path) -> str | None:
    if not config.exists():
        return None
    remedy = "restore it, or remove it if the usual end tokens will do"
    stored = read_json(config, remedy).get("eos_token")
    end = stored.get("content") if isinstance(stored, dict) else stored
    if end is not None and not isinstance(end, str):
        raise damaged(config, f"eos_token must be text, got {end!r}", remedy)
    return end


def _checked(inner: Any, path: Path, end: str | None) -> TextTokenizer:
    """With its end token, which must be in the vocabulary."""
    known = [token for token in (end, *USUAL_ENDS) if token and inner.token_to_id(token) is not None]
    if not known:
        raise LabError(
            f"the tokenizer {path} has no end token: none of {', '.join(USUAL_ENDS)} is in its vocabulary; "
            f"name it as eos_token in a {CONFIG} beside it"
        )
    inner.add_special_tokens([known[0]])
    return TextTokenizer(inner, known[0])
