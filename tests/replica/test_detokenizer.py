"""Batch decoding against a token-by-token stream, and against vLLM's own detokenizers."""

import json
import random
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from batchinf.records import Completion, Request
from batchinf.replica import answers
from batchinf.replica.answers import Detokenizer
from batchinf.spec.sampling import SamplingSpec

TEXTS = [
    "def read(path: str) -> bytes:\n    return open(path, 'rb').read()  # don't stop.",
    "The quick brown fox, it's said, jumps over the lazy dog . Is it so ? We do not know !",
    "Grüße aus Köln — naïve café, ¿qué tal? Ça va… ½ × ¾ = ⅜",
    "日本語のテキストと中文文本，以及한국어 문장입니다。",
    "emoji 😀👩‍👩‍👧‍👦🇩🇪 e\u0301 🏳️‍🌈 and  two   spaces\t\ttabs\n\n\n",
    "Ελληνικά, Русский, العربية, हिन्दी, ภาษาไทย",
]
SPECIAL = ["<s>", "</s>", "<|turn|>"]
SEQUENCES = 1200


def byte_level() -> Tokenizer:
    """As Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return train(tokenizer, trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet))


def sentencepiece_bpe(strip: bool) -> Tokenizer:
    """As Llama 2 and Mistral (with Strip) and Gemma (without) have it: characters unknown to it become bytes."""
    spaces = normalizers.Replace(" ", "▁")
    trained = Tokenizer(models.BPE())
    trained.normalizer = spaces
    train(trained, trainers.BpeTrainer(vocab_size=150, limit_alphabet=60), TEXTS[:2])
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *trained.get_vocab()]
    merges = [tuple(merge) for merge in merges_of(trained)]
    model = models.BPE({token: index for index, token in enumerate(tokens)}, merges, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if strip else spaces
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def merges_of(tokenizer: Tokenizer) -> list[list[str]]:
    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return merges


def unigram() -> Tokenizer:
    """As T5 has it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = [*SPECIAL, "<unk>"]
    return train(tokenizer, trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>"))


def wordpiece() -> Tokenizer:
    """As BERT has it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return train(tokenizer, trainers.WordPieceTrainer(vocab_size=300, special_tokens=[*SPECIAL, "<unk>"]))


def word_ends() -> Tokenizer:
    """As the first GPT has it: the decoder looks at the last token, so nothing is decoded in batches."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    special = [*SPECIAL, "<unk>"]
    return train(tokenizer, trainers.BpeTrainer(vocab_size=300, special_tokens=special, end_of_word_suffix="</w>"))


def train(tokenizer: Tokenizer, trainer: object, texts: list[str] = TEXTS) -> Tokenizer:
    trainer.show_progress = False  # type: ignore[attr-defined]
    tokenizer.train_from_iterator(texts * 4, trainer)
    return tokenizer


BATCHED: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama2": lambda: sentencepiece_bpe(strip=True),
    "gemma": lambda: sentencepiece_bpe(strip=False),
    "unigram": unigram,
    "wordpiece": wordpiece,
}
BACKENDS = {**BATCHED, "word_ends": word_ends}


@dataclass(frozen=True)
class Case:
    """One output after one prompt."""

    prompt: list[int]
    output: list[int]
    finish_reason: str


def cases(backend: Tokenizer, seed: int) -> Iterator[Case]:
    """Texts and random ids, cut anywhere, with special tokens and ids of no token strewn in."""
    rng = random.Random(seed)
    size = backend.get_vocab_size()
    special = [backend.token_to_id(token) for token in SPECIAL]
    for _ in range(SEQUENCES):
        token_ids = []
        for _ in range(rng.randint(2, 7)):
            kind = rng.random()
            if kind < 0.6:
                text = rng.choice(TEXTS)
                start = rng.randrange(len(text))
                token_ids += backend.encode(text[start : start + rng.randint(1, 12)], add_special_tokens=False).ids
            elif kind < 0.8:
                token_ids += rng.choices(special, k=rng.choice([1, 1, 2, 20]))
            elif kind < 0.9:
                token_ids += [rng.randrange(size) for _ in range(rng.randint(1, 6))]
            else:
                token_ids.append(size + rng.randrange(9))
        cut = rng.randint(1, max(1, len(token_ids) - 1))
        output = token_ids[cut:][: rng.randint(1, 60)] or [special[1]]
        yield Case(token_ids[:cut], output, rng.choice(["stop", "length", "length", "repetition"]))


def completion(case: Case, sampling: SamplingSpec, text: str | None = None) -> Completion:
    request = Request(0, 0, case.prompt, sampling, max_tokens=64)
    return Completion(request, np.array(case.output, np.int32), case.finish_reason, text=text)


def stream(backend: Tokenizer, prompt: list[int], output: list[int], skip_special: bool) -> str:
    """The meaning of the text: a decode stream primed with the prompt, begun anew when it loses its place."""
    decoding, text = DecodeStream(ids=list(prompt), skip_special_tokens=skip_special), ""
    for token_id in output:
        try:
            text += decoding.step(backend, token_id) or ""
        except Exception:  # "Invalid prefix encountered"
            decoding = DecodeStream(skip_special_tokens=skip_special)
            text += decoding.step(backend, token_id) or ""
    return text


def expected(backend: Tokenizer, case: Case, sampling: SamplingSpec) -> str:
    drops_last = case.finish_reason == "stop" and not sampling.include_stop_str_in_output
    output = case.output[:-1] if drops_last else case.output
    return stream(backend, case.prompt, output, sampling.skip_special_tokens)


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("name", BACKENDS)
def test_equals_the_stream(name: str, skip_special: bool) -> None:
    backend = BACKENDS[name]()
    sampling = SamplingSpec(skip_special_tokens=skip_special, include_stop_str_in_output=not skip_special)
    given = list(cases(backend, seed=3))
    texts = Detokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)).decode(
        [completion(case, sampling) for case in given], sampling
    )
    for case, text in zip(given, texts, strict=True):
        assert text == expected(backend, case, sampling), case


def test_prompt_ends_in_a_long_run_of_bytes_that_makes_no_characters() -> None:
    backend = BACKENDS["llama2"]()
    run = [backend.token_to_id(f"<0x{byte:02X}>") for byte in b"\xff" + "é".encode() * 40]
    sampling = SamplingSpec()
    case = Case(backend.encode("a").ids + run, backend.encode("a").ids, "length")
    texts = Detokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)).decode(
        [completion(case, sampling)], sampling
    )
    assert texts == [expected(backend, case, sampling)]


@pytest.mark.parametrize("name", BATCHED)
def test_clean_text_is_decoded_in_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = BATCHED[name]()
    prompt, output = (backend.encode(text).ids for text in TEXTS[:2])
    case = Case(prompt, output, "length")
    wanted = stream(backend, prompt, output, True)
    monkeypatch.setattr(answers, "_replay", None)
    sampling = SamplingSpec()
    assert Detokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)).decode(
        [completion(case, sampling)], sampling
    ) == [wanted]


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("name", BACKENDS)
def test_equals_vllm(name: str, skip_special: bool) -> None:
    pytest.importorskip("vllm")
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    backend = BACKENDS[name]()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    sampling = SamplingSpec(skip_special_tokens=skip_special)
    params = SamplingParams(skip_special_tokens=skip_special)
    given = list(cases(backend, seed=5))
    texts = Detokenizer(tokenizer).decode([completion(case, sampling) for case in given], sampling)
    for case, text in zip(given, texts, strict=True):
        request = types.SimpleNamespace(request_id="r", prompt_token_ids=case.prompt, sampling_params=params)
        vllms = FastIncrementalDetokenizer(tokenizer, request)
        for token_id in case.output[:-1]:
            vllms.update([token_id], stop_terminated=False)
        vllms.update(case.output[-1:], stop_terminated=case.finish_reason == "stop")
        assert text == vllms.get_next_output_text(finished=True, delta=False), case


def test_text_of_the_engine_is_kept() -> None:
    backend = byte_level()
    sampling = SamplingSpec(stop="x")
    case = Case(backend.encode("a").ids, backend.encode(" b").ids, "stop")
    token = Case(backend.encode("a").ids, backend.encode(" b").ids, "length")
    decode = Detokenizer(PreTrainedTokenizerFast(tokenizer_object=backend)).decode
    assert decode([completion(case, sampling, "kept"), completion(token, sampling)], sampling) == ["kept", " b"]
    assert decode([], sampling) == []


class SlowTokenizer:
    """The part of transformers' Python tokenizers that decoding uses. Tokens are bytes, then the added ones."""

    all_special_tokens = ("<s>", "</s>")
    is_fast = False

    def __init__(self, added: bool) -> None:
        self._added = {"<s>": 256, "</s>": 257, "<tool>": 258} if added else {}

    def __len__(self) -> int:
        return 256 + len(self._added)

    def get_added_vocab(self) -> dict[str, int]:
        return self._added

    def convert_ids_to_tokens(self, ids: list[int], skip_special_tokens: bool = False) -> list[str | None]:
        names = {token_id: token for token, token_id in self._added.items()}
        tokens = [names.get(token_id, chr(token_id) if token_id < 256 else None) for token_id in ids]
        return [token for token in tokens if not (skip_special_tokens and token in self.all_special_tokens)]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).encode("latin-1").decode(errors="replace")


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("added", [True, False])
def test_slow_tokenizer_equals_vllm(added: bool, skip_special: bool) -> None:
    pytest.importorskip("vllm")
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import SlowIncrementalDetokenizer

    tokenizer = SlowTokenizer(added)
    params = SamplingParams(skip_special_tokens=skip_special)
    sampling = SamplingSpec(skip_special_tokens=skip_special)
    rng = random.Random(7)
    for _ in range(SEQUENCES // 2):
        token_ids = list(rng.choice(TEXTS)[rng.randrange(20) :].encode()[: rng.randint(4, 40)])
        for _ in range(rng.randint(0, 4)):
            token_ids.insert(rng.randrange(len(token_ids)), rng.randrange(250, 262))
        cut = rng.randint(1, len(token_ids) - 1)
        case = Case(token_ids[:cut], token_ids[cut:], "length")
        request = types.SimpleNamespace(prompt_token_ids=case.prompt, prompt_embeds=None, sampling_params=params)
        vllms = SlowIncrementalDetokenizer(tokenizer, request)
        for token_id in case.output:
            vllms.update([token_id], stop_terminated=False)
        text = Detokenizer(tokenizer).decode([completion(case, sampling)], sampling)
        assert text == [vllms.get_next_output_text(finished=True, delta=False)], case
