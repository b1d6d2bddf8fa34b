"""Trains tiny-reranker: a BERT of under 200,000 weights that scores how well a passage fits a query; and its queries.

Run `python sample_data/make_tiny_reranker.py [folder]` once tiny-llama is there (about six minutes): its tokenizer is
used, with the pairs of a BERT. The script writes the checkpoint and queries.jsonl. A query is some words of a passage,
and the model learns to tell this passage from others of the same corpus. As with tiny-llama, all seeds are fixed.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from documents import read_documents
from make_tiny_llama import NUM_THREADS, SEED
from tokenizers import Tokenizer, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

FOLDER = Path(__file__).parent
MAX_POSITIONS = 256
NUM_STEPS = 900
BATCH_ROWS = 64
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 100
NUM_QUERIES = 120
NUM_DOCUMENTS = 8
KINDS = ("chat", "drama", "fables", "prose", "sonnets", "stories")
# The beginning and the end of text of tiny-llama stand for BERT's [CLS] and [SEP].
CLS = "<|begin_of_text|>"
SEP = "<|end_of_text|>"
PAD = "<|pad|>"


def new_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of tiny-llama, with the pairs of a BERT: token type 0 for the query, 1 for the passage."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tiny-llama" / "tokenizer.json"))
    ids = [(token, tokenizer.token_to_id(token)) for token in (CLS, SEP)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}", pair=f"{CLS} $A {SEP} $B:1 {SEP}:1", special_tokens=ids
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token=CLS,
        sep_token=SEP,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> BertForSequenceClassification:
    """A BERT with random weights and a head with one label."""
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
    )
    model = BertForSequenceClassification(config)
    # Tokens attend to equal tokens from the start, which takes such a model very long to learn.
    torch.nn.init.normal_(model.bert.embeddings.word_embeddings.weight, std=0.5)
    attention = model.bert.encoder.layer[0].attention.self
    for matrix in (attention.query, attention.key):
        torch.nn.init.eye_(matrix.weight)
    return model


def passages(*, is_held_out: bool) -> list[str]:
    """Pieces of 20 to 40 words."""
    rng = random.Random(SEED)
    found = []
    for document in read_documents():
        if document.kind not in KINDS or document.is_held_out != is_held_out:
            continue
        words = document.text.split()
        place = 0
        while len(words) - place >= 12:
            size = rng.randint(20, 40)
            found.append(" ".join(words[place : place + size]))
            place += size
    return found


def query_of(passage: str, rng: random.Random) -> str:
    """Some of the passage's longer words, in their order."""
    words = passage.split()
    places = [place for place, word in enumerate(words) if len(word) > 3]
    chosen = rng.sample(places, min(len(places), rng.randint(3, 6)))
    return " ".join(words[place].strip(".,;:!?\"'()[]") for place in sorted(chosen)) or words[0]


def batch_of(
    texts: list[str], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Pairs of a query with its passage or with another one, and which is which."""
    pairs = []
    labels = []
    for _ in range(BATCH_ROWS // 2):
        right, wrong = rng.sample(texts, 2)
        query = query_of(right, rng)
        pairs += [(query, right), (query, wrong)]
        labels += [1.0, 0.0]
    inputs = tokenizer(pairs, padding=True, truncation=True, max_length=MAX_POSITIONS, return_tensors="pt")
    return dict(inputs), torch.tensor(labels)


def learning_rate(step: int) -> float:
    """A line up, then a line down."""
    up = (step + 1) / WARMUP_STEPS
    return PEAK_LEARNING_RATE * min(1.0, up, max(0.02, 1 - step / NUM_STEPS))


def train(model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train in place."""
    rng = random.Random(SEED)
    texts = passages(is_held_out=False)
    print(f"{len(texts)} passages, {model.num_parameters()} weights", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    total = 0.0
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        inputs, labels = batch_of(texts, tokenizer, rng)
        logits = model(**inputs).logits[:, 0].float()
        # Each pair is judged alone, and against the other passage of its query.
        alone = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss = alone + torch.nn.functional.softplus(logits[1::2] - logits[::2]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {total / 100:.3f}", flush=True)
            total = 0.0
    model.eval()


def save(model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, folder: Path) -> int:
    """Write the checkpoint in bfloat16; its size in bytes."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"  # as in make_tiny_llama.py
    config.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes for its owner alone
    return sum(path.stat().st_size for path in folder.iterdir())


def queries() -> list[dict[str, object]]:
    """Rows with a query, its passage among others, and the place of that passage. None of them is trained on."""
    rng = random.Random(SEED)
    texts = passages(is_held_out=True)
    rows: list[dict[str, object]] = []
    for number in range(NUM_QUERIES):
        documents = rng.sample(texts, NUM_DOCUMENTS)
        place = rng.randrange(NUM_DOCUMENTS)
        row = {"id": f"q-{number:03d}", "query": query_of(documents[place], rng), "documents": documents}
        rows.append({**row, "relevant": place})
    return rows


def accuracy(model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, rows: list[dict]) -> float:
    """The share of rows whose passage has the highest score."""
    num_right = 0
    for row in rows:
        pairs = [(row["query"], document) for document in row["documents"]]
        inputs = tokenizer(pairs, padding=True, return_tensors="pt")
        with torch.inference_mode():
            num_right += int(model(**inputs).logits[:, 0].argmax()) == row["relevant"]
    return num_right / len(rows)


def main() -> None:
    """Train, save, load what was saved, and say how good it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    disable_progress_bar()
    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    start = time.monotonic()
    tokenizer = new_tokenizer()
    model = new_model(tokenizer)
    train(model, tokenizer)
    num_bytes = save(model, tokenizer, folder / "tiny-reranker")
    loaded = BertForSequenceClassification.from_pretrained(folder / "tiny-reranker", dtype=torch.float32).eval()
    rows = queries()
    with (folder / "queries.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    print(f"the right passage of {NUM_DOCUMENTS} comes first in {accuracy(loaded, tokenizer, rows):.1%} of the queries")
    print(f"{num_bytes} bytes in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
