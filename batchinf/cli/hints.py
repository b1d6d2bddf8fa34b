"""What to write instead of options and commands that people try, for the errors of the command line."""

# For commands that take a spec and `--set`.
_IN_SPEC = {
    "--limit": "`--set input.limit=N` takes the first N rows",
    "--num-rows": "`--set input.limit=N` takes the first N rows",
    "--sample": "`--set input.sample=0.01` takes a hundredth of the rows",
    "--where": "`--set input.where=SQL` chooses rows",
    "--input": "the rows are in the spec: `--set input.path=PATH`",
    "--data": "the rows are in the spec: `--set input.path=PATH`",
    "--model": "the model is in the spec: `--set model=NAME`",
    "--gpus": "`--set parallel.data_parallel_size=N` sets the number of replicas",
    "--tensor-parallel-size": "`--set parallel.tensor_parallel_size=N` sets it",
    **dict.fromkeys(
        ("-o", "--out", "--output", "--output-dir"), "the folder is in the spec: `--set output.path=FOLDER`"
    ),
    **dict.fromkeys(
        ("--resume", "--continue"), "`batchinf run JOB.yaml` resumes the job if its output folder is there"
    ),
    **dict.fromkeys(("--overwrite", "--force"), "`batchinf run JOB.yaml --fresh` starts anew and keeps the old folder"),
}
_OF_COMMAND = {
    "verify": {"--dtype": "transformers computes in float32"},
    "head": {
        **dict.fromkeys(("--limit", "--num-rows", "--rows"), "`-n N` shows N rows"),
        "--html": "`batchinf report OUT` writes a page",
    },
    "plan": {"--plot": "`--json` prints all figures"},
    "status": {"--plot": "`batchinf report OUT` writes a page with charts"},
    "report": dict.fromkeys(
        ("--to", "--md"), "the report is HTML; `batchinf status OUT --json` has figures for programs"
    ),
    "tune": {"--write": "put the fields that `tune` names into the spec", "--plot": "`--json` prints all figures"},
    "slurm": {
        "--cpus": "`--sbatch cpus-per-task=N` sets the cores",
        **{f"--{key}": f"`--sbatch {key}=VALUE` sets it" for key in ("mem", "partition", "account", "constraint")},
        "--module": "the job has the environment of the shell that submits it: load the module there",
        "--venv": "the job has the environment of the shell that submits it: activate it there",
        "--container": "`--sbatch container-image=IMAGE` is for Pyxis; for Apptainer, fill in `within` in the script",
        "--script": "the script is OUT.slurm/job.sbatch: copy it where you want it",
    },
    "export": {
        "--format": "`--to FORMAT` names the format",
        "--limit": "`--where 'row_index < N'` chooses rows",
        **dict.fromkeys(
            ("--push-to-hub", "--public"), "`hf upload USER/NAME FOLDER . --repo-type dataset --private` uploads it"
        ),
    },
}
_COMMANDS = {
    **dict.fromkeys(("resume", "continue", "restart"), "`batchinf run JOB.yaml` resumes the job, with the same spec"),
    **dict.fromkeys(("start", "launch", "submit"), "`batchinf run JOB.yaml` runs a job"),
    "retry": "`batchinf run JOB.yaml --retry errors` runs error rows again",
    **dict.fromkeys(("show", "cat", "tail", "sample"), "`batchinf head OUT` shows rows, with `--row ID` one row whole"),
    **dict.fromkeys(("convert", "merge"), "`batchinf export OUT -o FILE` writes the output as one file"),
    "inspect": "`batchinf head OUT --row ID` shows one row whole",
    "new": "`batchinf init JOB.yaml` writes a spec",
    **dict.fromkeys(("progress", "watch", "ls"), "`batchinf status OUT` shows a job, with `--watch` while it runs"),
}


def option_hint(command: str, option: str, *, takes_fields: bool) -> str:
    """What to write instead of an option that a command lacks; empty: nothing is known. takes_fields: by `--set`."""
    return _OF_COMMAND.get(command, {}).get(option) or (_IN_SPEC.get(option, "") if takes_fields else "")


def command_hint(command: str) -> str:
    """What to write instead of a command that there is not; empty: nothing is known."""
    return _COMMANDS.get(command, "")
