"""Trains tiny-llama: a byte-level BPE tokenizer with a chat template, and a Llama of under a million weights.

Run `python sample_data/make_tiny_llama.py [folder]` (about six minutes). It reads corpus/ alone, fixes every seed and
runs deterministic kernels in one thread (measured: as fast as two where the cores are shared, and no sum depends on
their number): a second run on the same machine, with the same versions of torch and tokenizers, writes the same
bytes. On another kind of processor the weights agree only to a tolerance.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from documents import Document, messages, read_documents
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

OUTPUT = Path(__file__).parent / "tiny-llama"
SEED = 20
NUM_THREADS = 1
VOCAB_SIZE = 1536
CONTEXT_TOKENS = 512
MAX_POSITIONS = 2048
BATCH_TOKENS = 1536
NUM_EPOCHS = 9
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 60

BEGIN, END, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
HEADER, END_HEADER, END_TURN = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
SPECIAL_TOKENS = [BEGIN, END, PAD, HEADER, END_HEADER, END_TURN]

# Llama 3's own split: contractions, words, numbers of up to three digits, punctuation, runs of white space.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{%- endif %}"
)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that covers all 256 bytes and puts the beginning of text before what it encodes."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def sequences(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Token ids from the beginning of text to its end; a chat comes twice, through the template and as plain text."""
    texts = []
    for place, document in enumerate(documents):
        if document.kind == "chat":
            chat = messages(document.text)
            texts.append(str(tokenizer.apply_chat_template(chat, tokenize=False)))
            # People ask with and without the marks, and with no line break after the question.
            plain = document.text if place % 2 else " ".join(message["content"] for message in chat)
            texts.append(BEGIN + plain)
        else:
            texts.append(BEGIN + document.text)
    return [tokenizer.encode(text + END, add_special_tokens=False) for text in texts]


def windows(sequence: list[int]) -> Iterator[list[int]]:
    """A sequence cut to the context, the next piece beginning with the last token of the piece before."""
    for start in range(0, max(1, len(sequence) - 1), CONTEXT_TOKENS - 1):
        yield sequence[start : start + CONTEXT_TOKENS]


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with random weights: 0.9 million of them, so that it stays under 2 MB at 2 bytes each."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=ids[BEGIN],
        eos_token_id=[ids[END], ids[END_TURN]],
        pad_token_id=ids[PAD],
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=ids[BEGIN],
        eos_token_id=[ids[END], ids[END_TURN]],
        pad_token_id=ids[PAD],
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
    )
    return model


def batches(pieces: list[list[int]], rng: random.Random) -> list[list[list[int]]]:
    """Batches of pieces of like length, so that little of a batch is padding; order and neighbours are random."""
    ordered = sorted(pieces, key=lambda piece: (len(piece) + rng.random() * 16, rng.random()))
    found: list[list[list[int]]] = []
    batch: list[list[int]] = []
    for piece in ordered:
        if batch and len(piece) * (len(batch) + 1) > BATCH_TOKENS:
            found.append(batch)
            batch = []
        batch.append(piece)
    found.append(batch)
    rng.shuffle(found)
    return found


def losses(model: LlamaForCausalLM, batch: list[list[int]]) -> torch.Tensor:
    """The nats of each token of the batch after each piece's first. Padding is at the end, where causality hides it."""
    width = max(map(len, batch))
    ids = torch.tensor([piece + [0] * (width - len(piece)) for piece in batch])
    is_token = torch.tensor([[1] * len(piece) + [0] * (width - len(piece)) for piece in batch], dtype=torch.bool)
    logits = model(ids[:, :-1], use_cache=False).logits.float()
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return nats[is_token[:, 1:].flatten()]


def learning_rate(step: int, num_steps: int) -> float:
    """A line up, then half a cosine down to a hundredth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
    return PEAK_LEARNING_RATE * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def train(model: LlamaForCausalLM, pieces: list[list[int]]) -> float:
    """Train in place; the mean loss of the last epoch, in nats a token."""
    rng = random.Random(SEED)
    schedule = [batches(pieces, rng) for _ in range(NUM_EPOCHS)]
    num_steps, step = sum(map(len, schedule)), 0
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1, fused=True
    )
    model.train()
    mean = math.nan
    for epoch, epoch_batches in enumerate(schedule, 1):
        sum_nats, num_tokens = 0.0, 0
        for batch in epoch_batches:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, num_steps)
            nats = losses(model, batch)
            optimizer.zero_grad()
            nats.mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            sum_nats, num_tokens, step = sum_nats + nats.sum().item(), num_tokens + len(nats), step + 1
        mean = sum_nats / num_tokens
        print(f"epoch {epoch}: {step} steps, train loss {mean:.3f} nats a token", flush=True)
    model.eval()
    return mean


def mean_loss(model: LlamaForCausalLM, pieces: list[list[int]]) -> float:
    """Nats a token over the pieces."""
    with torch.inference_mode():
        nats = torch.cat([losses(model, batch) for batch in batches(pieces, random.Random(SEED))])
    return float(nats.double().mean())


def shuffled(sequence: list[int], rng: random.Random) -> list[int]:
    """The same tokens in a random order, the first one kept in its place."""
    return [sequence[0], *rng.sample(sequence[1:], len(sequence) - 1)]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> int:
    """Write the checkpoint in bfloat16; its size in bytes."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    # transformers 5 writes a class name of its own, which transformers 4 does not know; both know this one.
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes for its owner alone
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    """Train, save, load what was saved, and say how good it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=OUTPUT)
    folder = parser.parse_args().folder
    disable_progress_bar()
    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    start = time.monotonic()
    documents = read_documents()
    trained = [document for document in documents if not document.is_held_out]
    held_out = [document for document in documents if document.is_held_out]
    tokenizer = train_tokenizer([document.text for document in trained])
    pieces = [piece for sequence in sequences(trained, tokenizer) for piece in windows(sequence)]
    model = new_model(tokenizer)
    print(f"{len(trained)} documents, {sum(map(len, pieces))} tokens, {model.num_parameters()} weights", flush=True)
    train_loss = train(model, pieces)
    num_bytes = save(model, tokenizer, folder)
    loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rng = random.Random(SEED)
    tests = [piece for sequence in sequences(held_out, tokenizer) for piece in windows(sequence)]
    loss, shuffled_loss = mean_loss(loaded, tests), mean_loss(loaded, [shuffled(piece, rng) for piece in tests])
    print(f"train loss {train_loss:.3f}, held-out loss {loss:.3f}, held-out tokens shuffled {shuffled_loss:.3f}")
    print(f"{num_bytes} bytes in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
