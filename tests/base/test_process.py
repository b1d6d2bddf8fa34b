"""The garbage collector's settings in a part of a process."""

import gc

import pytest

from batchinf.base.process import without_long_collections


def test_long_collections_are_rare_in_the_block_alone() -> None:
    usual = gc.get_threshold()
    with pytest.raises(KeyError), without_long_collections():
        assert gc.get_threshold() == (*usual[:2], 100 * usual[2])
        raise KeyError
    assert gc.get_threshold() == usual
