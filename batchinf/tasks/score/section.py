"""The section `score` of a spec, and the fields of the section `input` that say what is scored."""

from typing import Annotated, Any, Literal

from batchinf.spec.fields import IDENTITY, Section, Whole, wrong
from batchinf.spec.input import PROMPT_FORMS, InputSpec
from batchinf.spec.job import JobSpec, TaskSection

# A spec has one of these fields. All but a text have a context.
_SCORED_FORMS = ("text_column", "continuation_column", "choices_column", "choices")
_OTHER_CONTEXTS = tuple(form for form in PROMPT_FORMS if form not in ("text_column", "context_column", "query_column"))


class ScoreSpec(Section):
    """How texts are scored; the defaults are those of lm-evaluation-harness."""

    add_bos_token: Annotated[bool | None, IDENTITY] = None
    """Add the tokenizer's special tokens to a text; default: as the tokenizer does by itself."""
    target_delimiter: Annotated[str, IDENTITY] = ""
    """Text between the context and each continuation or choice. It does not count as their bytes."""
    window_overlap: Annotated[Whole, IDENTITY] = 0
    """Tokens of context that each window of a long text takes from the window before, in addition to its last token."""
    one_pass: Annotated[bool, IDENTITY] = True
    """Score the choices of a row with one request if each is a single token. `choice_ranks` is null then."""
    store: Annotated[Literal["span", "all"], IDENTITY] = "span"
    """Tokens whose ids, logprobs and ranks are stored. `span`: the continuation's; `all`: also the context's."""
    neutral: Annotated[dict[str, Any] | None, IDENTITY] = None
    """Values of input columns that make a neutral context, such as `{question: N/A}`. Each choice is scored after it,
    too, and `best_pmi` is the choice whose logprob the row's own context raises most."""


def score_of(spec: JobSpec) -> ScoreSpec:
    """The section of a spec."""
    section: ScoreSpec = getattr(spec, SECTION.name)
    return section


def _check(spec: JobSpec) -> None:
    """Raise a validator's error if the section or the scored columns do not fit the task or other fields."""
    if spec.task != "score":
        _check_unused(spec)
        return
    _check_input(spec.input)
    for field in spec.sampling.model_dump(exclude_defaults=True, exclude={"prompt_logprobs"}):
        raise wrong("got it with task score, which generates nothing; only prompt_logprobs counts: leave it out",
                    f"sampling.{field}")  # fmt: skip
    if not spec.output.include_token_logprobs and spec.sampling.prompt_logprobs is not None:
        raise wrong(f"got {spec.sampling.prompt_logprobs} with output.include_token_logprobs false; leave out one of "
                    "them", "sampling.prompt_logprobs")  # fmt: skip
    _check_section(spec)


def _check_unused(spec: JobSpec) -> None:
    """Raise the error if a spec of another task sets a field of this one."""
    reason = f"got it with task {spec.task}; must be left out, or set task: score"
    for field in spec.input.given((*_SCORED_FORMS, "context_column", "answer_column")):
        raise wrong(reason, f"input.{field}")
    for field in score_of(spec).model_dump(exclude_defaults=True):
        raise wrong(reason, f"score.{field}")
    if not spec.output.include_token_logprobs:
        raise wrong(f"got false with task {spec.task}; must be left out: it stores the logprobs that sampling.logprobs "
                    "asks for", "output.include_token_logprobs")  # fmt: skip


def _check_section(spec: JobSpec) -> None:
    score = score_of(spec)
    if score.store == "all":
        if spec.input.continuation_column is None:
            raise wrong("got all without input.continuation_column; all tokens of a text are stored anyway, and "
                        "choices would store their context again and again: leave it out", "score.store")  # fmt: skip
        if not spec.output.include_token_logprobs:
            raise wrong("got all with output.include_token_logprobs false; leave out one of them", "score.store")
    if score.neutral is not None and not has_choices(spec.input):
        raise wrong("got it without choices; it compares the choices of a row: leave it out", "score.neutral")
    if score.neutral is not None and spec.input.has_images:
        raise wrong("got it in a job with images, which have no neutral value yet: leave it out", "score.neutral")
    if score.window_overlap and spec.input.text_column is None:
        raise wrong(f"got {score.window_overlap} without input.text_column; only a text is scored in windows: "
                    "leave it out", "score.window_overlap")  # fmt: skip
    if score.target_delimiter and spec.input.text_column is not None:
        raise wrong("got it with input.text_column, which has no context: leave it out", "score.target_delimiter")


def has_choices(where: InputSpec) -> bool:
    """Whether several texts are scored after each context."""
    return where.choices_column is not None or where.choices is not None


def scored_columns(where: InputSpec) -> list[tuple[str, str]]:
    """Pairs of a spec field and the column that it names, for all columns besides the context's."""
    names = where.given(("continuation_column", "choices_column", "answer_column"))
    return [(f"input.{name}", getattr(where, name)) for name in names]


def _check_input(where: InputSpec) -> None:
    scored = where.given(_SCORED_FORMS)
    if not scored:
        raise wrong("missing; must be text_column, or a context with continuation_column, choices_column or choices, "
                    "for task score", "input")  # fmt: skip
    if len(scored) > 1:
        raise wrong(f"got {scored[1]} beside {scored[0]}; give one of them", f"input.{scored[1]}")
    if where.text_column is not None:
        if where.is_chat:
            raise wrong("got it with a field of chat; a conversation can only be a context: name the column of the "
                        "text after it in continuation_column", "input.text_column")  # fmt: skip
    elif not where.given(("context_column", *_OTHER_CONTEXTS)):
        raise wrong("got it without a context; name its column in context_column, or give another of "
                    f"{', '.join(_OTHER_CONTEXTS)}", f"input.{scored[0]}")  # fmt: skip
    if where.answer_column is not None and not has_choices(where):
        raise wrong("got it without choices_column or choices; it is the right one of them: leave it out",
                    "input.answer_column")  # fmt: skip
    if where.answers != "auto" and where.answer_column is None:
        raise wrong(f"got {where.answers} without input.answer_column, whose values it is about: leave it out",
                    "input.answers")  # fmt: skip
    if where.is_batch_file:
        raise wrong("got openai with task score; its lines have prompts and nothing to score", "input.format")
    if where.on_overlong != "error":
        raise wrong(f"got {where.on_overlong} with task score, which cuts a long context at its left and scores a long "
                    "text in windows: leave it out", "input.on_overlong")  # fmt: skip


SECTION = TaskSection("score", ScoreSpec, ScoreSpec(), _check)
