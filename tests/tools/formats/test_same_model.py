"""Weights of another model: every difference between a file and the config is in one error, in
every format.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fuzz_samples import LLAMA, Reader, header_of, weights, with_header
from messages import assert_mentions, refused, run_refused
from model_builder import SMALL, small_model
from runs import train_run
from safetensors.torch import load_file, save_file

from titanlite.checkpoint.manifest import CorruptCheckpoint
from titanlite.model.flavors import LlamaConfig, RopeScaling, parameter_shapes
from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli.main import main
from titanlite.tools.formats.convert import Mismatch, Options, convert
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.load_weights import load_model, read_weights
from titanlite.tools.formats.same_model import Stored, require_same_model, tensor_problems
from titanlite.tools.formats.selection import Selection

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FILE = dataclasses.replace(SMALL, rope_theta=1234.5, norm_eps=3e-3)
TIED = dataclasses.replace(SMALL, tied_embeddings=True)


def quiet(text: str) -> None:
    pass


def make_file(
    path: Path, config: LlamaConfig = FILE, more: dict[str, Any] | None = None, **known: Any
) -> Path:
    """A file of torch.save that describes its model."""
    weights = dict(small_model(config=config).state_dict()) | (more or {})
    torch.save({"model": weights, "model_config": json.loads(config.to_json()), **known}, path)
    return path


# Every format that is read, made from a file of torch.save; with its training state where it can
# hold it
STATED: dict[str, tuple[str, dict[str, Any]]] = {
    "step": ("titanlite", {}),
    "full step": ("titanlite", {"full": True}),
    "hf": ("hf", {}),
    "dcp": ("dcp", {}),
    "full dcp": ("dcp", {"full": True}),
    "safetensors": ("safetensors", {}),
    "one.safetensors": ("safetensors", {}),
    "full": ("safetensors", {"full": True}),
    "a.pt": ("torch", {}),
    "full.pt": ("torch", {"full": True}),
}
DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {  # the run's model -> what is said
    "theta": (
        {"rope_theta": 5e5},
        "model.rope_theta = 500000.0, and 1234.5 in {}; expected model.rope_theta = 1234.5",
    ),
    "eps": (
        {"norm_eps": 1e-5},
        "model.norm_eps = 1e-05, and 0.003 in {}; expected model.norm_eps = 0.003",
    ),
    "scaling": (
        {"rope_scaling": RopeScaling(8.0)},
        "[model] rope_scaling = llama3, rope_factor = 8, rope_original_context = 8192, and "
        "rope_scaling = none in {}; expected rope_scaling = none",
    ),
    "head width": ({"explicit_head_dim": 12}, "model.head_dim = 12, and 0 in {}"),
    "biases": (
        {"qkv_bias": True},
        "model.qkv_bias = true, and false in {}; expected model.qkv_bias = false",
    ),
    "window": (
        {"sliding_window": 8},
        "model.sliding_window = 8, and 0 in {}; expected model.sliding_window = 0",
    ),
    "norms of q and k": ({"qk_norm": True}, "model.qk_norm = true, and false in {}"),
    "dim": ({"dim": 64}, "model.dim = 64, and 32 in {}; expected model.dim = 32"),
    "layers": (
        {"num_layers": 2},
        "model.num_layers = 2, and 3 in {}; expected model.num_layers = 3",
    ),
    "heads": ({"num_heads": 8}, "model.num_heads = 8, and 4 in {}"),
    "key heads": ({"num_kv_heads": 1}, "model.num_kv_heads = 1, and 2 in {}"),
    "feed-forward": ({"ffn_dim": 64}, "model.ffn_dim = 64, and 48 in {}"),
    "vocabulary": ({"vocab_size": 103}, "model.vocab_size = 103, and 101 in {}"),
    "tied": (
        {"tied_embeddings": True},
        "model.embeddings = tied, and untied in {}; expected model.embeddings = untied",
    ),
}
SAID = [message for _, message in DIFFERENT.values()]
UNSTATED = ["raw.pt", "raw.safetensors", "raw dcp", "raw folder"]
NOT_IN_SHAPES = ("theta", "eps", "scaling", "window")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with `FILE` in every format."""
    folder = tmp_path_factory.mktemp("files")
    moments = {"optimizer.state.norm.weight.exp_avg": torch.ones(32)}
    source = make_file(folder / "source.pt", step=3, seq_len=16, training=moments)
    for name, (to, options) in STATED.items():
        convert(source, folder / name, Options(to, verify=False, **options), log=quiet)
    weights = small_model(config=FILE).state_dict()
    save_raw(folder, dict(weights))
    return folder


def save_raw(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, folder / "raw.pt")
    save_file(weights, folder / "raw.safetensors")
    dcp.save(weights, checkpoint_id=folder / "raw dcp", no_dist=True)
    (folder / "raw folder").mkdir()
    save_file(weights, folder / "raw folder/model.safetensors")


def read_each(paths: list[Path], models: list[LlamaConfig]) -> list[str]:
    """The error, or the warnings, when weights of each file are loaded into each model, in turn."""
    told: list[str] = []
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("titanlite").addHandler(handler)
    for path in paths:
        for model in models:
            state = {
                name: torch.full(shape, torch.nan)
                for name, shape in parameter_shapes(model).items()
            }
            said.clear()
            try:
                read_weights(path, state, model, b"")
                assert not any(bool(tensor.isnan().any()) for tensor in state.values())
                told.append("\n".join(said))
            except ConfigError as error:
                assert all(bool(tensor.isnan().all()) for tensor in state.values())
                told.append(f"ConfigError: {error}")
    logging.getLogger("titanlite").removeHandler(handler)
    return told


@pytest.mark.slow
def test_every_difference_is_in_one_error_in_every_format_that_describes_its_model(pool, files):
    other = dataclasses.replace(
        FILE, **{key: value for change, _ in DIFFERENT.values() for key, value in change.items()}
    )
    paths = [files / name for name in STATED]
    first, second = pool.run(2, read_each, paths, [FILE, other])
    assert first == second
    for path, same, error in zip(paths, first[::2], first[1::2], strict=True):
        assert same == "", path
        assert error.startswith("ConfigError: "), path
        assert_mentions(error, *(message.format(path) for message in SAID))
        assert error.count("\n") == len(SAID) - 1, path


@pytest.mark.parametrize(("change", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_one_difference_is_enough(change, message):
    tensors = {name: Stored(torch.float32, shape) for name, shape in parameter_shapes(FILE).items()}
    with pytest.raises(ConfigError) as caught:
        require_same_model(Path("x"), FILE, tensors, dataclasses.replace(FILE, **change))
    (problem,) = caught.value.problems
    assert_mentions(problem, message.format("x"))


@pytest.mark.slow
def test_where_a_file_does_not_describe_its_model_the_shapes_decide(pool, files):
    models = [dataclasses.replace(FILE, **change) for change, _ in DIFFERENT.values()]
    paths = [files / name for name in UNSTATED]
    (told,) = pool.run(1, read_each, paths, models)
    for i, path in enumerate(paths):
        for name, text in zip(
            DIFFERENT, told[i * len(models) : (i + 1) * len(models)], strict=True
        ):
            change, message = DIFFERENT[name]
            if name in NOT_IN_SHAPES:  # what a run cannot know, it says
                ((field, value),) = change.items()
                assert_mentions(
                    text, f"{path}: has no description of its model; could not be compared:"
                )
                assert_mentions(text, f"{field} = {value}", "num_heads = 4")
            elif name == "heads":  # that many heads need twice the rows
                assert_mentions(text, "ConfigError", "model.num_kv_heads = 2, and 4 in")
            elif name == "head width":  # it cannot be told from the number of heads
                assert_mentions(text, "'layers.0.attention.wq.weight' is (32, 32); the model's is")
            else:
                assert_mentions(text, "ConfigError", message.format(path))


def test_weights_that_are_not_finite_begin_no_run(tmp_path):
    weights = small_model(config=FILE).state_dict()
    weights["layers.1.ffn_norm.weight"][3] = torch.inf
    torch.save({"model": weights}, tmp_path / "a.pt")
    with refused("a.pt", "'layers.1.ffn_norm.weight' holds NaN or infinity"):
        read_weights(tmp_path / "a.pt", small_model(config=FILE).state_dict(), FILE, b"")


def test_an_output_layer_that_is_missing_is_named_as_in_the_file():
    tensors = {name: Stored(torch.float32, shape) for name, shape in parameter_shapes(FILE).items()}
    del tensors["output.weight"]
    (problem,) = tensor_problems(Path("x"), tensors, parameter_shapes(FILE))
    assert_mentions(problem, "x: has no 'output.weight' (lm_head.weight)", "are not tied")


def test_what_its_own_model_does_not_have_is_in_the_same_error(tmp_path):
    more = {"layers.0.attention.wq.bias": torch.ones(32)}
    full = open_full_state(make_file(tmp_path / "a.pt", more=more))
    with refused(
        "model.num_layers = 2, and 3 in", "'layers.0.attention.wq.bias' is not a parameter"
    ):
        require_same_model(
            full.path, full.about.model, full.tensors, dataclasses.replace(FILE, num_layers=2)
        )


def test_a_run_is_refused_on_every_rank(pool, arguments, tmp_path):
    """theta and eps of config.json; fewer layers than in the file; tied embeddings, which would
    lose its lm_head.
    """
    config = dataclasses.replace(FILE, num_layers=4, ffn_dim=64, vocab_size=4112)
    make_file(tmp_path / "a.pt", config)
    convert(tmp_path / "a.pt", tmp_path / "hf", Options("hf"), log=quiet)
    convert(tmp_path / "hf", tmp_path / "ours", Options("titanlite"), log=quiet)
    for source in ("hf", "ours"):
        with run_refused(
            "rope_theta = 500000.0, and 1234.5 in",
            "norm_eps = 1e-05, and 0.003 in",
            "model.num_layers = 2, and 4 in",
            "model.embeddings = tied, and untied in",
        ):
            pool.run(2, train_run, [*arguments, f"--checkpoint.initial_load={tmp_path / source}"])


@pytest.mark.slow
@pytest.mark.parametrize("twice", [True, False], ids=["both names", "one name"])
def test_a_tied_file_is_read_into_a_tied_model(pool, tmp_path, twice):
    weights = dict(small_model(config=TIED).state_dict())
    if twice:
        weights["output.weight"] = weights["tok_embeddings.weight"].clone()
    save_raw(tmp_path, weights)
    (told,) = pool.run(1, read_each, [tmp_path / name for name in UNSTATED], [TIED])
    assert all("could not be compared: num_heads = 4, rope_theta" in text for text in told)
    weights["output.weight"] = weights["tok_embeddings.weight"] + 1
    torch.save(weights, tmp_path / "raw.pt")
    (told,) = pool.run(1, read_each, [tmp_path / "raw.pt"], [TIED])
    assert "model.embeddings = tied, and untied in" in told[0]


@pytest.mark.parametrize("equal", [True, False])
def test_the_head_of_a_tied_hugging_face_folder_must_be_its_embedding(tmp_path, equal):
    convert(make_file(tmp_path / "a.pt", TIED), tmp_path / "hf", Options("hf"), log=quiet)
    weights = load_file(tmp_path / "hf/model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone() + (not equal)
    save_file(weights, tmp_path / "hf/model.safetensors")
    full = open_full_state(tmp_path / "hf")
    if equal:
        require_same_model(full.path, full.about.model, full.tensors, TIED)
    else:
        with refused("'lm_head.weight'", "tied", "not a copy of its embedding"):
            require_same_model(full.path, full.about.model, full.tensors, TIED)
        with refused("'lm_head.weight'"):
            convert(tmp_path / "hf", tmp_path / "b", Options("torch"), log=quiet)


def test_tables_of_rope_are_no_parameters(pool, tmp_path):
    """As older versions of torchtitan save them; they are computed from the model's fields."""
    weights = dict(small_model(config=SMALL).state_dict())
    tables = {"freqs_cis": torch.ones(4, 4, dtype=torch.complex64), "rope.freqs": torch.ones(4)}
    dcp.save({"model": weights | tables}, checkpoint_id=tmp_path / "a", no_dist=True)
    (told,) = pool.run(1, read_each, [tmp_path / "a"], [SMALL])
    assert "could not be compared" in told[0]
    shape = tmp_path / "model.json"
    shape.write_text(SMALL.to_json())
    torch.save({"model": weights | {"rope.freqs": tables["rope.freqs"]}}, tmp_path / "a.pt")
    for source in ("a", "a.pt"):
        convert(
            tmp_path / source, tmp_path / f"{source} hf", Options("hf", model=str(shape)), log=quiet
        )


@pytest.mark.slow
@pytest.mark.parametrize("command", ["convert", "generate", "evaluate"])
@pytest.mark.parametrize("source", ["hf", "step", "a.pt"])
def test_a_model_that_is_given_must_be_the_file_s(files, tmp_path, capsys, command, source):
    shape = tmp_path / "model.json"
    shape.write_text(dataclasses.replace(FILE, rope_theta=5e5, num_layers=2).to_json())
    more = {
        "convert": [str(tmp_path / "there"), "--to", "hf"],
        "generate": [],
        "evaluate": ["--perplexity", "x"],
    }
    assert main([command, str(files / source), *more[command], "--model", str(shape)]) == 2
    error = capsys.readouterr().err
    assert_mentions(
        error, "--model", "rope_theta = 500000.0, and 1234.5 in", "num_layers = 2, and 3 in", source
    )
    shape.write_text(FILE.to_json())
    assert open_full_state(files / source, Selection(model=str(shape))).model == FILE
    assert not (tmp_path / "there").exists()


def test_nothing_of_a_file_is_left_out_when_one_process_loads_it(files, tmp_path):
    shape = tmp_path / "model.json"
    shape.write_text(dataclasses.replace(FILE, num_layers=2).to_json())
    with refused(
        "'layers.2.attention_norm.weight' is not a parameter of this model", error=CorruptCheckpoint
    ):
        load_model(
            open_full_state(files / "raw.pt", Selection(model=str(shape))), torch.device("cpu"), 8
        )


def test_a_converted_description_that_differs_is_found(files, tmp_path, monkeypatch):
    """Equal bits and logits would not show it: both are of the source's description."""
    original = LlamaConfig.to_json
    monkeypatch.setattr(
        LlamaConfig, "to_json", lambda self: original(dataclasses.replace(self, norm_eps=1e-4))
    )
    with refused("norm_eps is 0.0001; expected 0.003", error=Mismatch):
        convert(files / "hf", tmp_path / "there", Options("torch"), log=quiet)


FOREIGN = {
    "nanoGPT": ["transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight", "lm_head.weight"],
    "LitGPT": ["lm_head.weight", "transformer.h.0.attn.qkv.weight"],
    "older LitGPT": ["transformer.h.0.attn.attn.weight"],
    "GPT-2": ["wte.weight", "h.0.attn.c_attn.weight", "h.0.mlp.c_fc.weight"],
    "Pythia": ["gpt_neox.layers.0.mlp.dense_h_to_4h.weight"],
    "Megatron": ["decoder.layers.0.self_attention.linear_qkv.weight"],
    "Qwen": ["model.layers.0.self_attn.q_proj.bias"],
    "Mixtral": ["model.layers.0.self_attn.q_proj.weight"],
    "PEFT": ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"],
    "torchtune": ["layers.0.sa_norm.scale"],
    "torchtune's adapters": ["layers.0.attn.q_proj.lora_a.weight"],
    "torchtune's adapters of an MLP": ["layers.0.mlp.w1.lora_a.weight"],
}


@pytest.mark.parametrize("names", FOREIGN.values(), ids=FOREIGN)
def test_names_of_other_software_are_refused(tmp_path, names):
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "x.pt")
    with refused("x.pt: has a tensor named", "layers.0.attention.wq.weight", "config.json"):
        open_full_state(tmp_path / "x.pt")
    with refused(f"give the file, as {tmp_path / 'x.pt'}", "save_pretrained"):
        open_full_state(tmp_path)


def spoiled(*names: str) -> Callable[[dict[str, Stored]], dict[str, Stored]]:
    return lambda tensors: tensors | dict.fromkeys(names, Stored(torch.float32, (4,)))


REASONS: dict[str, tuple[Callable[[dict[str, Stored]], dict[str, Stored]], str]] = {
    "biases": (
        spoiled("layers.0.attention.wq.bias"),
        "not a parameter of this model",
    ),
    "experts": (
        spoiled("layers.0.moe.experts.w1"),
        "not a parameter of this model",
    ),
    "norms of queries": (
        spoiled("layers.0.attention.q_norm.weight"),
        "not a parameter of this model",
    ),
    "no Llama": (
        lambda tensors: spoiled("encoder.a", "encoder.b")({}),
        "none of its 2 tensors ('encoder.a', 'encoder",
    ),
    "a layer in between": (
        lambda tensors: {name: tensor for name, tensor in tensors.items() if ".1." not in name},
        "model.num_layers = 3, and 2 in x",
    ),
}


@pytest.mark.parametrize(("change", "message"), REASONS.values(), ids=REASONS)
@pytest.mark.parametrize("stated", [SMALL, None], ids=["stated", "unstated"])
def test_what_a_llama_does_not_have_is_called_so(change, message, stated):
    tensors = change(
        {name: Stored(torch.float32, shape) for name, shape in parameter_shapes(SMALL).items()}
    )
    if stated and "num_layers" in message:
        message = "has no 'layers.1.attention_norm.weight'"
    elif not stated and "layers.0.attention.wq.bias" in tensors:  # the names tell the model
        message = "model.qkv_bias = false, and true in x"
    elif not stated and "layers.0.attention.q_norm.weight" in tensors:
        message = "model.qk_norm = false, and true in x"
    with refused(message):
        require_same_model(Path("x"), stated, tensors, SMALL)


@pytest.mark.parametrize("name", ["feed_forward.w1", "attention.wk"])
@pytest.mark.parametrize("shape", [(), (4,), (2, 2, 2)])
@pytest.mark.parametrize("dim", [SMALL.dim, 2 * SMALL.dim])
def test_what_is_no_matrix_tells_no_sizes(name, shape, dim):
    model = dataclasses.replace(SMALL, dim=dim)
    tensors = {key: Stored(torch.float32, size) for key, size in parameter_shapes(SMALL).items()}
    tensors |= {
        f"layers.{layer}.{name}.weight": Stored(torch.float32, shape)
        for layer in range(SMALL.num_layers)
    }
    with refused(f"'layers.0.{name}.weight' is {shape}"):
        require_same_model(Path("x"), None, tensors, model)


def test_the_number_of_problems_that_are_not_listed_is_right():
    shapes = parameter_shapes(SMALL)
    absent = list(shapes)[-20:]
    tensors = {
        name: Stored(torch.float32, shape) for name, shape in shapes.items() if name not in absent
    }
    tensors["unknown.weight"] = Stored(torch.float32, (4,))
    problems = tensor_problems(Path("x"), tensors, shapes)
    assert len(problems) == 9
    assert problems[-1] == "x: and 13 more like these"


FIELDS: dict[str, Any] = {
    "sliding_window": 4096,
    "partial_rotary_factor": 0.5,
    "quantization_config": {"quant_method": "fp8"},
    "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}},
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "gelu",
    "model_type": "qwen2_moe",
}


@pytest.mark.parametrize("field", FIELDS)
def test_what_a_config_json_asks_for_and_titanlite_has_not_is_refused(files, tmp_path, field):
    (tmp_path / "model.safetensors").symlink_to(files / "hf/model.safetensors")
    config = json.loads((files / "hf/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: FIELDS[field]}))
    with refused("config.json", field, "allowed: "):
        open_full_state(tmp_path)


def test_the_description_of_another_trainer_is_not_called_damage(tmp_path):
    torch.save({"model": {"a": torch.ones(1)}, "model_config": {"n_layer": 12}}, tmp_path / "x.pt")
    with refused("x.pt", "'model_config'", "not titanlite's description of a model"):
        open_full_state(tmp_path / "x.pt")


def header_alone(folder: Path) -> list[bytes]:
    """The header of a file that says nothing of its model: names and shapes are compared."""
    save_file(weights(), folder / "x.safetensors")
    return [header_of(folder / "x.safetensors")]


def compare_header(folder: Path, data: bytes) -> None:
    (folder / "x.safetensors").write_bytes(with_header(data))
    full = open_full_state(folder / "x.safetensors")
    require_same_model(full.path, full.about.model, full.tensors, LLAMA)


FUZZED = {"shapes without a description": Reader("text", header_alone, compare_header)}
