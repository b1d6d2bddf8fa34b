"""What a spec of `batchinf init` can be for. Each purpose is a task, or one way to use it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """What `batchinf init` must know of a purpose. The lines that it writes are in its template."""

    what: str
    """What the job does, in one sentence."""
    takes_images: bool = False
    takes_batch_files: bool = False
    takes_labels: bool = False
    """Whether the user may give labels to choose from."""
    has_labels: bool = False
    """Whether it has labels also if the user gives none."""
    scores_texts: bool = False
    """Whether it scores the texts of rows that have neither labels nor images."""
    is_asked: bool = False
    """Whether the model answers the prompt, so that a picture alone needs a question."""
    continues_chats: bool = False
    """Whether it takes conversations before texts, for a model with a chat template."""
    names_own_columns: bool = False
    """Whether the user writes the names of its columns."""


PURPOSES = {
    "label": Purpose(
        what="Labels each row: the model chooses one of a few words.",
        takes_images=True, takes_labels=True, has_labels=True, is_asked=True,
    ),
    "generate": Purpose(
        what="Generates a text for each row.",
        takes_images=True, takes_batch_files=True, is_asked=True, continues_chats=True,
    ),
    "score": Purpose(
        what="Scores each text, or the labels of each row, by their logprobs.",
        takes_images=True, takes_labels=True, scores_texts=True, is_asked=True,
    ),
    "logits": Purpose(
        what="Stores the logits of the next token after each prompt.", is_asked=True, continues_chats=True
    ),
    "embed": Purpose(what="Stores a vector for each row.", takes_images=True, takes_batch_files=True),
    "rerank": Purpose(
        what="Scores and ranks the documents of each query.", takes_batch_files=True, names_own_columns=True
    ),
}  # fmt: skip
