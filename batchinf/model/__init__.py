"""The model of a job: its place, its config, its LoRA adapters and its memory needs. It loads no weights."""
