"""The section `score` of a spec, and the rules of the task about other sections."""

from typing import Annotated, Any, Literal

from batchinf.spec.fields import IDENTITY, Section, Whole, wrong
from batchinf.spec.input import PROMPT_FORMS, InputSpec
from batchinf.spec.job import JobSpec, TaskSection
from batchinf.spec.sampling import SamplingSpec

# Columns that say what is scored: one of the first three, and what belongs to them.
SCORED_FORMS = ("text_column", "continuation_column", "choices_column")
SCORE_COLUMNS = (*SCORED_FORMS, "context_column", "answer_column")


class ScoreSpec(Section):
    """How texts are scored; the defaults are those of lm-evaluation-harness."""

    add_bos_token: Annotated[bool | None, IDENTITY] = None
    """Whether the tokenizer puts its special tokens around a text; default: as the tokenizer does by itself."""
    target_delimiter: Annotated[str, IDENTITY] = ""
    """What stands between the context and each continuation or choice, and counts for none of their bytes."""
    window_overlap: Annotated[Whole, IDENTITY] = 0
    """Tokens that each window of a long text has of the one before, beside its last one, as context."""
    one_pass: Annotated[bool, IDENTITY] = True
    """Score the choices of a row with one request where each is a single token; they have no ranks then."""
    store: Annotated[Literal["span", "all"], IDENTITY] = "span"
    """Of which tokens ids, logprobs and ranks are stored: the continuation's, or the context's too."""


def score_of(spec: JobSpec) -> ScoreSpec:
    """The section of a spec."""
    section: ScoreSpec = getattr(spec, SECTION.name)
    return section


def _check(spec: JobSpec) -> None:
    """Raise an error for a validator if the section or the columns to score do not fit the task, or other fields."""
    task, where, sampling, score = spec.task, spec.input, spec.sampling, score_of(spec)
    include_token_logprobs = spec.output.include_token_logprobs
    if task != "score":
        for column in SCORE_COLUMNS:
            if getattr(where, column) is not None:
                raise wrong(f"got it with task {task}; must be left out, or say task: score", f"input.{column}")
        for field in score.model_dump(exclude_defaults=True):
            raise wrong(f"got it with task {task}; must be left out, or say task: score", f"score.{field}")
        if not include_token_logprobs:
            raise wrong(f"got false with task {task}; must be left out: it stores the logprobs that sampling.logprobs "
                        "asks for", "output.include_token_logprobs")  # fmt: skip
        return
    _check_input(where)
    _check_sampling(sampling)
    if not include_token_logprobs and sampling.prompt_logprobs is not None:
        raise wrong(f"got {sampling.prompt_logprobs} with output.include_token_logprobs false; leave out one of them",
                    "sampling.prompt_logprobs")  # fmt: skip
    if score.store == "all":
        if where.continuation_column is None:
            raise wrong("got all without input.continuation_column; of a text all is stored anyway, and choices would "
                        "each have the context once more: leave it out", "score.store")  # fmt: skip
        if not include_token_logprobs:
            raise wrong("got all with output.include_token_logprobs false; leave out one of them", "score.store")
    if score.window_overlap and where.text_column is None:
        raise wrong(f"got {score.window_overlap} without input.text_column; only a text is scored in windows: "
                    "leave it out", "score.window_overlap")  # fmt: skip
    if score.target_delimiter and where.text_column is not None:
        raise wrong("got it with input.text_column, which has no context: leave it out", "score.target_delimiter")


def scored_columns(where: InputSpec) -> list[tuple[str, str]]:
    """The columns of what is scored, beside the context's, each behind the field of the spec that names it."""
    fields = ("continuation_column", "choices_column", "answer_column")
    return [(f"input.{field}", column) for field in fields if (column := getattr(where, field)) is not None]


def _check_input(where: InputSpec) -> None:
    given = [column for column in SCORED_FORMS if getattr(where, column) is not None]
    contexts = [form for form in PROMPT_FORMS if form != "text_column" and getattr(where, form) is not None]
    if not given:
        raise wrong("missing; must be text_column, or a context with continuation_column or choices_column, for task "
                    "score", "input")  # fmt: skip
    if len(given) > 1:
        raise wrong(f"got {given[1]} beside {given[0]}; give one of them", f"input.{given[1]}")
    if where.text_column is not None:
        if where.is_chat:
            raise wrong("got it with a field of chat; a conversation is scored as context: give its last words in "
                        "continuation_column", "input.text_column")  # fmt: skip
    elif not contexts:
        raise wrong(f"got it without a context; name its column in context_column, or give another of "
                    f"{', '.join(form for form in PROMPT_FORMS if form not in ('text_column', 'context_column'))}",
                    f"input.{given[0]}")  # fmt: skip
    if where.answer_column is not None and where.choices_column is None:
        raise wrong("got it without choices_column; it is the index of the right choice: leave it out",
                    "input.answer_column")  # fmt: skip
    if where.is_batch_file:
        raise wrong("got openai with task score; its lines have prompts and nothing to score", "input.format")
    if where.on_overlong != "error":
        raise wrong(f"got {where.on_overlong} with task score, which cuts a long context at its left and scores a long "
                    "text in windows: leave it out", "input.on_overlong")  # fmt: skip


def _check_sampling(sampling: SamplingSpec) -> None:
    changed: dict[str, Any] = sampling.model_dump(exclude_defaults=True, exclude={"prompt_logprobs"})
    for field in changed:
        raise wrong("got it with task score, which generates nothing; only prompt_logprobs counts: leave it out",
                    f"sampling.{field}")  # fmt: skip


SECTION = TaskSection("score", ScoreSpec, ScoreSpec(), _check)
