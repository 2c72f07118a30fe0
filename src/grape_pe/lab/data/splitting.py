"""Choice of validation documents, and removal of what training text repeats from them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

#: consecutive lines that are a repeat if they occur in training text
RUN = 3
#: characters of a single line that is a repeat if it occurs in training text
LONG_LINE = 50


def held_out(number: int, share: float) -> bool:
    """By a hash of the document's number: independent of workers, chunks and interruptions.

    The first is always held out; it stands for the first 1/share documents, so that the share is kept.
    """
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
    return number == 0 or (number * share >= 1 and int.from_bytes(digest, "little") < share * 2**64)


def without_repeats(texts: Sequence[str], validation: Sequence[bool]) -> tuple[list[str], set[int]]:
    """The documents, with those in `validation` stripped of lines that the others repeat.

    A line is removed if it is long and occurs in the others, or if it is in a run of lines that does, ignoring
    blank lines and indentation. Documents with nothing left are dropped.

    Returns:
        The documents, and the numbers of those held out.
    """
    known = {
        print_ for text, out in zip(texts, validation, strict=True) if not out for print_ in _prints(text)
    }
    kept: list[str] = []
    numbers: set[int] = set()
    for text, out in zip(texts, validation, strict=True):
        rest = _without(text, known) if out else text
        if rest.strip():
            if out:
                numbers.add(len(kept))
            kept.append(rest)
    return kept, numbers


def _filled(text: str) -> list[tuple[int, str]]:
    """Number and content of every line that is not blank."""
    return [(i, line.strip()) for i, line in enumerate(text.split("\n")) if line.strip()]


def _windows(lines: Sequence[tuple[int, str]]) -> Iterable[tuple[str, Sequence[tuple[int, str]]]]:
    for start in range(len(lines) - RUN + 1):
        window = lines[start : start + RUN]
        yield "\n".join(line for _, line in window), window
    for each in lines:
        if len(each[1]) >= LONG_LINE:
            yield each[1], (each,)


def _prints(text: str) -> Iterable[int]:
    return (hash(content) for content, _ in _windows(_filled(text)))


def _without(text: str, known: set[int]) -> str:
    repeated = {i for content, window in _windows(_filled(text)) if hash(content) in known for i, _ in window}
    return "\n".join(line for i, line in enumerate(text.split("\n")) if i not in repeated)
