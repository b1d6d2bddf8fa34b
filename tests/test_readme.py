"""The spec that the README shows is the quick start's."""

import yaml
from pages import blocks_of

import jobs


def test_the_spec_shown_is_the_quickstart() -> None:
    [shown] = [block.text for block in blocks_of("README.md") if block.language == "yaml"]
    assert yaml.safe_load(shown) == yaml.safe_load((jobs.ROOT / "jobs/quickstart.yaml").read_text(encoding="utf-8"))
