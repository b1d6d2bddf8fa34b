"""Masks and tokens of structured outputs by guidance, in one call for many rows, beside vLLM's own way for each."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
import llguidance
import llguidance.hf
import llguidance.torch
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

from batchinf.engines.vllm.scheduling.masks import GuidedRows
from benchmarks.scheduler_steps import arguments
from benchmarks.shapes import make_tokenizer

VOCABULARY, EOS, ROWS = 2000, 257, 150
SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": ["good", "bad"]}, "reason": {"type": "string", "minLength": 3, "maxLength": 9}},
    "required": ["label", "reason"],
    "additionalProperties": False,
}


def manager_of() -> Any:
    made: Any = arguments(60, ROWS, True, False)["structured_output_manager"]
    made._grammar_bitmask = llguidance.torch.allocate_token_bitmask(ROWS, VOCABULARY)
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    fast = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(VOCABULARY), eos_token="<eos>")
    return llguidance.hf.from_tokenizer(fast, VOCABULARY)


def requests_of(tokenizer: Any) -> dict[str, Any]:
    text = llguidance.grammar_from("json", json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}}))
    requests = {}
    for row in range(ROWS):
        grammar = GuidanceGrammar(llguidance.LLMatcher(tokenizer, text, log_level=0), tokenizer, VOCABULARY)
        structured = StructuredOutputRequest(StructuredOutputsParams(regex="x"), grammar)
        requests[str(row)] = SimpleNamespace(structured_output_request=structured, use_structured_output=True)
    return requests


def test_masks_and_tokens_are_those_of_vllm(tokenizer: Any) -> None:
    """Rows end, are refused, or are given an end of sequence that is not allowed."""
    chance = np.random.default_rng(1)
    one, other = manager_of(), manager_of()
    guided, mine, theirs = GuidedRows(one), requests_of(tokenizer), requests_of(tokenizer)
    num_batched = num_refused = 0
    for _ in range(60):
        names = list(mine)
        if not names:
            break
        one._grammar_bitmask.fill_(5)
        found, expected = guided.grammar_bitmask(mine, names, {}), other.grammar_bitmask(theirs, names, {})
        assert found is not None
        assert expected is not None
        np.testing.assert_array_equal(found, expected)
        tokens = {}
        for name, row in zip(names, expected, strict=True):
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCABULARY])
            tokens[name] = int(chance.choice([chance.choice(allowed), 11, EOS], p=[0.98, 0.01, 0.01]))
        grammars = {name: request.structured_output_request.grammar for name, request in mine.items()}
        batched = guided.accept((name, grammars[name], token) for name, token in tokens.items())
        num_batched += len(batched)
        for name, token in tokens.items():
            result = batched[name] if name in batched else grammars[name].accept_tokens(name, [token])
            grammar = theirs[name].structured_output_request.grammar
            assert result == grammar.accept_tokens(name, [token])
            assert grammars[name].is_terminated() == grammar.is_terminated()
            assert grammars[name].ll_matcher.is_stopped() == grammar.ll_matcher.is_stopped()
            num_refused += not result
            if not result or (grammar.is_terminated() and chance.random() < 0.5):
                del mine[name], theirs[name]
    assert num_batched > 1000
    assert num_refused > 5


@pytest.mark.parametrize("why", ["drafts", "reasoning", "another grammar", "no room"])
def test_vllm_fills_the_other_masks(why: str, tokenizer: Any) -> None:
    manager, requests = manager_of(), requests_of(tokenizer)
    manager.grammar_bitmask = lambda *given: given
    guided = GuidedRows(manager)
    drafts = {"0": [1]} if why == "drafts" else {}
    if why == "reasoning":
        manager.reasoner_cls = object
    if why == "another grammar":
        requests["7"].structured_output_request.grammar = object()
    if why == "no room":
        manager._grammar_bitmask = None
    given: Any = (requests, list(requests), drafts)
    assert guided.grammar_bitmask(*given) == given
    assert guided.accept([("7", object(), 3)]) == {}
