"""The first hour: every command of four pages, where only the packages are that the page names.

Packages that the development environment has besides are hidden from every process. Training is
shortened, and models of the pages' names are small random ones.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chats import CHATML
from foreign_tokenizers import sentencepiece, trained
from foreign_tokenizers import write as write_tokenizer
from page_commands import commands, printed_next
from transformers_models import make

ROOT = Path(__file__).parents[1]
PAGES = {
    "README": ROOT / "README.md",
    "running": ROOT / "docs/running.md",
    "finetune": ROOT / "docs/finetune.md",
    "models": ROOT / "docs/models.md",
}
SHORT = [
    "--training.steps=4",
    "--training.seq_len=32",
    "--training.global_batch_size=4",
    "--training.local_batch_size=2",
    "--schedule.warmup_steps=1",
    "--validation.freq=4",
    "--validation.samples=2",
    "--validation.prompt_tokens=8",
]
TINY = ["--model.dim=48", "--model.ffn_dim=72", "--model.num_layers=3"]
TINY += ["--model.num_heads=6", "--model.num_kv_heads=3"]
OF_THE_FOLDER = [*TINY, "--model.rope_theta=20000", "--model.norm_eps=1e-4"]
OF_THE_FOLDER.append("--model.vocab_size=1505")  # the ids of `trained("qwen")`
# The beginning of a command -> options added to it; None: why it is not run
ADDED: dict[str, list[str] | None] = {
    "./run_train.sh --help": [],
    "./run_train.sh cpu_25m": [*SHORT, *TINY],
    "./run_train.sh lora": [*SHORT, "--training.seq_len=64"],
    "./run_train.sh llama3_1b": [*SHORT, "--training.seq_len=64"],
    "./run_train.sh qwen2.5_0.5b": [*SHORT, *OF_THE_FOLDER],
    "./run_train.sh debug --run.name=tuned": SHORT,
    "./run_train.sh": SHORT,
    "NGPU=8 ./run_train.sh llama3_8b": ["--print-config"],
    "NGPU=4 ./run_train.sh debug": SHORT,
    "NGPU=2 ./run_train.sh debug": [*SHORT, "--training.steps=6"],
    "titanlite verify --quick": ["--processes=1"],
    ".venv/bin/python -m titanlite verify --quick": ["--processes=1"],
    "titanlite tokenizer train": ["--num-tokens=300"],
    "./run_tests.sh": None,  # these tests
    "hf download": None,  # the network
}
HIDING = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {hidden}


class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return PathFinder.find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
"""


def with_requirements(names: set[str]) -> set[str]:
    """These distributions and all that they require."""
    found: set[str] = set()
    waiting = [name.lower().replace("_", "-") for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        for line in required:
            if "extra ==" not in line:
                waiting.append(re.match(r"[\w.-]+", line)[0].lower().replace("_", "-"))
    return found


def hidden_packages(more: set[str]) -> list[str]:
    """The packages of this environment besides those of requirements.txt and `more`."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    named = {line.partition("==")[0] for line in lines if "==" in line}
    installed = with_requirements(named | more)
    return [
        package
        for package, names in importlib.metadata.packages_distributions().items()
        if package != "titanlite"
        and not {name.lower().replace("_", "-") for name in names} & installed
    ]


class Desk:
    """A clone that is not installed, an environment and a user's files."""

    def __init__(self, folder: Path, packages: set[str]) -> None:
        self.folder = folder
        for name in ("titanlite", "learn", "train.py", "train_configs", "requirements.txt"):
            (folder / name).symlink_to(ROOT / name)
        for name in ("run_train.sh", "setup_env.sh"):
            (folder / name).symlink_to(ROOT / name)
        hiding = folder / "hiding"
        hiding.mkdir()
        hidden = hidden_packages(packages)
        (hiding / "sitecustomize.py").write_text(HIDING.format(hidden=hidden))
        programs = folder / ".venv/bin"
        programs.mkdir(parents=True)
        (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (programs / "python").chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(hiding),
            "LOG_RANK": "0",
            "NGPU": "1",
        }

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of a page; running.md says what `titanlite` is here."""
        command = re.sub(r"^titanlite ", "python -m titanlite ", command)
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def need(self, command: str) -> str:
        done = self.run(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        assert "Traceback" not in done.stdout, f"{command}\n{done.stdout}"
        return done.stdout


def write_model(folder: Path, fields: dict[str, object], tokenizer: str, **config: object) -> None:
    """A random model of transformers with its tokenizer."""
    size = 1 + max(json.loads(tokenizer)["model"]["vocab"].values())
    added = [entry["id"] + 1 for entry in json.loads(tokenizer)["added_tokens"]]
    folder.mkdir(parents=True)
    make({**fields, "vocab_size": max(size, *added)}).save_pretrained(folder)
    write_tokenizer(folder, tokenizer, **config)


def write_files(folder: Path) -> None:
    """What the pages take for granted: texts, conversations, prompts, a script, models."""
    (folder / "my_texts").mkdir()
    for number in range(30):
        (folder / f"my_texts/{number}.txt").write_text(
            f"line {number} of a text that has words\n" * 300
        )
    with (folder / "chats.jsonl").open("w") as file:
        for number in range(120):
            messages = [
                {"role": "user", "content": f"What is {number} + 2?"},
                {"role": "assistant", "content": f"It is {number + 2}, as everybody knows."},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    (folder / "prompts.txt").write_text("def f\nimport os\n")
    (folder / "run.sh").write_text(
        "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
        "--seq-length 128 --micro-batch-size 2 --global-batch-size 4 --train-iters 10 --lr 1e-3 "
        "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope\n"
    )
    ends = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": CHATML}
    qwen2 = {"model_type": "qwen2", "tie_word_embeddings": True}
    qwen3 = {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True}
    write_model(folder / "models/Qwen2.5-0.5B", qwen2, trained("qwen"), **ends)
    write_model(folder / "models/Qwen3-0.6B", qwen3, trained("qwen"), **ends)
    (folder / "path").mkdir()
    (folder / "path/to").symlink_to(folder / "models")


# Results of earlier pages that a page uses
BEFORE = {
    "README": [],
    "running": [
        f"./run_train.sh debug {' '.join(SHORT)}",
        "cp -r outputs/debug outputs/llama3_8b",
    ],
    "finetune": [],
    "models": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_every_documented_command_works(name, tmp_path):
    desk = Desk(tmp_path, set())
    write_files(tmp_path)
    for command in BEFORE[name]:
        desk.need(command)
    for command in commands(PAGES[name].read_text()):
        beginning = next((text for text in ADDED if command.startswith(text)), "")
        added = ADDED.get(beginning, [])
        if added is not None:
            desk.need(" ".join([command, *added]))


@pytest.mark.slow
def test_what_a_run_prints_at_its_end_goes_on_with_it(tmp_path):
    """With as many processes as before, which its layout needs."""
    desk = Desk(tmp_path, set())
    output = desk.need(f"NGPU=2 ./run_train.sh debug --parallel.tp=2 {' '.join(SHORT)}")
    generate, resume = printed_next(output)
    desk.need(generate)
    output = desk.need(resume)
    assert "resumed " in output
    assert "step 8/8" in output


@pytest.mark.slow
def test_the_package_that_the_page_names_is_what_is_missing(tmp_path):
    """A tokenizer as SmolLM2's, which tiktoken cannot encode."""
    command = "titanlite prepare chats.jsonl --chat --tokenizer model --out data"
    for packages in (set(), {"tokenizers"}):
        folder = tmp_path / f"with {len(packages)}"
        folder.mkdir()
        desk = Desk(folder, packages)
        write_files(folder)
        template = CHATML.replace("<|im_end|>", "</s>")  # this tokenizer has no token of ChatML
        ends = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
        write_tokenizer(folder / "model", sentencepiece().to_str(), **ends)
        done = desk.run(command)
        if packages:
            assert done.returncode == 0, done.stdout
        else:
            assert done.returncode == 2
            assert "pip install tokenizers" in done.stdout
    for page in ("finetune", "models"):
        assert "pip install tokenizers" in " ".join(PAGES[page].read_text().split())
