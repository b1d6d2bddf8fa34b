"""The garbage collector's settings in a part of a process."""

import gc

import pytest

from batchinf.base.process import without_long_collections


def test_long_collections_are_rare_in_the_block_alone() -> None:
    usual = gc.get_threshold()
    seen: list[tuple[int, ...]] = []

    def fail() -> None:
        with without_long_collections():
            seen.append(gc.get_threshold())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [(*usual[:2], 100 * usual[2])]
    assert gc.get_threshold() == usual
