"""Conversion at its limits: what it refuses, warns of and stops at, and sources that are not as we
write them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fuzz_samples import SHAPE, Reader, header_of, of_format, read_file, torch_file, with_header
from messages import assert_mentions
from model_builder import SMALL, small_model
from torch import Tensor

from titanlite.checkpoint import retention
from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.model.flavors import LlamaConfig, parameter_shapes
from titanlite.runtime.errors import ConfigError
from titanlite.tokenizer.tokenizer import BUNDLED, Tokenizer
from titanlite.tools.cli.main import main
from titanlite.tools.formats import convert as module
from titanlite.tools.formats import full_state, targets
from titanlite.tools.formats.convert import Options, convert, load_full_state
from titanlite.tools.formats.detect_format import open_full_state, read_model
from titanlite.tools.formats.full_state import ORIGIN
from titanlite.tools.formats.huggingface_tokenizer import read_tokenizer, to_files
from titanlite.tools.formats.safetensors_files import INDEX, LARGEST_HEADER
from titanlite.tools.formats.torch_output import torch_errors

TIED = dataclasses.replace(SMALL, tied_embeddings=True)


def quiet(text: str) -> None:
    pass


def make_file(
    path: Path, config: LlamaConfig = SMALL, more: dict[str, Tensor] | None = None, **known
) -> Path:
    weights = dict(small_model(config=config).state_dict()) | (more or {})
    torch.save({"model": weights, "model_config": json.loads(config.to_json()), **known}, path)
    return path


def make_run(folder: Path, *numbers: int) -> Path:
    """A run's folder with these steps."""
    (folder / "run/checkpoints").mkdir(parents=True)
    for number in numbers:
        source = make_file(folder / "a.pt", step=number)
        convert(source, folder / f"run/checkpoints/step-{number}", Options("titanlite"), log=quiet)
    return folder / "run"


def test_damage_is_found_before_anything_is_written(tmp_path, monkeypatch):
    run = make_run(tmp_path, 7)
    shard = run / "checkpoints/step-7/model-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    written: list[Path] = []
    monkeypatch.setattr(targets.TARGETS["hf"], "write", lambda path, export: written.append(path))
    with pytest.raises(CorruptCheckpoint, match="its SHA-256"):
        convert(run, tmp_path / "there", Options("hf"), log=quiet)
    assert not written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "run"]


def test_a_step_that_is_deleted_meanwhile_is_not_called_damaged(tmp_path, monkeypatch):
    run = make_run(tmp_path, 7, 8)
    original = targets.TARGETS["hf"].write

    def late(*arguments):
        retention.delete_step(run / "checkpoints", 8)
        original(*arguments)

    monkeypatch.setattr(targets.TARGETS["hf"], "write", late)
    with pytest.raises(
        ConfigError, match=r"step-8: was deleted while it was read; .*checkpoint\.keep"
    ) as caught:
        convert(run, tmp_path / "there", Options("hf"), log=quiet)
    assert not isinstance(caught.value, CorruptCheckpoint)


def test_step_0_can_be_asked_for_and_is_warned_of(tmp_path, caplog):
    run = make_run(tmp_path, 0, 5)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "titanlite"):
        assert convert(run, tmp_path / "newest", Options("torch"), log=quiet).about.step == 5
        assert not caplog.records
        assert convert(run, tmp_path / "first.pt", Options(step=0), log=quiet).about.step == 0
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == ["step 0"]
    assert main(["convert", str(run), str(tmp_path / "also.pt"), "--step", "0"]) == 0
    assert load_full_state(tmp_path / "also.pt").about.step == 0
    with pytest.raises(ConfigError, match=r"--step 0: .* is not a run; leave --step out"):
        load_full_state(tmp_path / "also.pt", step=0)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch", "titanlite"])
def test_length_and_step_go_along_or_are_not_made_up(tmp_path, caplog, to):
    source = make_file(tmp_path / "a.pt", step=7, seq_len=96)
    target = tmp_path / f"b{'.pt' if to == 'torch' else ''}"
    convert(source, target, Options(to), log=quiet)
    convert(target, tmp_path / "c.safetensors", log=quiet)
    about = load_full_state(tmp_path / "c.safetensors").about
    assert (about.step, about.seq_len) == (7, 96)
    convert(tmp_path / "c.safetensors", tmp_path / "hf", Options("hf"), log=quiet)
    assert json.loads((tmp_path / "hf/config.json").read_text())["max_position_embeddings"] == 96
    assert "the length it was trained on" not in caplog.text
    convert(make_file(tmp_path / "d.pt"), tmp_path / "e", Options("titanlite"), log=quiet)
    assert load_full_state(tmp_path / "e").about.seq_len == 0
    with caplog.at_level(logging.WARNING, "titanlite"):
        convert(tmp_path / "e", tmp_path / "f", Options("hf"), log=quiet)
    assert "the length it was trained on is not known; wrote 8192" in caplog.text


def test_what_was_not_compared_is_not_called_so(tmp_path, monkeypatch):
    told: list[str] = []
    weights = {"norm.weight": torch.full((32,), float("nan"))}
    source = make_file(tmp_path / "a.pt", more=weights)
    convert(source, tmp_path / "b", Options("hf", allow_nonfinite=True), log=told.append)
    assert told[-1] == "verified: 30 tensors bit by bit; its logits are not finite"

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "compare_tensors", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(make_file(tmp_path / "c.pt"), tmp_path / "d", Options("hf"), log=told.append)
    assert (
        told[-1]
        == f"interrupted: {tmp_path / 'd'} is complete, but the comparison with its source did "
        "not finish"
    )


def test_a_tied_models_embedding_may_stand_there_twice(tmp_path):
    embedding = small_model(config=TIED).state_dict()["tok_embeddings.weight"]
    convert(
        make_file(tmp_path / "a.pt", TIED, {"output.weight": embedding}),
        tmp_path / "a",
        Options("hf"),
        log=quiet,
    )
    assert "output.weight" not in load_full_state(tmp_path / "a")
    other = make_file(tmp_path / "b.pt", TIED, {"output.weight": embedding + 1})
    with pytest.raises(ConfigError, match=r"'output\.weight' is not a parameter"):
        convert(other, tmp_path / "b", Options("hf"), log=quiet)


def test_a_tokenizer_has_no_more_ids_than_the_model(tmp_path):
    ranks = torch.frombuffer(bytearray(BUNDLED.read_bytes()), dtype=torch.uint8)
    source = make_file(tmp_path / "a.pt", tokenizer=ranks)
    with pytest.raises(
        ConfigError, match=f"tokenizer has {Tokenizer().size} ids, and the model {SMALL.vocab_size}"
    ):
        convert(source, tmp_path / "b", Options("hf"), log=quiet)


def test_a_large_transposed_matrix_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(full_state, "BLOCK", 1 << 10)
    saved = {"turned": torch.randn(64, 48).T, "cut": torch.randn(48, 96)[:, 8:72]}
    torch.save(saved, tmp_path / "a.pt")
    full = load_full_state(tmp_path / "a.pt")
    assert len(list(full.tensors["turned"].blocks())) == 1
    assert len(list(full.tensors["cut"].blocks())) == 12
    for name, tensor in saved.items():
        assert torch.equal(torch.cat(list(full.tensors[name].blocks())), tensor)


def test_other_formats_can_be_compared_but_not_verified(tmp_path, capsys):
    run = make_run(tmp_path, 7)
    convert(run, tmp_path / "hf", Options("hf"), log=quiet)
    assert main(["checkpoint", "diff", str(run), str(tmp_path / "hf")]) == 0
    assert (
        f"{len(load_full_state(run))} of {len(load_full_state(run))} tensors are equal"
        in capsys.readouterr().out
    )
    assert main(["checkpoint", "verify", str(tmp_path / "hf")]) == 2
    assert_mentions(
        capsys.readouterr().err, str(tmp_path / "hf"), "format hf has no hashes", "expected a run's"
    )


class Unwritable:
    """A file whose writes fail."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def write(self, data: bytes) -> int:
        raise self.error


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), SystemExit(143), KeyboardInterrupt()], ids=repr
)
def test_the_cause_of_a_failed_write_is_raised(error):
    """torch.save reports each of them as RuntimeError("unexpected pos")."""
    with pytest.raises(type(error)) as caught, torch_errors():
        torch.save({"a": torch.ones(4096)}, Unwritable(error))
    assert caught.value is error


@pytest.mark.parametrize("target", ["b.pt", "b"], ids=["torch", "dcp"])
def test_a_disk_that_fills_up_while_torch_writes_is_one_error(tmp_path, capsys, target):
    """The tensors fit, and the output, which is larger by its envelopes, does not."""
    source = make_file(tmp_path / "a.pt")
    limit = load_full_state(source).nbytes() + 512
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        to = "torch" if target == "b.pt" else "dcp"
        assert main(["convert", str(source), str(tmp_path / target), "--to", to]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "File too large" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"]


MEASURED = """
import re, sys, threading
from pathlib import Path
from titanlite.tools.formats.convert import Options, convert
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before, peak, done = anonymous(), 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, anonymous())
watching = threading.Thread(target=watch, daemon=True)
watching.start()
convert(sys.argv[1], sys.argv[2], Options(sys.argv[3]), lambda text: None)
done.set()
watching.join()
print(peak - before)
"""


LARGE = LlamaConfig(
    dim=1024, num_layers=12, num_heads=16, num_kv_heads=4, ffn_dim=2816, vocab_size=4112
)
EXPERTS = LlamaConfig(
    dim=512,
    num_layers=12,
    num_heads=8,
    num_kv_heads=4,
    ffn_dim=512,
    vocab_size=4112,
    num_experts=16,
    experts_per_token=2,
    expert_ffn_dim=512,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "config"),
    # peft needs adapters
    [(to, LARGE) for to in targets.TARGETS if to != "peft"]
    + [(to, EXPERTS) for to in ("hf", "titanlite")],
    ids=lambda value: value if isinstance(value, str) else "mixture" * (value.num_experts > 0),
)
def test_memory_does_not_grow_with_the_model(tmp_path, to, config):
    """0.57 GB or more through 0.33 GB of anonymous memory or less, comparison included, both ways.

    Pages of mapped files do not count: the kernel drops them when memory is short.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = parameter_shapes(config)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()
    }
    torch.save({"model": weights, "model_config": json.loads(config.to_json())}, tmp_path / "a.pt")
    there = tmp_path / "there"
    ways = [(tmp_path / "a.pt", there, to), (there, tmp_path / "back.pt", "torch")]
    bound = 2 * max(weight.nbytes for weight in weights.values()) + 300e6
    assert sum(weight.nbytes for weight in weights.values()) > 1.5 * bound
    for source, target, form in ways:
        command = [sys.executable, "-c", MEASURED, str(source), str(target), form]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
        assert int(done.stdout) < bound, form


def test_a_token_without_end_is_not_split(tmp_path, caplog):
    """A token of 300,000 characters: finding its merges would take minutes."""
    main = json.loads(to_files(Tokenizer(), 100)["tokenizer.json"])
    main["model"]["vocab"]["x" * 300_000] = len(main["model"]["vocab"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(main))
    started = time.process_time()
    assert read_tokenizer(tmp_path) is None
    assert "a token of more than 1024 bytes" in caplog.text
    assert time.process_time() - started < 5


def test_headers_of_safetensors_files_are_bounded(tmp_path):
    """The library alone would make over 1 GB of objects of one with 100 MB."""
    path = tmp_path / "x.safetensors"
    for length, message in (
        (LARGEST_HEADER + 1, f"expected at most {LARGEST_HEADER}"),
        (LARGEST_HEADER, "header"),
    ):
        with path.open("wb") as file:
            file.write(length.to_bytes(8, "little") + b"{")
            file.truncate(8 + length)
        with pytest.raises(ConfigError, match=message):
            open_full_state(path)


def one_file(folder: Path) -> list[bytes]:
    """Converts the weights to one safetensors file; returns it."""
    (folder / "x.pt").write_bytes(torch_file())
    convert(folder / "x.pt", folder / "x.safetensors", Options(verify=False), log=lambda text: None)
    return [(folder / "x.safetensors").read_bytes()]


def one_header(folder: Path) -> list[bytes]:
    one_file(folder)
    return [header_of(folder / "x.safetensors")]


def shape_file(folder: Path) -> list[bytes]:
    one_file(folder)
    return [SHAPE]


def read_shape(folder: Path, data: bytes) -> None:
    """Reads the file of `--model`, for weights in another file."""
    (folder / "m.json").write_bytes(data)
    read_model(str(folder / "m.json"), open_full_state(folder / "x.safetensors"))


FUZZED = {
    "safetensors": Reader("bytes", one_file, functools.partial(read_file, "x.safetensors")),
    "safetensors header": Reader(
        "text",
        one_header,
        lambda folder, data: read_file("x.safetensors", folder, with_header(data)),
    ),
    "safetensors index": of_format("text", "safetensors", INDEX, shard_size=8000),
    "model.json": of_format("text", "safetensors", "model.json"),
    "--model": Reader("text", shape_file, read_shape),
    ORIGIN: of_format("text", "safetensors", ORIGIN),
    "config.json": of_format("text", "hf", "config.json"),
    "tokenizer.json": of_format("text", "hf", "tokenizer.json"),
}
