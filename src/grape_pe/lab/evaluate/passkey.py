"""`grape eval passkey MODEL`: a number in repeated sentences, asked for at the end.

found = passkey_scores(model, tokenizer, lengths=[1024, 2048])     # Mohtashami and Jaggi 2023, arXiv 2305.16300
print(passkey_table(found))
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..columns import aligned
from .questions import EvaluationError

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
#: digits of the number
DIGITS = 5
FILLER = " The sun was warm and the grass was green. A bird sang in the old tree. The day went by."
NEEDLE, AGAIN, QUESTION = " The pass key is", ". Remember it.", " What is the pass key? The pass key is"
OTHERS = ("Anna", "Boris", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Irene")
OTHER = " The pass key of {} is"


@dataclass(frozen=True)
class PasskeyScore:
    """Accuracy and loss on texts of one length with the number at one depth."""

    length: int
    depth: float
    cases: int
    exact: float  #: share of texts whose whole number is the model's first choice
    nats: float  #: mean loss of a token of the number


@torch.inference_mode()
def passkey_scores(
    model: Any,
    tokenizer: Any,
    lengths: Sequence[int],
    *,
    depths: Sequence[float] = DEPTHS,
    cases: int = 4,
    others: int = 0,
    seed: int = 0,
) -> list[PasskeyScore]:
    """Ask a Hugging Face model for a number it has read, in texts of `lengths` tokens.

    Each digit is predicted after the right ones before it, in one pass without a cache. All are the first choice
    exactly if greedy generation gives the number.

    Args:
        cases: texts for each length and depth; the same numbers for every model with the same tokenizer.
        others: number of pass keys of other names, evenly spaced (as the keys of RULER, Hsieh et al. 2024,
            arXiv 2404.06654).
    """
    if not 0 <= others <= len(OTHERS):
        raise EvaluationError(f"others must be from 0 to {len(OTHERS)}, got {others}")
    if cases < 1 or not lengths:
        raise EvaluationError(f"lengths and cases must be at least 1, got {list(lengths)} and {cases}")
    out = []
    for length in lengths:
        for depth in depths:
            texts = [_text(tokenizer, length, depth, (seed, case), others) for case in range(cases)]
            found = [_answer(model, ids, wanted) for ids, wanted in texts]
            exact, nats = (math.fsum(each) / cases for each in zip(*found, strict=True))
            out.append(PasskeyScore(length, depth, cases, exact, nats))
    return out


def _text(
    tokenizer: Any, length: int, depth: float, seed: tuple[int, int], others: int = 0
) -> tuple[list[int], list[int]]:
    """Tokens of a text including the answer, and the answer; the model reads all but the last token."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    numbers = random.Random(repr(seed)).sample(range(10 ** (DIGITS - 1), 10**DIGITS), 1 + others)
    secret, begin = ids(f" {numbers[0]}"), list(tokenizer.encode(""))
    more = [ids(OTHER.format(name) + f" {n}" + AGAIN) for name, n in zip(OTHERS, numbers[1:], strict=False)]
    needle, question, filler = ids(NEEDLE) + secret + ids(AGAIN), ids(QUESTION), ids(FILLER)
    room = length + 1 - len(begin) - len(needle) - len(question) - len(secret) - sum(map(len, more))
    if room < 0:
        raise EvaluationError(
            f"passkey texts need at least {length - room} tokens, got {length}; give longer --lengths"
        )
    before = round(depth * room)
    around = [filler[i % len(filler)] for i in range(room)]
    parts = sorted(
        [(before, needle), *((room * (i + 1) // (others + 1), each) for i, each in enumerate(more))]
    )
    text, last = begin, 0
    for place, part in parts:
        text, last = text + around[last:place] + part, place
    return text + around[last:] + question + secret, secret


def check_room(tokenizer: Any, length: int) -> None:
    """Refuse a length without room for the number and the question."""
    _text(tokenizer, length, 0.0, (0, 0))


def _answer(model: Any, ids: list[int], wanted: list[int]) -> tuple[float, float]:
    """Whether every token of the answer is the first choice, and their mean loss."""
    tokens = torch.tensor([ids[:-1]], device=model.device)
    logits = model(input_ids=tokens, logits_to_keep=len(wanted), use_cache=False).logits[0].float()
    target = torch.tensor(wanted, device=logits.device)
    loss = torch.nn.functional.cross_entropy(logits, target)
    return float((logits.argmax(-1) == target).all()), float(loss)


def passkey_table(found: Sequence[PasskeyScore]) -> str:
    """A table of percent right by length (rows) and depth, then over all depths, and the loss."""
    depths = sorted({score.depth for score in found})
    rows = [["tokens", *(f"depth {depth:g}" for depth in depths), "all", "nats a token"]]
    for length in sorted({score.length for score in found}):
        here = {score.depth: score for score in found if score.length == length}
        exact, nats, count = mean_of(list(here.values()))
        error = math.sqrt(exact * (1 - exact) / count)
        cells = [f"{100 * here[depth].exact:.0f}" for depth in depths]
        rows.append([f"{length:,}", *cells, f"{100 * exact:.1f} ± {100 * error:.1f}", f"{nats:.3f}"])
    return aligned(rows)


def mean_of(found: Sequence[PasskeyScore]) -> tuple[float, float, int]:
    """Share answered, loss and number of texts over several scores."""
    count = sum(score.cases for score in found)
    exact = sum(score.exact * score.cases for score in found) / count
    return exact, sum(score.nats * score.cases for score in found) / count, count


def to_json(found: Sequence[PasskeyScore]) -> list[dict[str, Any]]:
    return [asdict(score) for score in found]
