"""What the rows of a job say about its images, before engines start: `fleet` chooses engine arguments by it."""

import contextlib
from dataclasses import dataclass

import pyarrow as pa

from batchinf.job.job import Job
from batchinf.job.sample import RUN_ROWS, sampled_rows
from batchinf.model.image_tokens import ImageSize
from batchinf.planning.images import SampledImages
from batchinf.planning.lengths import UNREADABLE, opened
from batchinf.spec.file import SpecFile


@dataclass(frozen=True, slots=True)
class ImagesOfRows:
    """The images of a job's rows."""

    most_per_row: int | None
    """No row has more; None: not known of all rows."""
    largest: ImageSize | None
    """The size of the image with the most pixels in a sample; None without a known size."""


def images_of_rows(file: SpecFile) -> ImagesOfRows | None:
    """Read a sample of the input. None if there is no quick one, or if it cannot be read: the start says why."""
    with contextlib.suppress(*UNREADABLE), opened(file, may_scan=False) as sample:
        if sample is not None:
            job, num_rows = sample
            return _of_sample(job, file, is_whole=num_rows is None)
    return None


def _of_sample(job: Job, file: SpecFile, *, is_whole: bool) -> ImagesOfRows:
    """is_whole: the job's input is the whole input, and not a copy of some rows."""
    builder = job.prompt_builder()
    images = SampledImages(job, builder, file.spec.input)
    most = num_read = 0
    has_errors = False
    sizes: list[ImageSize] = []
    for rows in sampled_rows(job, job.rows, builder.columns, at_once=RUN_ROWS):
        for prompt in images.looked_at(builder.build(rows, None)):
            num_read += 1
            # A row without images surely has no more of them than others.
            has_errors |= prompt.error is not None and prompt.error.error_type != "image_missing"
            most = max(most, len(prompt.image_shapes))
            sizes += [(width, height) for _, width, height in prompt.image_shapes]
    are_all = is_whole and num_read == len(job.rows) and not has_errors
    largest = max(sizes, key=lambda size: size[0] * size[1], default=None)
    return ImagesOfRows(most if are_all else _most_by_types(job), largest)


def _most_by_types(job: Job) -> int | None:
    """The most images of a row by the types of the columns; None if a value may be a list of them."""
    where = job.spec.input
    columns = [column for _, column in where.image_columns]
    if not columns or where.has_own_conversations:
        return None
    types = [job.source.schema.field(column).type for column in columns]
    # A text may be a list in JSON.
    are_single = all(pa.types.is_struct(type) or _is_bytes(type) for type in types)
    return len(columns) if are_single else None


def _is_bytes(type: pa.DataType) -> bool:
    return bool(pa.types.is_binary(type) or pa.types.is_large_binary(type))
