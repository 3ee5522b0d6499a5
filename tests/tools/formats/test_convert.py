"""Conversion: every format gives back every bit, other software reads it, and what cannot be done
is one error.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from checkpoints import write_step
from model_builder import EVEN, SMALL, assert_equal_bits, build_stages, full, small_model
from runs import train_run
from safetensors.torch import load_file

from titanlite.checkpoint.manifest import RunMetadata
from titanlite.checkpoint.state import ModelState, OptimizerState
from titanlite.config.schema import OptimizerConfig
from titanlite.data.rows import Batch
from titanlite.model.flavors import FLAVORS, LlamaConfig, RopeScaling
from titanlite.optim.optimizer import build_optimizer
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import BUNDLED, Tokenizer
from titanlite.tools.cli.main import main
from titanlite.tools.formats import (
    huggingface,
    huggingface_config,
    huggingface_tokenizer,
    output_path,
    targets,
)
from titanlite.tools.formats.convert import Mismatch, Options, convert, load_full_state
from titanlite.tools.formats.export import DTYPES, Export
from titanlite.tools.formats.full_state import half_split, interleave

# What the runs of `arguments` train: GQA, tied, with the bundled tokenizer
TIED = dataclasses.replace(FLAVORS["debug"], dim=32, num_layers=2, ffn_dim=64, vocab_size=4112)
GROUPED = dataclasses.replace(SMALL, tied_embeddings=True, num_kv_heads=1)
SCALED = dataclasses.replace(
    SMALL, vocab_size=103, rope_scaling=RopeScaling(8.0, original_context=64), norm_eps=1e-6
)
MODELS = {"debug": TIED, "grouped": GROUPED, "scaled": SCALED}
FORMATS = ["titanlite", "dcp", "safetensors", "torch", "hf"]


def quiet(text: str) -> None:
    pass


def slow_but(*quick: str) -> list:
    """All formats; those not named run in the slow campaign, since the round trip tests what
    differs between them.
    """
    return [to if to in quick else pytest.param(to, marks=pytest.mark.slow) for to in FORMATS]


def make_step(
    folder: Path, config: LlamaConfig, parallel: dict | None = None
) -> dict[str, torch.Tensor]:
    """A committed step of a model in some layout, with moments; returns its weights."""
    stages = build_stages(parallel or {}, 0, config)
    optimizer = build_optimizer(stages.model_parts, OptimizerConfig())
    tokens = torch.randint(config.vocab_size, (2, 17), generator=torch.Generator().manual_seed(3))
    stages.forward_backward(Batch(tokens[:, :-1], tokens[:, 1:]), torch.tensor(32))
    optimizer.step()
    optimizer.zero_grad()
    states = {
        "model": ModelState(stages.model_parts),
        "optimizer": OptimizerState(stages.model_parts, optimizer),
    }
    files = {"model.json": config.to_json().encode()}
    files |= {"tokenizer.model": BUNDLED.read_bytes()} if config.vocab_size >= 4112 else {}
    facts = RunMetadata(
        parallel or {}, {"training": {"seq_len": 16}, "model": {"flavor": "debug"}}, ""
    )
    write_step(
        folder, 7, {name: state.state_dict() for name, state in states.items()}, files, facts
    )
    return {name: full(value).clone() for name, value in states["model"].state_dict().items()}


@pytest.fixture(scope="module")
def steps(pool, tmp_path_factory) -> dict[str, Path]:
    """A run's folder of each model."""
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, config in MODELS.items():
        pool.run(1, make_step, folders[name] / "checkpoints", config)
    return folders


def suffix(to: str) -> str:
    return {"torch": ".pt"}.get(to, "")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("to", FORMATS)
def test_there_and_back_bit_by_bit(steps, tmp_path, name, to):
    there = convert(steps[name], tmp_path / f"there{suffix(to)}", Options(to), log=quiet)
    assert there.about.format == to
    assert there.model == MODELS[name]
    back = convert(there.path, tmp_path / "step-7", Options("titanlite"), log=quiet)
    original = load_full_state(steps[name])
    assert_equal_bits(original, there)
    assert_equal_bits(original, back)
    assert back.model == original.model
    assert back.about.tokenizer == original.about.tokenizer
    assert set(os.listdir(tmp_path)) == {there.path.name, "step-7"}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"tp": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}], ids=str)
def test_shards_of_any_layout_become_whole(pool, tmp_path, parallel):
    saved: dict[str, torch.Tensor] = {}
    for part in pool.run(4, make_step, tmp_path / "run/checkpoints", EVEN, parallel):
        saved |= part
    for to in FORMATS:
        found = convert(tmp_path / "run", tmp_path / f"{to}{suffix(to)}", Options(to), log=quiet)
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], saved[name]) for name in saved), to


@pytest.mark.parametrize(
    "to", [target.name for target in targets.TARGETS.values() if target.holds_training]
)
def test_full_state_keeps_the_optimizer(steps, tmp_path, to):
    original = load_full_state(steps["grouped"])
    there = convert(
        steps["grouped"],
        tmp_path / f"there{suffix(to)}",
        Options(to, full=True, dtype="bf16"),
        log=quiet,
    )
    back = load_full_state(
        convert(there.path, tmp_path / "back", Options("titanlite", full=True), log=quiet).path
    )
    assert_equal_bits(original, back, torch.bfloat16)
    assert set(back.others) == set(original.others)
    assert "optimizer.state.norm.weight.exp_avg_sq" in back.others
    for name, tensor in original.others.items():
        assert torch.equal(tensor.read(), back.others[name].read()), name
        assert tensor.dtype == back.others[name].dtype


def test_a_torch_file_is_a_plain_one(steps, tmp_path):
    convert(steps["debug"], tmp_path / "model.pt", log=quiet)
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    model = small_model(config=TIED, seed=1)
    model.load_state_dict(loaded["model"])
    assert_equal_bits(load_full_state(steps["debug"]), model.state_dict())
    assert loaded["model_config"]["num_kv_heads"] == 2
    assert (loaded["step"], loaded["seq_len"]) == (7, 16)


def test_views_and_transposes_are_read(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    saved = {
        "turned": base.T,
        "rows": base[1:3],
        "columns": base[:, 2:4],
        "one": base[2, 3],
        "none": base[:0],
    }
    torch.save(saved, tmp_path / "views.pt")
    full = load_full_state(tmp_path / "views.pt")
    assert all(torch.equal(full[name], tensor) for name, tensor in saved.items())
    assert torch.equal(full.tensors["turned"].read(2, 5), base.T[2:5])


def test_shards_have_an_index(steps, tmp_path):
    original = load_full_state(steps["debug"])
    for to in ("hf", "safetensors"):
        found = convert(steps["debug"], tmp_path / to, Options(to, shard_size=30_000), log=quiet)
        assert_equal_bits(original, found)
        files = sorted((tmp_path / to).glob("*.safetensors"))
        assert len(files) > 3
        assert [len(load_file(path)) > 0 for path in files] == [True] * len(files)
        index = json.loads((tmp_path / to / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in original.tensors.values())
        assert set(index["weight_map"].values()) == {path.name for path in files}
        assert all(path.stat().st_size < 40_000 or len(load_file(path)) == 1 for path in files)


def test_rows_of_heads_turn_and_turn_back():
    rows = torch.arange(24.0)[:, None]
    assert half_split(rows, 6)[:6, 0].tolist() == [0, 2, 4, 1, 3, 5]
    assert torch.equal(interleave(half_split(rows, 6), 6), rows)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["hf", "torch"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_dtypes(steps, tmp_path, to, dtype):
    found = convert(
        steps["scaled"], tmp_path / f"there{suffix(to)}", Options(to, dtype=dtype), log=quiet
    )
    assert_equal_bits(load_full_state(steps["scaled"]), found, DTYPES[dtype])


def test_one_file_of_safetensors_knows_its_model(steps, tmp_path):
    convert(steps["scaled"], tmp_path / "one.safetensors", log=quiet)
    assert load_full_state(tmp_path / "one.safetensors").model == SCALED
    assert_equal_bits(load_full_state(steps["scaled"]), load_file(tmp_path / "one.safetensors"))


SPOILED = {
    "the rows of wq": lambda name, rows: (
        rows.flip(0) if name.endswith("0.attention.wq.weight") else rows
    ),
    "one bit": lambda name, rows: (
        rows + (rows == rows.max()) * 1e-6 if name == "norm.weight" else rows
    ),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_wrong_result_is_found_and_kept(steps, tmp_path, monkeypatch, spoil):
    original = Export.__init__

    def spoiled(self, *arguments):
        original(self, *arguments)
        for name, outgoing in list(self.model.items()):
            blocks = outgoing.blocks
            self.model[name] = outgoing._replace(
                blocks=lambda b=blocks, n=name: (spoil(n, rows) for rows in b()),
                stored=None,  # so that the blocks are written
            )

    monkeypatch.setattr(Export, "__init__", spoiled)
    with pytest.raises(Mismatch, match="differs in rows"):
        convert(steps["grouped"], tmp_path / "there.pt", log=quiet)
    assert (tmp_path / "there.pt").exists()


@pytest.mark.parametrize("mistake", ["no turn", "other theta"])
def test_a_wrong_meaning_is_found_by_its_answers(steps, tmp_path, monkeypatch, mistake):
    """What comparing bits cannot see, because reading makes the same mistake as writing."""
    source = load_full_state(steps["scaled"])
    if mistake == "no turn":
        monkeypatch.setattr(huggingface, "is_permuted", lambda name: False)
    else:
        written = huggingface_config.to_config
        read = huggingface.from_config

        def write_other(*arguments):
            fields = written(*arguments)
            theta = {"rope_theta": 2 * source.model.rope_theta}
            return {**fields, **theta, "rope_parameters": {**fields["rope_parameters"], **theta}}

        def read_other(*arguments):
            return dataclasses.replace(read(*arguments), rope_theta=source.model.rope_theta)

        monkeypatch.setattr(huggingface_config, "to_config", write_other)
        monkeypatch.setattr(huggingface, "from_config", read_other)
    found = r"logits are .* apart" if mistake == "no turn" else "by a second reading frequencies"
    with pytest.raises(Mismatch, match=found):
        convert(source.path, tmp_path / "there", Options("hf"), log=quiet)


def test_an_existing_target_is_refused(steps, tmp_path, monkeypatch, capsys):
    """Also a folder without files and a link; what looks like a leftover and is not stays."""
    monkeypatch.chdir(tmp_path)
    for folder in ("letters", "run/checkpoints", "here"):
        Path(folder).mkdir(parents=True)
        (Path(folder) / "mine").write_text("mine")
    for name in ("x.tmp-original.pt", "x.titanlite-tmp-original.pt", "y.titanlite-tmp-0123abcd.pt"):
        Path(name).write_text("mine")
    Path("empty").mkdir()
    Path("loop").symlink_to("loop")
    shutil.copytree(steps["grouped"], "source")
    before = sorted(Path().rglob("*"))
    for target, problem in {
        "letters": "letters: this folder exists already; remove it, or choose another name",
        "empty": "this folder exists already",
        "x.tmp-original.pt": "this file exists already",
        "loop": "this link exists already",
        "run": "this folder exists already",
        ".": "is, contains or lies in the source",
        "..": "is, contains or lies in the source",
        "source/checkpoints/step-7": "is, contains or lies in the source",
        "source": "is, contains or lies in the source",
        "loop/x": "",
    }.items():
        to = "torch" if target.endswith(".pt") else "hf"
        assert main(["convert", "source", target, "--to", to]) == 2, target
        told = capsys.readouterr().err
        assert problem in told
        assert "Traceback" not in told
    assert sorted(Path().rglob("*")) == before
    assert main(["convert", "source", "x.pt"]) == 0
    assert {str(path) for path in Path().iterdir()} == {
        str(path) for path in before if len(path.parts) == 1
    } | {"x.pt"}


def add_file(target: Path) -> None:
    target.mkdir(exist_ok=True)
    (target / "mine").write_text("mine")


def add_folder(target: Path) -> None:
    target.mkdir()


@pytest.mark.parametrize("to", ["hf", "torch"])
@pytest.mark.parametrize(
    "appear",
    [
        add_file,
        add_folder,
        lambda target: target.write_text("mine"),
        lambda target: target.symlink_to("elsewhere"),
    ],
)
def test_what_appears_while_the_output_is_written_is_kept(steps, tmp_path, monkeypatch, to, appear):
    target, write = tmp_path / "there", targets.TARGETS[to].write

    def write_slowly(path, export):
        write(path, export)
        appear(target)

    monkeypatch.setattr(targets.TARGETS[to], "write", write_slowly)
    with pytest.raises(ConfigError, match="there: appeared while it was written"):
        convert(steps["grouped"], target, Options(to), log=quiet)
    assert os.listdir(tmp_path) == ["there"]
    assert not target.is_file() or target.read_text() == "mine"
    assert not target.is_dir() or os.listdir(target) == (["mine"] if appear is add_file else [])


def test_a_file_system_without_links_gets_a_file_too(steps, tmp_path, monkeypatch):
    def link(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    convert(steps["scaled"], tmp_path / "there.pt", log=quiet)
    assert os.listdir(tmp_path) == ["there.pt"]


def test_two_conversions_to_one_target_do_not_meet(steps, tmp_path):
    target = tmp_path / "there"
    with (
        output_path.lock_target(target, tmp_path),
        pytest.raises(ConfigError, match="there: another conversion"),
    ):
        convert(steps["grouped"], target, Options("hf"), log=quiet)
    outcomes: list[str] = []

    def convert_it(name: str, target: Path) -> None:
        try:
            convert(steps[name], target, Options("hf"), log=quiet)
            outcomes.append("done")
        except ConfigError as error:
            outcomes.append(str(error).partition(": ")[2].partition(" is")[0])

    for i in range(5):
        threads = [
            threading.Thread(target=convert_it, args=(name, tmp_path / f"there{i}"))
            for name in ("grouped", "scaled", "debug")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    busy, taken = (
        "another conversion",
        "this folder exists already; remove it, or choose another name",
    )
    assert set(outcomes) <= {"done", busy, taken}
    assert outcomes.count("done") == 5
    assert sorted(os.listdir(tmp_path)) == [f"there{i}" for i in range(5)]
    for i in range(5):
        assert load_full_state(tmp_path / f"there{i}").model in MODELS.values()


@pytest.mark.slow
def test_a_shape_that_is_given_is_kept(steps, tmp_path):
    """Where the source has none; tests/tools/formats/test_same_model.py: what describes its model
    is not overridden.
    """
    (tmp_path / "model.json").write_text(dataclasses.replace(GROUPED, rope_theta=12345.0).to_json())
    torch.save(dict(load_full_state(steps["grouped"])), tmp_path / "source.pt")
    for to in FORMATS:
        target = tmp_path / f"{to}{suffix(to)}"
        convert(
            tmp_path / "source.pt",
            target,
            Options(to, model=str(tmp_path / "model.json")),
            log=quiet,
        )
        assert load_full_state(target).model.rope_theta == 12345.0, to


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_unless_it_is_allowed(tmp_path, value):
    weights = dict(small_model(config=SMALL).state_dict())
    weights["norm.weight"][3] = value
    torch.save({"model": weights, "model_config": json.loads(SMALL.to_json())}, tmp_path / "a.pt")
    with pytest.raises(
        ConfigError,
        match=r"'norm\.weight': NaN or infinity; convert it anyway with --allow-nonfinite",
    ):
        convert(tmp_path / "a.pt", tmp_path / "b", Options("hf"), log=quiet)
    assert os.listdir(tmp_path) == ["a.pt"]
    allowed = Options("titanlite", allow_nonfinite=True, verify=False)
    convert(tmp_path / "a.pt", tmp_path / "b", allowed, log=quiet)
    with pytest.raises(ConfigError, match="holds NaN or infinity"):
        convert(tmp_path / "b", tmp_path / "c", Options("hf"), log=quiet)


def test_what_is_too_large_for_a_dtype_is_not_finite(tmp_path):
    weights = dict(small_model(config=SMALL).state_dict())
    weights["layers.0.attention.wo.weight"][3, 4] = 1e5
    torch.save({"model": weights, "model_config": json.loads(SMALL.to_json())}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=r"wo\.weight': NaN or infinity as torch\.float16"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", Options(dtype="fp16"), log=quiet)
    assert os.listdir(tmp_path) == ["a.pt"]
    convert(tmp_path / "a.pt", tmp_path / "b.pt", Options(dtype="bf16"), log=quiet)


def test_a_full_disk_is_seen_before(steps, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(ConfigError, match=r"1 MB free, and 67 MB needed"):
        convert(steps["grouped"], tmp_path / "there", Options("hf"), log=quiet)
    assert not list(tmp_path.iterdir())


SLOW_WRITE = """
import sys, time
from titanlite.tools.formats import export
original = export.is_finite
def slow(block):
    print("writing", flush=True)
    time.sleep(0.5)
    return original(block)
export.is_finite = slow
from titanlite.tools.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGTERM)),
        signal.SIGKILL,
    ],
)
def test_an_interrupted_conversion_leaves_nothing_and_can_be_repeated(steps, tmp_path, number):
    arguments = ["convert", str(steps["grouped"]), str(tmp_path / "there"), "--to", "hf"]
    command = [sys.executable, "-c", SLOW_WRITE, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    assert "Traceback" not in told
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    left = os.listdir(tmp_path)
    names = {name.split("-")[0] for name in left}
    assert names == (set() if number != signal.SIGKILL else {"there.titanlite", ".there.titanlite"})
    assert main(arguments) == 0
    assert os.listdir(tmp_path) == ["there"]


def spoil_file(path: Path, change) -> None:
    content = bytearray(path.read_bytes())
    path.write_bytes(bytes(change(content)))


def flip(content: bytearray, at: int) -> bytearray:
    content[at] ^= 4
    return content


def truncated(name: str):
    return lambda folder: spoil_file(folder / name, lambda content: content[: len(content) // 2])


def rewritten(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def edited(name: str, change):
    def edit(folder: Path) -> None:
        fields = json.loads((folder / name).read_text())
        change(fields)
        (folder / name).write_text(json.dumps(fields))

    return edit


DAMAGED = {  # of a source in that format, what has happened to it
    "titanlite: a shard cut": ("titanlite", truncated("model-00000.safetensors")),
    "titanlite: a shard gone": (
        "titanlite",
        lambda folder: (folder / "model-00000.safetensors").unlink(),
    ),
    "titanlite: a bit": (
        "titanlite",
        lambda f: spoil_file(f / "model-00000.safetensors", lambda c: flip(c, -9)),
    ),
    "titanlite: the manifest": (
        "titanlite",
        lambda f: spoil_file(f / "manifest.json", lambda c: flip(c, 99)),
    ),
    "titanlite: the shape": (
        "titanlite",
        lambda f: spoil_file(f / "model.json", lambda c: flip(c, 12)),
    ),
    "dcp: no index": ("dcp", lambda folder: (folder / ".metadata").unlink()),
    "dcp: index cut": ("dcp", truncated(".metadata")),
    "dcp: data cut": ("dcp", truncated("__0_0.distcp")),
    "dcp: a bit": ("dcp", lambda f: spoil_file(f / "__0_0.distcp", lambda c: flip(c, len(c) // 2))),
    "safetensors: cut": ("safetensors", truncated("model.safetensors")),
    "safetensors: header": (
        "safetensors",
        rewritten("model.safetensors", struct.pack("<Q", 1 << 40) + b"{}"),
    ),
    "safetensors: shape": ("safetensors", rewritten("model.json", b"{}")),
    "hf: cut": ("hf", truncated("model.safetensors")),
    "hf: no weights": ("hf", lambda folder: (folder / "model.safetensors").unlink()),
    "hf: config cut": ("hf", truncated("config.json")),
    "hf: another model": (
        "hf",
        edited("config.json", lambda fields: fields.update(model_type="gpt2")),
    ),
    "hf: with biases": (
        "hf",
        edited("config.json", lambda fields: fields.update(attention_bias=True)),
    ),
    "hf: other RoPE": (
        "hf",
        edited(
            "config.json",
            lambda f: f.update(rope_scaling={"rope_type": "yarn"}, rope_parameters=None),
        ),
    ),
    "hf: other sizes": ("hf", edited("config.json", lambda fields: fields.update(hidden_size=48))),
    "torch: cut": ("torch", truncated("")),
    "torch: code": (
        "torch",
        lambda file: torch.save({"a": torch.ones(3), "b": Evil()}, file),
    ),
}


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.mark.parametrize(("to", "damage"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_source_is_one_error(steps, tmp_path, monkeypatch, capsys, to, damage):
    monkeypatch.chdir(tmp_path)
    convert(steps["scaled"], tmp_path / "source", Options(to), log=quiet)
    damage(tmp_path / "source")
    assert main(["convert", "source", "target", "--to", "safetensors"]) in (1, 2)
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if line.startswith("error: ")]
    assert "source" in "".join(told)
    assert "Traceback" not in "".join(told)
    assert not (tmp_path / "executed").exists()
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("to", slow_but("dcp"))  # test_adopt begins with a folder
def test_training_starts_from_any_format_in_any_layout(pool, arguments, steps, tmp_path, to):
    convert(steps["debug"], tmp_path / f"there{suffix(to)}", Options(to), log=quiet)
    shape = ["--parallel.tp=2", "--training.steps=1", "--optimizer.lr=1e-12"]
    initial = f"--checkpoint.initial_load={tmp_path / f'there{suffix(to)}'}"
    assert pool.run(2, train_run, [*arguments, *shape, initial]) == [0, 0]
    assert "starting with the weights of" in (tmp_path / "debug/log.txt").read_text()
    trained, original = load_full_state(tmp_path / "debug"), load_full_state(steps["debug"])
    for name in original:
        assert (trained[name] - original[name]).abs().max() < 1e-9, name


@pytest.mark.slow
def test_a_run_goes_on_from_a_full_copy(pool, arguments, tmp_path):
    """What is converted with all it holds trains on to the same weights, bit by bit."""
    run = [*arguments, "--checkpoint.freq=3"]
    assert pool.run(1, train_run, run) == [0]
    source, folder = tmp_path / "debug", tmp_path / "again/checkpoints"
    folder.mkdir(parents=True)
    convert(source, folder / "step-3", Options("titanlite", full=True, step=3), log=quiet)
    assert pool.run(1, train_run, [*run, "--run.name=again"]) == [0]
    assert "step-3 (saved by one process)" in (tmp_path / "again/log.txt").read_text()
    a, b = load_full_state(source), load_full_state(tmp_path / "again")
    assert (a.about.step, b.about.step) == (6, 6)
    assert_equal_bits(a, b)
    for name in a.others.keys() - {"progress.seconds"}:
        assert torch.equal(a.others[name].read(), b.others[name].read()), name


def test_heads_must_be_those_of_the_run(pool, arguments, steps, tmp_path):
    convert(steps["debug"], tmp_path / "there", Options("hf"), log=quiet)
    run = [*arguments, "--model.num_heads=8", f"--checkpoint.initial_load={tmp_path / 'there'}"]
    with pytest.raises(AssertionError, match=r"model\.num_heads = 8, and 4 in"):
        pool.run(1, train_run, run)


@pytest.mark.parametrize("to", [*slow_but("titanlite", "hf"), "run"])
def test_generate_runs_on_any_format(steps, tmp_path, capsys, to):
    path = steps["debug"] if to == "run" else tmp_path / f"there{suffix(to)}"
    if to != "run":
        convert(steps["debug"], path, Options(to), log=quiet)
    texts = []
    for source in (steps["debug"], path):
        options = ["--max-new-tokens", "8", "--temperature", "0"]
        assert main(["generate", str(source), *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("def")


def test_generate_says_what_is_missing(steps, capsys):
    assert main(["generate", str(steps["scaled"])]) == 2
    assert (
        "has no tokenizer that titanlite reads; name a tokenizer's file with --tokenizer"
        in capsys.readouterr().err
    )


def test_the_tokenizer_there_and_back(tmp_path):
    ranks = BUNDLED.read_bytes()
    files = huggingface_tokenizer.to_files(Tokenizer(), 100)
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|end_of_text|>"
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert huggingface_tokenizer.read_tokenizer(tmp_path) == ranks


def other_normalizer(main: dict) -> None:
    main["normalizer"] = {"type": "Lowercase"}


def other_begin(main: dict) -> None:
    main["added_tokens"][0]["content"] = "<s>"


def other_words(main: dict) -> None:
    main["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


def other_merges(main: dict) -> None:
    # a word that is a token stays whole all the same
    main["model"]["merges"] = main["model"]["merges"][::2]


@pytest.mark.parametrize("change", [other_normalizer, other_words, other_merges])
def test_a_tokenizer_that_tiktoken_encodes_otherwise_is_encoded_by_the_package(tmp_path, change):
    tokenizers = pytest.importorskip("tokenizers")
    main = json.loads(huggingface_tokenizer.to_files(Tokenizer(), 100)["tokenizer.json"])
    change(main)
    (tmp_path / "tokenizer.json").write_text(json.dumps(main))
    content = huggingface_tokenizer.read_tokenizer(tmp_path)
    assert content is not None
    text = "Some Words: def object(self) 123"
    theirs = tokenizers.Tokenizer.from_str(json.dumps(main))
    ours = Tokenizer("x", content)
    assert ours.whole_documents
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


def test_a_tokenizer_that_cannot_be_read_is_not_taken(tmp_path, caplog):
    main = json.loads(huggingface_tokenizer.to_files(Tokenizer(), 100)["tokenizer.json"])
    other_begin(main)
    (tmp_path / "tokenizer.json").write_text(json.dumps(main))
    assert huggingface_tokenizer.read_tokenizer(tmp_path) is None
    assert "not used" in caplog.text
