"""What NVIDIA's AIConfigurator predicts for the jobs of "What `plan` predicts" in history/vllm-0.26.md.

    python -m venv aic && aic/bin/pip install aiconfigurator==0.12.0
    python benchmarks/other_planner.py --command aic/bin/aiconfigurator

Prints it beside what `plan` predicts and what the jobs measured. AIConfigurator adds up times of kernels that NVIDIA
measured on each GPU; it knows an H200 with vLLM 0.24. The table has those jobs whose model it knows. A batch of a
generation job is `max_num_seqs`, or as many sequences as fit in the cache; its steps read as many prompt tokens as keep
the batch full: batch × input / output. A job that only reads prompts is its `static_ctx` with batches of 16,384 tokens.
Needs no GPU.
"""

import argparse
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass

RESULTS = pathlib.Path(__file__).resolve().parent / "history" / "vllm-0.26.md"
_SECTION = "## What `plan` predicts"
_EIGHT, _SEVENTY = "meta-llama/Meta-Llama-3.1-8B", "nvidia/Llama-3.1-70B-Instruct-FP8"
_FP8 = ("--gemm-quant-mode", "fp8", "--kvcache-quant-mode", "fp8")
_BATCHED_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table, and how AIConfigurator is asked for it. output: 0 if the job only reads prompts."""

    model: str
    task: str
    name: str
    batch: int
    input: int
    output: int
    num_devices: int = 1
    options: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        given = ["--model-path", self.name, "--batch-size", str(self.batch), "--isl", str(self.input), *self.options]
        if not self.output:
            return [*given, "--osl", "1", "--estimate-mode", "static_ctx"]
        prompt_tokens = self.batch * self.input // self.output
        return [*given, "--osl", str(self.output), "--ctx-tokens", str(prompt_tokens)]


CASES = (
    Case("8B bf16", "generate", _EIGHT, 1024, 256, 128),
    Case("8B bf16", "score", _EIGHT, _BATCHED_TOKENS // 1024, 1024, 0),
    Case("8B bf16", "embed", _EIGHT, _BATCHED_TOKENS // 128, 128, 0),
    Case("8B FP8, cache FP8", "generate", _EIGHT, 1024, 256, 128, options=_FP8),
    Case("8B bf16, tensor 2", "generate", _EIGHT, 1024, 256, 128, 2, ("--tp-size", "2")),
    Case("8B bf16, pipeline 2", "generate", _EIGHT, 512, 256, 128, 2, ("--pp-size", "2")),
    # 187,104 tokens of cache for sequences of 320 tokens on average
    Case("70B FP8", "generate", _SEVENTY, 584, 256, 128),
    Case("70B FP8", "score", _SEVENTY, _BATCHED_TOKENS // 1024, 1024, 0),
    Case("70B FP8, tensor 2", "generate", _SEVENTY, 1024, 256, 128, 2, ("--tp-size", "2")),
    Case("70B FP8, pipeline 2", "generate", _SEVENTY, 512, 256, 128, 2, ("--pp-size", "2")),
    Case("0.6B bf16", "embed", "Qwen/Qwen3-0.6B", _BATCHED_TOKENS // 128, 128, 0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", default="aiconfigurator")
    parser.add_argument("--system", default="h200_sxm")
    args = parser.parse_args()
    known = rows_of(RESULTS.read_text())
    print("| model | task | measured, tokens/s | `plan` | ratio | AIConfigurator | ratio |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for case in CASES:
        predicted, measured = known[case.model, case.task]
        other = estimate(args.command, args.system, case)
        print(
            f"| {case.model} | {case.task} | {measured:,.0f} | {predicted:,.0f} | {predicted / measured:.2f} "
            f"| {other:,.0f} | {other / measured:.2f} |"
        )


def rows_of(text: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Predicted and measured tokens/s of the section's table, by model and task."""
    section = text[text.index(_SECTION) :].split("\n## ", 1)[0]
    found = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and re.fullmatch(r"[\d,]+", cells[6]):
            found[cells[0], cells[1]] = float(cells[5].replace(",", "")), float(cells[6].replace(",", ""))
    return found


def estimate(command: str, system: str, case: Case) -> float:
    """Tokens/s on all devices of the case: of outputs, or of prompts if nothing is generated."""
    given = [command, "cli", "estimate", "--system", system, "--backend", "vllm", "--no-color", *case.arguments()]
    done = subprocess.run(given, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(given)}: {(done.stderr or done.stdout).strip()[-500:]}")
    if case.output:
        return number("tokens/s/gpu", done.stdout) * case.num_devices
    return case.batch * case.input / number("TTFT", done.stdout) * 1000


def number(name: str, text: str) -> float:
    found = re.search(rf"^\s*{re.escape(name)}:\s+([\d,.]+)", text, re.MULTILINE)
    if found is None:
        sys.exit(f"AIConfigurator printed no {name}: {text[-500:]}")
    return float(found[1].replace(",", ""))


if __name__ == "__main__":
    main()
