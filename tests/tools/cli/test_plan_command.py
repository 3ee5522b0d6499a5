"""`titanlite plan` as a user calls it. Estimates only: tests/tools/plan/test_trace.py traces."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite.config.load import load_config
from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli import plan_command
from titanlite.tools.plan.machines import find_machine
from titanlite.tools.plan.plan import make_plan
from titanlite.tools.plan.search import search

ROOT = Path(__file__).parents[3]


def printed(capsys, *arguments: str) -> str:
    how = [] if "--search" in arguments else ["--estimate"]
    assert plan_command.run([*arguments, *how]) == 0
    return str(capsys.readouterr().out)


def test_the_output_in_the_documentation_is_that_of_the_command(capsys):
    page = (ROOT / "docs/plan.md").read_text()
    command, shown = re.findall(r"```\n\$ titanlite plan ([^\n]*)\n(.*?)\n```", page, re.DOTALL)[0]
    assert printed(capsys, *command.split()).startswith(shown.rstrip())


@pytest.mark.parametrize(
    "arguments",
    [
        ["debug"],
        ["llama3_405b", "--gpus=512", "--parallel.pp=8", "--training.local_batch_size=8"],
        ["llama3_8b", "--gpus=1", "--days=30"],
        ["llama3_1b", "--lora.rank=8", "--gpus=2", "--gpu=A10G", "--flops=1e20"],
        ["llama3_8b", "--model.flavor=qwen3_30b_a3b", "--gpus=64", "--parallel.ep=8"],
    ],
    ids=" ".join,
)
def test_lines_have_at_most_80_columns(capsys, arguments):
    assert max(map(len, printed(capsys, *arguments).splitlines())) <= 80


def test_json_has_all_that_the_text_has(capsys):
    contents = json.loads(printed(capsys, "llama3_8b", "--gpus=8", "--tokens=2T", "--json"))
    assert contents["verdict"] == "fits"
    assert contents["counts"]["degrees"]["dp_shard"] == 8
    assert contents["time"]["total"] == pytest.approx(
        sum(contents["time"][part] for part in ("products", "attention", "pointwise"))
        + sum(contents["time"][part] for part in ("optimizer", "sharding", "host"))
    )
    assert contents["budget"]["tokens"] == 2e12
    assert contents["budget"]["cost"] == pytest.approx(3.29 * contents["budget"]["gpu_hours"])


@pytest.mark.parametrize("speed", ["--mfu=0.5", "--tokens-per-second=8538.46"])
def test_the_run_at_a_given_speed(capsys, speed):
    """The guides' question: 0.5 of 989 TFLOP/s, 57.9 GFLOP per token, 64 GPUs, 1T tokens."""
    contents = json.loads(printed(capsys, "llama3_8b", "--gpus=64", "--tokens=1T", speed, "--json"))
    per_token = 6 * (8_030_261_248 - 128_256 * 4096) + 12 * 32 * 4096 * 8192
    seconds = 1e12 * per_token / (64 * 0.5 * 989e12)
    assert contents["budget"]["seconds"] == pytest.approx(seconds, rel=1e-5)
    assert contents["budget"]["mfu"] == pytest.approx(0.5, rel=1e-5)


@pytest.mark.slow
def test_a_traced_plan_names_a_layout_that_is_faster(capsys):
    """Here tp 2 for a model that fits into one GPU, in a batch of which each rank has one part."""
    arguments = ["debug", "--parallel.tp=2", "--training.global_batch_size=8"]
    arguments += ["--training.local_batch_size=4"]
    config = load_config(arguments)
    machine = find_machine("H100")
    plan = make_plan(config, plan_command.model_of(config), 2, machine)
    best = search(plan.config, plan.llama, 2, machine).best[0]
    faster = 100 * (plan.time.total / best.time.total - 1)
    assert faster > 50
    assert plan_command.run([*arguments, "--gpus=2"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("tracing a step of ")
    text = " ".join(shown.out.split())
    found = f"a search without given layout keys finds one that is {faster:.0f} % faster: "
    assert found + best.name in text


def test_an_estimate_says_that_it_is_not_compared(capsys):
    assert "not compared with other layouts: --search" in printed(capsys, "llama3_8b", "--gpus=8")


def test_a_search_holds_the_keys_of_the_command_line(capsys):
    arguments = ["llama3_1b", "--gpus=8", "--training.global_batch_size=48"]
    held = ["--parallel.tp=2", "--training.local_batch_size=3", "--loss.num_chunks=1"]
    held += ["--recompute.mode=memory_budget", "--recompute.budget=0.5"]
    contents = json.loads(printed(capsys, *arguments, *held, "--search", "--json"))
    assert contents["best"]
    for one in contents["best"]:
        assert one["parallel.tp"] == 2
        assert one["training.local_batch_size"] == 3
        assert one["loss.num_chunks"] == 1
        assert one["recompute.mode"] == "memory_budget"
    text = printed(capsys, *arguments, "--parallel.dp_shard=4", "--search")
    assert "held, because given: parallel.dp_shard = 4\n" in text
    with pytest.raises(ConfigError, match=r"fewer of the keys that are given: parallel.tp = 3"):
        plan_command.run([*arguments, "--parallel.tp=3", "--search"])


def test_the_title_names_the_model_that_is_planned(capsys):
    text = printed(capsys, "llama3_8b", "--model.flavor=llama2_7b", "--gpus=8")
    assert text.startswith("llama3_8b (model llama2_7b): 6,738,415,616 parameters\n")


def test_a_mixture_has_active_parameters_and_no_error_of_dense_models(capsys):
    arguments = ["llama3_8b", "--model.flavor=qwen3_30b_a3b", "--gpus=8", "--parallel.ep=8"]
    text = " ".join(printed(capsys, *arguments).split())
    assert "30,532,122,624 parameters, of which a token uses 3,353,032,704" in text
    assert "layout: dp_shard 8, ep 8" in text
    assert "6 N is 2.012e+10" in text  # 6 x 3,353,032,704
    assert "no published row of a mixture was fitted" in text
    assert "in the median" not in text
    contents = json.loads(printed(capsys, *arguments, "--json"))
    assert contents["active_parameters"] == 3_353_032_704
    assert contents["time_error"] is None


def test_an_unknown_price_is_no_price(capsys):
    text = printed(capsys, "llama3_8b", "--gpus=8", "--gpu=H200")
    assert "n/a: the price is not known" in text


def test_a_machine_and_prices_of_the_user(capsys, tmp_path):
    machine = tmp_path / "mine.toml"
    machine.write_text('base = "H100"\nmemory_gib = 40\n')
    prices = tmp_path / "prices.toml"
    prices.write_text("mine = 1.5\n")
    text = printed(capsys, "llama3_8b", "--gpus=2", f"--gpu={machine}", f"--prices={prices}")
    assert "mine, 40 GiB" in text
    assert "does not fit" in text
    assert "at $1.50 per GPU-hour" in text


def test_what_would_need_less_is_named_where_it_may_not_fit(capsys):
    base = ["llama3_8b", "--recompute.mode=none", "--training.local_batch_size=4"]
    text = printed(capsys, *base, "--loss.num_chunks=1", "--gpus=8")
    assert "does not fit" in text
    assert 'with recompute.mode = "full": ' in text
    assert "The run, if it did fit" in text
    assert "with recompute" not in printed(capsys, "llama3_8b", "--gpus=8")


def test_the_length_of_a_run(capsys):
    """With a batch that grows, and with epochs of data that is not read."""
    options = ["llama3_8b", "--gpus=8", "--training.steps=200", "--training.global_batch_size=64"]
    ramp = printed(capsys, *options, "--training.batch_ramp=128 from step 101", "--json")
    assert json.loads(ramp)["budget"]["tokens"] == (100 * 64 + 100 * 128) * 8192
    assert "give --tokens" in printed(capsys, "llama3_8b", "--gpus=8", "--training.epochs=2")


def test_the_schedule_is_shown_for_the_length_of_the_config(capsys):
    options = ["debug", "--schedule.name=wsd"]
    contents = json.loads(printed(capsys, *options, "--json"))
    assert contents["schedule"][-1]["step"] == 800
    assert "middle of the decay" in printed(capsys, *options)
    assert json.loads(printed(capsys, *options, "--tokens=1B", "--json"))["schedule"] == []
    assert "middle of the decay" not in printed(capsys, *options, "--tokens=1B")


@pytest.mark.slow
def test_the_best_layout_is_a_config_that_fits(capsys, tmp_path):
    out = tmp_path / "best.toml"
    options = ["llama3_8b", "--gpus=8", "--search", f"--out={out}"]
    text = printed(capsys, *options, "--training.global_batch_size=8")
    assert "the second is" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "fits" in printed(capsys, str(out), "--gpus=8")
    config = load_config([str(out)])
    assert config.run.name == "best"
    assert config.training.compute_dtype == "auto"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu=H1000"], "unknown GPU 'H1000'; did you mean"),
        (["--tokens=many"], "--tokens"),
        (["--gpuss=8"], "unknown option --gpuss=8; did you mean"),
        (["--gpus=3", "--parallel.tp=2"], "does not divide the 3 processes"),
        (["--out=best.toml"], "--out: only with --search"),
        (
            ["--search", "--mfu=0.5", "--prices=nothing.toml", "--mtbf-hours=9"],
            "--mfu and --estimate and --prices and --mtbf-hours: not with --search",
        ),
        (["--tokens-per-second=90000"], "90000 tokens/s per GPU: need "),
        (["--tokens="], "--tokens"),
        (["--prices=nothing.toml"], "nothing.toml"),
    ],
    ids=" ".join,
)
def test_mistakes_are_one_error(arguments, message):
    with pytest.raises(ConfigError) as caught:
        plan_command.run(["llama3_8b", "--estimate", *arguments])
    assert message in "\n".join(caught.value.problems)


def test_a_file_that_cannot_be_written_is_named():
    with pytest.raises(ConfigError, match=r"--out /nowhere/best\.toml"):
        plan_command.run(["llama3_8b", "--search", "--out=/nowhere/best.toml"])


def test_an_estimate_imports_no_torch():
    program = (
        "import sys; from titanlite.tools.cli.plan_command import run; "
        "run(['llama3_8b', '--gpus=8', '--estimate']); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
