"""Words for what changed between two jobs' scores."""

from collections.abc import Iterable, Iterator
from typing import Any

from batchinf.tasks.changes import Comparison
from batchinf.tasks.changes_text import clip_value, delta_text
from batchinf.tasks.score.accuracy import WINNERS
from batchinf.tasks.score.changes import ChoicesFound, ScoresFound, begin_changes


def _lines(found: ScoresFound | ChoicesFound) -> Iterator[str]:
    yield from _choice_lines(found) if isinstance(found, ChoicesFound) else _score_lines(found)


def _score_lines(found: ScoresFound) -> Iterator[str]:
    if found.num_greedy_only_a:
        yield f"  is_greedy True -> False: {found.num_greedy_only_a:,}"
    if found.num_greedy_only_b:
        yield f"  is_greedy False -> True: {found.num_greedy_only_b:,}"
    if found.num_other_lengths:
        yield f"  other numbers of scored tokens: {found.num_other_lengths:,} rows, whose means are of other tokens"
    for name, deltas in (("logprob_sum", found.logprob_sum), ("logprob_mean", found.logprob_mean)):
        yield f"{name} of {deltas.num:,} rows: {delta_text(deltas)}"
    if found.token_logprobs.num:
        yield f"logprobs of {found.token_logprobs.num:,} tokens that both scored: {delta_text(found.token_logprobs)}"


def _choice_lines(found: ChoicesFound) -> Iterator[str]:
    changed = (found.num_other_best, found.num_other_best_per_token, found.num_other_best_per_byte)
    for name, num_rows in zip(WINNERS, changed, strict=True):
        if num_rows:
            yield f"  {name}: {num_rows:,} rows have another one"
    if found.num_other_choices:
        yield f"  other numbers of choices: {found.num_other_choices:,} rows"
    yield f"logprob sums of {found.choice_logprob_sums.num:,} choices: {delta_text(found.choice_logprob_sums)}"
    for name, accuracy in (("A", found.accuracy_a), ("B", found.accuracy_b)):
        if accuracy is not None:
            yield f"accuracy of {name}: {accuracy}"
    if found.num_answered:
        yield (
            f"  best right -> wrong: {found.num_right_to_wrong:,}, wrong -> right: {found.num_wrong_to_right:,}, of "
            f"{found.num_answered:,} rows with answers"
        )


def _example_lines(key: str, row: dict[str, Any]) -> Iterator[str]:
    if "is_greedy_a" in row:
        yield f"  {key} {row['key']}: {_changed(row, ('is_greedy', 'logprob_sum', 'logprob_mean'))}"
        return
    answer = f" (answer {row['answer_a']})" if "answer_a" in row else ""
    winners = [name for name in WINNERS if row[f"{name}_a"] != row[f"{name}_b"]]
    yield f"  {key} {row['key']}{answer}: {_changed(row, winners)}"
    for name in "AB":
        sums = row[f"choice_logprob_sums_{name.lower()}"]
        yield f"    {name} {clip_value(None if sums is None else ' '.join(f'{value:.4f}' for value in sums))}"


def _changed(row: dict[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {clip_value(row[f'{name}_a'])} -> {clip_value(row[f'{name}_b'])}" for name in names)


COMPARISON = Comparison(begin_changes, _lines, _example_lines)
