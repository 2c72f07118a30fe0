"""Tables of adapted models: the change at each length since before, and numbers found in long texts."""

from __future__ import annotations

from collections.abc import Callable

from ..evaluate.passkey import PasskeyScore, mean_of
from .cells import NONE, Cell, Table, interval
from .ranking import text_blocks
from .results import Results
from .statistics import Summary
from .stored import Evaluation

#: the label of the pretrained model among the arms of its adapted ones
BEFORE = "before"


def _by_arm(results: Results, cells: Callable[[str, Evaluation], list[Cell]]) -> list[tuple[str, list[Cell]]]:
    """A row for each arm, of its first seed."""
    firsts = {arm.label: next(iter(arm.evaluations.values()), None) for arm in results.arms}
    return [(label, cells(label, found)) for label, found in firsts.items() if found is not None]


def before_table(results: Results) -> Table:
    """Losses at every length, with the change since before; then with attention limited to the model's context."""
    lengths, window = results.lengths(), results.train_length
    over_text = {length: text_blocks(results, length) for length in lengths}

    def cell(label: str, found: Evaluation, length: int) -> Cell:
        loss = found.loss_at(length)
        if loss is None or label == BEFORE or not {label, BEFORE} <= over_text[length].means.keys():
            return NONE if loss is None else Cell(f"{loss:.3f}", loss)
        return Cell(f"{loss:.3f}", loss, change(over_text[length].difference(label, BEFORE)))

    def cells(label: str, found: Evaluation) -> list[Cell]:
        limited = found.loss_at(results.longest or 0, window)
        shown = NONE if limited is None else Cell(f"{limited:.3f}", limited)
        return [*(cell(label, found, length) for length in lengths), shown]

    heads = [*(f"loss at {n:,}" for n in lengths), f"at {results.longest or 0:,}, window {window}"]
    caption = (
        "Mean loss in nats a token on held-out text, the same text at every length, with the change since "
        "before and its 95% interval over stretches of text, simultaneous over all pairs of models. The last column "
        "limits attention to the context of the pretrained model: the baseline at greater lengths."
    )
    return Table("before", "Before and after", caption, heads, _by_arm(results, cells))


def change(gap: Summary) -> str:
    return f"{gap.mean:+.3f}" + (f", {interval(gap)}" if gap.low is not None else "")


def passkey_table(results: Results) -> Table:
    """Percent of the numbers found, over all depths, and the loss of their tokens."""
    lengths = sorted({score.length for run in results.evaluations for score in run.passkey})

    def cell(found: Evaluation, length: int) -> Cell:
        here = [PasskeyScore(**score.model_dump()) for score in found.passkey if score.length == length]
        if not here:
            return NONE
        exact, nats, count = mean_of(here)
        return Cell(f"{100 * exact:.0f}% of {count}", exact, f"{nats:.2f}")

    caption = (
        "How many of the numbers hidden in a long text were given as the answer to the question at its end, over "
        "all depths, with the mean loss of a token of the answer in nats."
    )
    rows = _by_arm(results, lambda _, found: [cell(found, n) for n in lengths])
    return Table("passkey", "Numbers found", caption, [f"{n:,} tokens" for n in lengths], rows)
