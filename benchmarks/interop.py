"""Compares the logits of other programs with titanlite's, for models that titanlite exported.

    python benchmarks/interop.py [--programs transformers,peft,litgpt,...] [--keep FOLDER]

What it is: small models are drawn and exported. Each program, of a pinned version, in an
environment of its own in a temporary folder, reads its format and computes the logits of 24 tokens
(`interop_probes.py`). A number is the largest difference from titanlite's logits, relative to the
largest logit. What a program saves is read by titanlite and must have the same bits.
What it costs: about ten minutes on two cores and 700 MB of disk, and it needs a package index.
torch and what else is installed here is not installed again.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import report
import torch
from safetensors.torch import load_file

from titanlite.config.mistakes import suggestion
from titanlite.model.flavors import FLAVORS, LlamaConfig, RopeScaling
from titanlite.model.llama import Llama
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import BUNDLED
from titanlite.tools.formats.convert import Options, convert
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.load_weights import load_model
from titanlite.tools.formats.selection import Selection

PROBES = Path(__file__).with_name("interop_probes.py")
TOKENS = 24


class Program(NamedTuple):
    """A program that reads an export. `packages`: pinned, installed without their dependencies."""

    reads: str  # the format
    packages: tuple[str, ...]
    models: tuple[str, ...]  # that it has


SHAPE = dataclasses.replace(
    FLAVORS["debug"], dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=96, vocab_size=4112
)
UNTIED = dataclasses.replace(SHAPE, tied_embeddings=False)
# transformers adds Qwen's own end of text to the tokenizer: there must be an id left for it
PADDED = dataclasses.replace(UNTIED, vocab_size=4160)
MODELS = {
    "Llama, tied": SHAPE,
    "Llama 3.1 scaling": dataclasses.replace(
        UNTIED, rope_scaling=RopeScaling(8.0, original_context=32)
    ),
    "Qwen2": dataclasses.replace(PADDED, qkv_bias=True),
    "Qwen3": dataclasses.replace(PADDED, qk_norm=True, explicit_head_dim=32),
    "Qwen3-MoE": dataclasses.replace(
        PADDED, qk_norm=True, num_experts=8, experts_per_token=2, expert_ffn_dim=48
    ),
}
DENSE = tuple(name for name, config in MODELS.items() if not config.num_experts)
LLAMAS = ("Llama, tied", "Llama 3.1 scaling")
OF_TORCHTITAN = (*LLAMAS, "Qwen3", "Qwen3-MoE")
PROGRAMS = {
    "transformers": Program("hf", ("transformers==5.24.0",), tuple(MODELS)),
    "peft": Program("hf", ("peft==0.21.2", "transformers==5.24.0"), tuple(MODELS)),
    "litgpt": Program(
        "hf",
        (
            "litgpt==0.5.13",
            "lightning==2.6.6",
            "lightning-utilities==0.15.3",
            "torchmetrics==1.9.0",
            "jsonargparse==4.41.0",
            "typeshed-client==2.15.0",
            "docstring-parser==0.18.0",
            "importlib-resources==7.1.0",
        ),
        LLAMAS,
    ),
    "torchtitan": Program("dcp", ("torchtitan==0.3.0", "spmd_types==0.2.3"), OF_TORCHTITAN),
    "ctranslate2": Program("hf", ("ctranslate2==4.8.5", "transformers==5.24.0"), DENSE),
    "mlx_lm": Program(
        "hf",
        ("mlx-lm==0.32.2", "mlx==0.32.4", "mlx-cpu==0.32.4", "transformers==5.24.0"),
        tuple(MODELS),
    ),
}


def quiet(text: str) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--keep", type=Path, help="a folder for environments, which is not removed")
    options = parser.parse_args()
    chosen = options.programs.split(",")
    for name in chosen:
        if name not in PROGRAMS:
            parser.error(
                f"--programs {name}{suggestion(name, list(PROGRAMS))}; allowed: {', '.join(PROGRAMS)}"
            )
    with tempfile.TemporaryDirectory() as temporary:
        environments = options.keep or Path(temporary)
        models = Path(temporary) / "models"
        for name, config in MODELS.items():
            export(models / name, config)
        rows = {name: run_program(name, environments, models) for name in chosen}
    columns = ["program", "version", "reads", *MODELS, "what it saves, in titanlite"]
    body = [" | ".join(columns), " | ".join("---" for _ in columns)]
    body += [" | ".join(map(str, row)) for row in rows.values()]
    table = [f"| {line} |" for line in body]
    print("\n".join(table))
    results = {name: dict(zip(columns, row, strict=True)) for name, row in rows.items()}
    report.write("interop", "Logits of other programs beside titanlite's", table, results)


def export(folder: Path, config: LlamaConfig) -> None:
    """Draws a model and writes it in every format that a program reads."""
    folder.mkdir(parents=True)
    model = Llama(config, 512)
    model.init_weights(0)
    # As drawn, attention and routers are nearly uniform, and any order of rows would do; norms of 1
    # would too
    generator = torch.Generator().manual_seed(1)
    weights = dict(model.state_dict())
    for name, weight in weights.items():
        if "norm" in name:
            weights[name] = 1 + 0.3 * torch.randn(weight.shape, generator=generator)
        elif name.endswith(".bias"):
            weights[name] = 0.3 * torch.randn(weight.shape, generator=generator)
        elif "attention.w" in name or "router" in name:
            weights[name] = 4 * weight
    ranks = torch.frombuffer(bytearray(BUNDLED.read_bytes()), dtype=torch.uint8)
    tree = {"model": weights, "model_config": dataclasses.asdict(config), "tokenizer": ranks}
    torch.save({**tree, "seq_len": 512}, folder / "model.pt")
    (folder / "model.json").write_text(config.to_json())
    for to in ("hf", "dcp"):
        convert(folder / "model.pt", folder / to, Options(to), log=quiet)
    torch.save(torch.arange(TOKENS) * 7919 % config.vocab_size, folder / "tokens.pt")


def run_program(name: str, environments: Path, models: Path) -> list[str]:
    """A row of the table. A program that cannot be installed has the reason in it."""
    program = PROGRAMS[name]
    print(f"{name}: installing", file=sys.stderr)
    try:
        python = environment(environments / name, program.packages)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        return [name, "not installed", program.reads, *[reason.strip()[-100:]] * len(MODELS), "-"]
    version = program.packages[0].partition("==")[2]
    cells: list[str] = []
    saved: list[str] = []
    for model in MODELS:
        if model not in program.models:
            cells.append("-")
            continue
        difference, back = compare(name, python, models / model)
        print(f"{name}: {model}: {difference}; {back}", file=sys.stderr)
        cells.append(difference)
        saved.append(back)
    summary = ", ".join(dict.fromkeys(saved))
    return [name, version, program.reads, *cells, summary]


def environment(folder: Path, packages: tuple[str, ...]) -> Path:
    """The interpreter of a virtual environment with these packages, and after them with all that
    is installed here.
    """
    python = folder / "bin" / "python"
    if not any(folder.glob("lib/python*/site-packages/host.pth")):
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *packages]
        subprocess.run(install, check=True, capture_output=True, text=True)
        (site,) = folder.glob("lib/python*/site-packages")
        # Last: its presence says that all is installed
        (site / "host.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def compare(name: str, python: Path, folder: Path) -> tuple[str, str]:
    """The relative difference of a program's logits, and what titanlite says of what it saved."""
    (folder / "logits.pt").unlink(missing_ok=True)
    for left in ("back", "lit", "ct2"):
        shutil.rmtree(folder / left, ignore_errors=True)
    command = [str(python), str(PROBES), name, str(folder)]
    variables = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"failed: {last[:100]}", "-"
    back = read_back(name, folder)
    ours = logits_of(folder, adapter=folder / "back" if name == "peft" else None)
    theirs = torch.load(folder / "logits.pt")
    difference = float((theirs - ours).abs().max() / ours.abs().max())
    return f"{difference:.1e}", back


def logits_of(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    """titanlite's logits: (S, V)."""
    source = open_full_state(folder / ("hf" if adapter else "model.pt"), Selection(adapter=adapter))
    model = load_model(source, torch.device("cpu"), 64)
    with torch.no_grad():
        return model(torch.load(folder / "tokens.pt")[None])[0]


def read_back(name: str, folder: Path) -> str:
    """What titanlite reads of what a program saved."""
    back = folder / "back"
    if name == "peft":
        return "adapters, whose sum the row compares"
    if not back.exists():
        return "saves no such format"
    if name == "litgpt":
        try:
            open_full_state(back / "model.pth")
        except ConfigError as error:  # which names the command that writes safetensors
            (command,) = re.findall("python -c .*", str(error))
            command = command.replace("python", sys.executable, 1)
            subprocess.run(command, shell=True, check=True, capture_output=True)
    expected = open_full_state(folder / "model.pt")
    model = str(folder / "model.json") if name == "torchtitan" else ""
    found = open_full_state(back, Selection(model=model))
    same = equal_bits(expected, found)
    if name == "torchtitan":  # its adapter makes of its state what is written for transformers
        written = load_file(folder / "hf" / "model.safetensors")
        same = same and equal_bits(written, load_file(folder / "to_hf.safetensors"))
    return "the same bits" if same else "OTHER BITS"


def equal_bits(expected: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether both have the same names, and equal tensors."""
    if expected.keys() != found.keys():
        return False
    return all(torch.equal(expected[name], found[name]) for name in expected)


if __name__ == "__main__":
    main()
