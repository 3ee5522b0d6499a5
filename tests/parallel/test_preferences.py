"""DPO: the loss of its paper in every layout, from pairs of answers in a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from chats import MARKED
from messages import run_refused
from runs import curve, rows, train_run

from titanlite.checkpoint.manifest import read_manifest
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.tools.cli.main import main
from titanlite.tools.formats.convert import convert
from titanlite.tools.verify.campaign import FIGURES, judge
from titanlite.tools.verify.compare import measure, reference
from titanlite.tools.verify.ladder import Case, make_case

SMALL = ["debug", "--model.dim=32", "--model.ffn_dim=64", "--training.seq_len=32"]
WHOLE = "dpo.beta=0.5,data.document_mask"  # all weights, beside a frozen copy
DPO = f"{WHOLE},lora.rank=4"


def case(layout: str) -> tuple[Case, LlamaConfig]:
    made = make_case(SMALL, layout, "cpu")
    return made, resolve_flavor(made.config.model, 4112)


@pytest.fixture(scope="module")
def right(pool, tmp_path_factory) -> Path:
    """The references, which are written after the paper."""
    folder = tmp_path_factory.mktemp("reference")
    for layout in (DPO, WHOLE):
        made, llama = case(layout)
        pool.run(1, reference, made.config, llama, folder / layout)
        losses = torch.load(folder / layout)["loss"]
        assert max(abs(loss - 0.6931) for loss in losses) > 0.02, "margins that are not 0"
    return folder


def forget_the_sum_over_cp(*arguments):
    """Answers of which each rank knows its part only."""
    import torch.distributed as dist

    from titanlite.parallel import preferences

    with mock.patch.object(preferences, "dist", mock.Mock(spec=dist)):
        return measure(*arguments)


def number_answers_of_the_part(*arguments):
    """Labels that say which document they belong to by this rank's part of the positions."""
    from titanlite.data.pairs import number_answers
    from titanlite.parallel import preferences

    def number(batch):
        whole = number_answers(batch)
        shifted = whole.labels + (1 << 32)
        return whole._replace(labels=torch.where(whole.labels < 0, whole.labels, shifted))

    with mock.patch.object(preferences, "number_answers", number):
        return measure(*arguments)


def keep_the_adapters(*arguments):
    """A reference that learns too."""
    import contextlib

    from titanlite.parallel import preferences

    nothing = mock.Mock(side_effect=lambda parts: contextlib.nullcontext())
    with mock.patch.object(preferences, "without_adapters", nothing):
        return measure(*arguments)


def compare_with_itself(*arguments):
    """A model whose frozen copy is not used."""
    import contextlib

    from titanlite.parallel.preferences import PairStages

    with mock.patch.object(PairStages, "reference", lambda stages: contextlib.nullcontext(stages)):
        return measure(*arguments)


@pytest.mark.parametrize(
    ("function", "layout", "passes"),
    [
        (measure, f"cp=2,{DPO}", True),
        pytest.param(measure, f"pp=2,{DPO}", True, marks=pytest.mark.slow),
        pytest.param(measure, f"tp=2,{DPO}", True, marks=pytest.mark.slow),
        (measure, f"dp_shard=2,{WHOLE}", True),
        pytest.param(measure, f"pp=2,{WHOLE}", True, marks=pytest.mark.slow),
        (forget_the_sum_over_cp, f"cp=2,{DPO}", False),
        pytest.param(
            number_answers_of_the_part, f"dp_shard=2,{DPO}", False, marks=pytest.mark.slow
        ),
        pytest.param(keep_the_adapters, f"dp_shard=2,{DPO}", False, marks=pytest.mark.slow),
        (compare_with_itself, f"dp_shard=2,{WHOLE}", False),
    ],
)
def test_the_loss_of_pairs_is_that_of_one_process(pool, right, function, layout, passes):
    made, llama = case(layout)
    path = right / layout.partition(",")[2]
    ranks = pool.run(made.processes, function, made.config, llama, path)
    row = judge(made, {name: max(rank[name] for rank in ranks) for name in FIGURES}, 0.0)
    assert row["passed"] == passes, row
    assert (row["gradient"] > 1e-4) != passes, row


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Prepared pairs, with the same preference in all."""
    folder = tmp_path_factory.mktemp("pairs")

    def line(i: int) -> str:
        answers = {"chosen": f"{i} is good", "rejected": f"{i} is bad"}
        return json.dumps({"prompt": f"how is {i}", **answers}) + "\n"

    (folder / "a.jsonl").write_text("".join(line(i) for i in range(10, 60)))
    (folder / "b.jsonl").write_text("".join(line(i) for i in range(60, 70)))
    (folder / "t.jinja").write_text(MARKED)
    command = ["prepare", str(folder / "a.jsonl"), "--chat", "--pairs", "--prompt-field", "prompt"]
    command += ["--template", str(folder / "t.jinja"), "--validation", str(folder / "b.jsonl")]
    assert main([*command, "--out", str(folder / "data")]) == 0
    return folder / "data"


def pair_arguments(options: list[str], data: Path, base: Path, folder: Path) -> list[str]:
    run = [word for word in options if not word.startswith("--data.path")]
    run += [f"--data.path={data}", f"--run.folder={folder}", "--data.document_mask"]
    run += [
        "--training.seq_len=96",
        "--dpo.beta=0.5",
        "--lora.rank=4",
        f"--checkpoint.initial_load={base}",
    ]
    return [*run, "--schedule.name=constant", "--optimizer.lr=1e-2", "--validation.samples=0"]


@pytest.mark.slow
def test_a_run_learns_which_answer_is_chosen(pool, options, data, whole_run, tmp_path):
    run = pair_arguments(options, data, whole_run(), tmp_path)
    # On two processes each half, a third of it resumed on one
    shared = [*run, "--training.steps=9"]
    assert pool.run(2, train_run, [*run, "--training.steps=6", "--parallel.cp=2"]) == [0, 0]
    shutil.copytree(tmp_path / "debug", tmp_path / "again")
    assert pool.run(2, train_run, [*shared, "--parallel.cp=2"]) == [0, 0]
    assert pool.run(1, train_run, [*shared, "--run.name=again"]) == [0]
    found = [[loss for loss, _ in curve(tmp_path / name).values()] for name in ("debug", "again")]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0)
    assert found[0][0] == pytest.approx(0.693147, abs=1e-5), "B is 0: all margins are 0"
    assert found[0][-1] < 0.5

    trained = [row for row in rows(tmp_path / "debug") if "reward_margin" in row]
    assert trained[0]["reward_margin"] == pytest.approx(0, abs=1e-4)
    assert trained[-1]["reward_margin"] > 0.3
    assert trained[-1]["reward_accuracy"] > 0.8
    assert trained[0]["targets"] == 8 * 2, "two pairs in a row of 96 tokens"
    validated = [row for row in rows(tmp_path / "debug") if "validation/a/loss" in row]
    assert validated[-1]["validation/a/reward_accuracy"] > 0.8
    assert validated[-1]["validation/a/loss"] < validated[0]["validation/a/loss"]
    assert "validation/a/perplexity" not in validated[0]
    assert trained[0]["perplexity"] is None


@pytest.mark.slow
def test_without_adapters_the_reference_is_a_frozen_copy(pool, options, data, whole_run, tmp_path):
    """3 + 3 steps in two layouts are 6 at once; a run needs the weights that it began with."""
    run = [*pair_arguments(options, data, whole_run(), tmp_path), "--lora.rank=0"]
    run += ["--optimizer.lr=1e-3", "--validation.freq=0"]
    assert pool.run(2, train_run, [*run, "--training.steps=3"]) == [0, 0]
    others = whole_run("--run.seed=7")
    with run_refused("checkpoint.initial_load", str(others), "not the weights"):
        last = [*run, "--training.steps=6", f"--checkpoint.initial_load={others}"]
        pool.run(1, train_run, last)
    with run_refused("dpo.beta = 0.5", "checkpoint.initial_load"):
        pool.run(1, train_run, [*run, "--training.steps=6", "--checkpoint.initial_load="])
    assert pool.run(1, train_run, [*run, "--training.steps=6"]) == [0]
    assert pool.run(1, train_run, [*run, "--training.steps=6", "--run.name=whole"]) == [0]
    found = [[loss for loss, _ in curve(tmp_path / name).values()] for name in ("debug", "whole")]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0)
    assert found[0][0] == pytest.approx(0.693147, abs=1e-5), "the copy is the model as it begins"
    assert found[0][-1] < 0.6
    convert(tmp_path / "debug", tmp_path / "everything.safetensors", full=True)
    saved = read_manifest(tmp_path / "debug/checkpoints/step-6").tensors
    model = read_manifest(whole_run() / "checkpoints/step-6").tensors
    of_model = [name for name in saved if name.startswith("model.")]
    assert of_model == [name for name in model if name.startswith("model.")]


@pytest.mark.slow
def test_an_average_does_not_change_the_rewards_of_validation(
    pool, options, data, whole_run, tmp_path
):
    """Its pass counts by itself."""
    run = [*pair_arguments(options, data, whole_run(), tmp_path), "--validation.freq=1"]
    run.append("--training.steps=4")
    found = []
    for name, more in (("without", []), ("with", ["--ema.decay=0.9"])):
        assert pool.run(1, train_run, [*run, f"--run.name={name}", *more]) == [0]
        found.append(
            [
                (
                    row["step"],
                    row["validation/a/reward_accuracy"],
                    row["validation/a/reward_margin"],
                )
                for row in rows(tmp_path / name)
                if "validation/a/loss" in row
            ]
        )
    assert found[0] == found[1]
    with run_refused("dpo.beta was 0.5", "5"):
        pool.run(1, train_run, [*run, "--run.name=with", "--training.steps=5", "--dpo.beta=5"])


def test_data_and_settings_must_agree(pool, options, arguments, data, whole_run, tmp_path, capsys):
    run = pair_arguments(options, data, whole_run(), tmp_path)
    with run_refused("pairs of answers", "dpo.beta = 0"):
        pool.run(1, train_run, [*run, "--dpo.beta=0"])
    with run_refused("no pairs of answers", "dpo.beta = 0.1", "--pairs"):
        more = ["--lora.rank=4", "--data.document_mask", "--dpo.beta=0.1"]
        pool.run(1, train_run, [*arguments, f"--checkpoint.initial_load={whole_run()}", *more])
    assert main(["evaluate", str(whole_run()), f"--perplexity={data}"]) == 2
    assert "pairs of answers" in capsys.readouterr().err
