"""What a starting engine is doing, read from the lines that vLLM prints. The progress display shows it.

The texts are those of vLLM 0.32.0. Its engine process prints them but sends them to no other process, so the log is
the only source. With other texts, or a log level above INFO, the answer is empty.
"""

import re
from collections.abc import Sequence

# The text of vLLM, and the words for it. The latest line of the log that has one of the texts counts.
STEPS = (
    ("Starting to load model", "loading weights"),
    (r"(?:Loading|Multi-thread loading) .*shards: .*?\| *(\d+)/(\d+) \[", "loading weights {}/{}"),
    ("Loading weights took", "weights are loaded"),
    ("Starting torch.compile", "compiling"),
    ("Dynamo bytecode transform time", "compiling"),
    (r"torch\.compile took", "measuring memory"),
    (r"KV cache size: ([\d,]+) tokens", "making the KV cache ({} tokens)"),
    (r"Capturing CUDA graphs.*?\| *(\d+)/(\d+) \[", "capturing graphs {}/{}"),
)


def start_detail(log: Sequence[str]) -> str:
    """A few words, such as `loading weights 57/191`; empty if the log has none of the texts. log: lines, oldest first.

    A progress bar overwrites itself, so each of its states has to be a line.
    """
    for line in reversed(log):
        for text, words in STEPS:
            if match := re.search(text, line):
                return words.format(*match.groups())
    return ""
