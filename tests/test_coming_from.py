"""docs/coming_from.md: its keys exist, its two configs load, its figures are computed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from runs import curve, train_run

from titanlite.config.keys import all_keys
from titanlite.config.load import load_config
from titanlite.config.schema import sections
from titanlite.tools.cli import plan_command

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "coming_from.md").read_text()
DEEPSPEED, GPT3 = re.findall(r"^```toml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_every_key_of_ours_that_is_named_exists():
    """In the second and third column of the tables, and in the prose."""
    prose = re.sub(r"^```.*?^```|^\|.*?$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    columns = re.findall(r"^\| .*? \| (.*) \|$", TEXT, re.MULTILINE)
    assert len(columns) > 110
    ours = "|".join(sections())
    named = re.findall(rf"`((?:{ours})\.[a-z_]+)", "\n".join([prose, *columns]))
    assert len(set(named)) > 80
    assert set(named) <= set(all_keys())


def test_the_example_of_deepspeed_is_its_json(tmp_path):
    """256 = 4 x 8 x 8: sequences of a GPU, accumulation steps, GPUs."""
    (shown,) = re.findall(r"^```json\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    there = json.loads(shown)
    (tmp_path / "mine.toml").write_text(DEEPSPEED)
    here = load_config([str(tmp_path / "mine.toml")])
    training = here.training
    assert training.global_batch_size == there["train_batch_size"] == 256
    assert training.local_batch_size == there["train_micro_batch_size_per_gpu"] == 4
    steps = training.global_batch_size // (training.local_batch_size * 8)
    assert steps == there["gradient_accumulation_steps"] == 8
    adam = there["optimizer"]["params"]
    assert (here.optimizer.name, here.optimizer.lr) == ("adamw", adam["lr"])
    assert list(here.optimizer.betas) == adam["betas"]
    assert here.optimizer.eps == adam["eps"]
    assert here.optimizer.weight_decay == adam["weight_decay"]
    rate = there["scheduler"]["params"]
    assert (here.schedule.name, here.schedule.min_ratio) == ("linear", 0.0)
    assert here.schedule.warmup_steps == rate["warmup_num_steps"]
    assert (training.steps, here.optimizer.lr) == (rate["total_num_steps"], rate["warmup_max_lr"])
    assert training.max_norm == there["gradient_clipping"]
    assert (training.compute_dtype, training.reduce_dtype) == ("bfloat16", "bfloat16")
    assert here.parallel.reshard_after_forward == "never"
    assert here.parallel.optimizer_offload
    assert here.metrics.log_freq == there["steps_per_print"]


def test_the_example_of_deepspeed_trains(pool, text_file, tmp_path):
    """A small model on 2 ranks: 4 sequences, 8 accumulation steps."""
    (tmp_path / "mine.toml").write_text(DEEPSPEED)
    options = [
        str(tmp_path / "mine.toml"),
        f"--run.folder={tmp_path}",
        f"--data.path={text_file}",
        "--model.flavor=debug",
        "--model.dim=32",
        "--model.num_layers=2",
        "--training.seq_len=32",
        "--training.global_batch_size=64",
        "--training.steps=4",
        "--schedule.warmup_steps=1",
        "--metrics.log_freq=1",
    ]
    assert pool.run(2, train_run, options) == [0, 0]
    losses = [loss for loss, _ in curve(tmp_path / "mine").values()]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_the_shape_of_gpt_3_is_planned(capsys, tmp_path):
    """The guides' 175B: tp 8 x pp 16 x dp 4 on 512 GPUs; 15 of 399 slots of the pipeline are idle."""
    file = tmp_path / "gpt3.toml"
    file.write_text(GPT3)
    (command,) = re.findall(r"`titanlite plan gpt3.toml (.*?)`", TEXT)
    assert plan_command.run([str(file), *command.split(), "--json"]) == 0
    contents = json.loads(capsys.readouterr().out)
    assert contents["verdict"] == "fits"
    degrees = {"pp": 16, "dp_replicate": 4, "dp_shard": 1, "cp": 1, "tp": 8}
    assert contents["counts"]["degrees"] == degrees
    # All 384 microbatches of a rank are one local batch
    assert contents["counts"]["local_batches"] == 1
    assert load_config([str(file)]).training.local_batch_size == 1536 // 4 == 384
    assert contents["bubble"] == pytest.approx(15 / 399)
    assert contents["parameters"] / 1e9 == pytest.approx(174.6, abs=0.05)
    assert contents["budget"]["tokens"] == 1536 * 2048 * 300_000
    figures = "4 replicas of 174.6B parameters, 944B tokens in all, and a bubble of 3.76 %"
    assert figures in " ".join(TEXT.split())


def billions(formula: str) -> float:
    """A number of bytes, as `2N + 16N/W`, in GB for 8 billion parameters on 4 processes."""
    terms = re.findall(r"(\d+)N(/W)?", formula)
    return sum(int(number) * 8 / (4 if divided else 1) for number, divided in terms)


def test_the_bytes_of_the_stages_are_those_of_their_formulas():
    rows = re.findall(
        r"^\| (\w.*?) \| ([\dNW+/ ]+) \| (\d+) GB \| (.*?) \| ([\dNW+/ ]+) \| (\d+) GB \|$",
        TEXT,
        re.MULTILINE,
    )
    assert len(rows) == 4
    for _, there, number, _, here, own_number in rows:
        assert billions(there) == int(number)
        assert billions(here) == int(own_number)
    (zero_2,) = [row for row in rows if row[0].startswith("ZeRO-2")]
    assert (zero_2[2], zero_2[5]) == ("44", "48")


def test_the_pages_about_coming_from_elsewhere_link_each_other():
    assert "(coming_from.md)" in (DOCS / "finetune.md").read_text()
    assert "(finetune.md)" in TEXT
