"""torch alone opens a step folder: a process that does not import titanlite loads it, bit by bit."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import torch
from checkpoints import of_all_ranks, save_after_a_step
from model_builder import EVEN, SMALL
from runs import train_run
from safetensors.torch import load_file

from titanlite.checkpoint.folders import find_step_folder
from titanlite.tools.cli.main import main
from titanlite.tools.formats.load_weights import load_model
from titanlite.tools.formats.shared_model import open_shared

PAGE = Path(__file__).parents[2] / "docs/checkpoints.md"
LINES, *_ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
# The lines of the page for each step, which begin with tensors of sevens
LOAD = f"""
import sys
import torch

lines = {LINES.replace("torch.empty(", "sevens(")!r}
for step in sys.argv[1:]:
    names = {{"sevens": lambda size, dtype: torch.full(size, 7, dtype=dtype)}}
    exec(lines.replace("outputs/debug/checkpoints/step-800", step), names)
    torch.save(names["state"], f"{{step}}.pt")
assert not any(name.startswith("titanlite") for name in sys.modules)
"""
CONSOLIDATE = """
import os
import sys
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

step, target = sys.argv[1:]
os.mkdir(target)
saved = HuggingFaceStorageReader(step).read_metadata().state_dict_metadata
names = {name: 1 for name in saved if name.startswith("model.")}
consolidate_safetensors_files(step, target, names)
"""


def without_titanlite(program: str, *arguments: Path) -> None:
    """Runs a program isolated from this folder and the environment's paths."""
    command = [sys.executable, "-I", "-W", "ignore", "-c", program, *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)


LAYOUTS = [
    (SMALL, {}),
    (EVEN, {"dp_shard": 2, "tp": 2}),
    (EVEN, {"pp": 2, "pp_schedule": "Interleaved1F1B"}),
    (SMALL, {"dp_replicate": 2, "dp_shard": 2}),  # 101 rows
]


def test_torch_alone_loads_model_and_optimizer(pool, tmp_path):
    """One process loads the steps of all layouts, because importing torch takes longer."""
    ranks = {}
    for number, (llama, parallel) in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        degrees = [degree for degree in parallel.values() if isinstance(degree, int)]
        processes = math.prod(degrees)
        ranks[folder] = pool.run(processes, save_after_a_step, folder, parallel, llama)
    without_titanlite(LOAD, *(folder / "step-1" for folder in ranks))
    for folder, saved_ranks in ranks.items():
        loaded = torch.load(folder / "step-1.pt", weights_only=True)
        found = {
            name.removeprefix("model.").removeprefix("optimizer.state."): value
            for name, value in loaded.items()
        }
        saved = of_all_ranks(saved_ranks)
        expected = {name: value for name, value in saved.items() if not name.endswith(".average")}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype, (folder, name)
            assert torch.equal(found[name], value), (folder, name)


def test_what_torch_consolidates_is_a_model(pool, arguments, tmp_path, capfd):
    run = [*arguments, "--training.steps=1", "--validation.freq=0"]
    assert pool.run(2, train_run, run) == [0, 0]
    step = find_step_folder(tmp_path / "debug")
    without_titanlite(CONSOLIDATE, step, tmp_path / "whole")
    whole = load_file(tmp_path / "whole/model-00001-of-00001.safetensors")
    model = load_model(open_shared(step), torch.device("cpu"), 8)
    assert whole.keys() == {f"model.{name}" for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(whole[f"model.{name}"], parameter)
    options = ["--prompt", "def", "--max-new-tokens", "4", "--temperature", "0"]
    texts = []
    small = ["--model", str(step / "model.json"), "--tokenizer", str(step / "tokenizer.model")]
    for path, more in ((step, []), (tmp_path / "whole", small)):
        assert main(["generate", str(path), *options, *more]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1]
