"""Low-rank adapters: what is trained, what a checkpoint holds, and PEFT's numbers."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from messages import refused, run_refused
from model_builder import EVEN, build_stages
from runs import curve, train_run, validation
from safetensors.torch import load_file, save_file
from transformers_models import TOKENS, make

from titanlite.checkpoint.manifest import read_manifest
from titanlite.config.load import load_config
from titanlite.config.schema import LoraConfig, OptimizerConfig, RecomputeConfig
from titanlite.data.order import dropout_keys
from titanlite.data.rows import Batch
from titanlite.distributed.dtensor import local_part
from titanlite.model.flavors import LlamaConfig, resolve_flavor
from titanlite.model.llama import Llama
from titanlite.optim.optimizer import build_optimizer
from titanlite.parallel.activation_checkpoint import apply_ac
from titanlite.parallel.compile import apply_compile
from titanlite.parallel.dropout import dropped
from titanlite.parallel.lora import LoRALinear, apply_dropout, apply_lora, is_adapter
from titanlite.parallel.parallelize import freeze
from titanlite.rules.check import check_layout
from titanlite.tools.formats.adapters import lora_of, merge
from titanlite.tools.formats.detect_format import open_adapter, open_full_state
from titanlite.tools.formats.huggingface import open_folder
from titanlite.tools.formats.load_weights import fill, load_model
from titanlite.tools.formats.peft import read_folder, to_config
from titanlite.tools.formats.selection import Selection

SMALL = LlamaConfig(dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=64)


def with_adapters(config: LoraConfig, keyed: bool = True) -> Llama:
    """With dropout also factors B that are not 0."""
    model = Llama(SMALL, 16)
    apply_lora(model, config)
    freeze(model, [], adapted=True)
    model.init_weights(1)
    if config.drops and keyed:
        apply_dropout(model)
    if config.drops:
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith("lora_b.weight"):
                generator = torch.Generator().manual_seed(number)
                torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def test_training_begins_with_the_model_as_it_was():
    plain = Llama(SMALL, 16)
    plain.init_weights(1)
    model = with_adapters(LoraConfig(rank=2, targets="wq w2"))
    tokens = torch.arange(16)[None]
    assert torch.equal(model(tokens), plain(tokens))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 3 * 2 * 2
    assert all(map(is_adapter, trained))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LoraConfig(rank=4, alpha=16), 4.0),
        (LoraConfig(rank=4, alpha=16, rslora=True), 8.0),
    ],
)
def test_an_adapter_adds_s_b_a_to_a_weight(config, expected):
    model = with_adapters(dataclasses.replace(config, layers="1"))
    layer = model.layers["1"].attention.wk
    torch.nn.init.normal_(layer.lora_b.weight)
    x = torch.randn(2, 5, 32)
    whole = layer.weight + expected * layer.lora_b.weight @ layer.lora_a.weight
    torch.testing.assert_close(layer(x), F.linear(x, whole))
    assert type(model.layers["0"].attention.wk) is torch.nn.Linear


DROPPING = LoraConfig(rank=4, alpha=8, targets="wq wk wv wo w1 w2 w3", dropout=0.25)
ROW = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(4))
KEYS = dropout_keys(7, [3, 8], 16)


def keep(name: str, features: int) -> torch.Tensor:
    """What the adapter of this layer multiplies its input (2, 16, features) by."""
    salt = torch.tensor(zlib.crc32(name.encode()))
    return (~dropped(KEYS, salt, 0, features, 0.25)).float() / 0.75


def loss_and_gradients(model: Llama, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(ROW, **inputs).logsumexp(-1).square().mean()
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    return found | {"loss": loss.detach()}


def masked_by_hand() -> dict[str, torch.Tensor]:
    """The same with hooks: each layer's output gets that of its adapter for the masked input."""
    model = with_adapters(dataclasses.replace(DROPPING, dropout=0.0))
    trained = dict(with_adapters(DROPPING).named_parameters())
    model.load_state_dict({name: p.detach() for name, p in trained.items()})
    for name, layer in model.named_modules():
        if isinstance(layer, LoRALinear):
            mask = keep(name, layer.weight.shape[1])

            def forward(x, layer=layer, mask=mask):
                low = F.linear(x * mask, layer.lora_a.weight)
                return F.linear(x, layer.weight) + 2 * F.linear(low, layer.lora_b.weight)

            layer.forward = forward
    return loss_and_gradients(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "mode"),
    [
        (False, "none"),
        (False, "full"),
        (False, "selective"),
        (True, "full"),
        pytest.param(True, "none", marks=pytest.mark.slow),
        pytest.param(True, "selective", marks=pytest.mark.slow),
    ],
)
def test_dropout_multiplies_the_inputs_of_adapters_by_a_mask(mode, compiled):
    """With recomputation the second forward has the mask of the first, also after another one;
    blocks are not compiled one by one.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = with_adapters(DROPPING, keyed=False)
    recompute = RecomputeConfig(mode=mode)
    if compiled and mode == "selective":
        apply_ac(model, recompute)
    if compiled:
        apply_compile(model, "aot_eager", RecomputeConfig())
    apply_dropout(model)
    if not (compiled and mode == "selective"):
        apply_ac(model, recompute)
    loss = model(ROW, dropout_keys=KEYS).logsumexp(-1).square().mean()
    if not compiled:
        model(ROW, dropout_keys=dropout_keys(7, [4, 9], 16))  # as another microbatch
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    expected = masked_by_hand()
    torch.testing.assert_close(loss.detach(), expected.pop("loss"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    if compiled:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs == 2, "the first block, whose input has no gradient, and the two others"


def test_an_evaluation_has_no_dropout():
    """Also after a training step, and with keys in the batch."""
    plain = with_adapters(dataclasses.replace(DROPPING, dropout=0.0))
    model = with_adapters(DROPPING)
    plain.load_state_dict(model.state_dict())
    trained = model(ROW, dropout_keys=KEYS)
    assert not torch.allclose(trained, plain(ROW), atol=1e-3)
    assert torch.equal(model(ROW), plain(ROW))


def test_the_mean_over_masks_is_the_adapter_without_dropout():
    model = with_adapters(DROPPING)
    layer = model.layers["1"].attention.wk
    x = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(1)).expand(2000, 16, 32)
    whole = layer.adapter(x[:1])
    layer.dropout_keys = dropout_keys(0, range(2000), 16)
    masked = layer.adapter(x)
    assert masked.std(0).min() > 0.01
    error = (masked.mean(0) - whole[0]).abs() / (masked.std(0) / 2000**0.5)
    assert error.max() < 5


def train_on_a_frozen_base() -> dict[str, float]:
    """Runs in two processes: 20 steps, in which weights that were trained would also decay."""
    stages = build_stages({"dp_shard": 2}, 0, EVEN, LoraConfig(rank=4, dropout=0.1))
    (model,) = stages.model_parts
    optimizer = build_optimizer([model], OptimizerConfig(lr=1e-2, weight_decay=0.5))
    tokens = torch.randint(104, (2, 16), generator=torch.Generator().manual_seed(5))
    batch = Batch(tokens, tokens.roll(-1, 1), dropout_keys=dropout_keys(0, [0, 1], 16))
    before = {name: local_part(p).detach().clone() for name, p in model.named_parameters()}
    for _ in range(20):
        optimizer.zero_grad()
        stages.forward_backward(batch, torch.tensor(64))
        optimizer.step()
    measured = Counter()
    for name, parameter in model.named_parameters():
        kind = "adapters" if is_adapter(name) else "base"
        part = local_part(parameter)
        measured[f"numbers of {kind}"] += part.numel()
        measured[f"changed of {kind}"] += not torch.equal(part, before[name])
        if parameter.grad is not None:
            measured[f"gradient of {kind}"] += local_part(parameter.grad).nbytes
        for value in optimizer.state.get(parameter, {}).values():
            if value.ndim:
                measured[f"moments of {kind}"] += local_part(value).nbytes
    return dict(measured)


def test_the_base_is_frozen_without_gradients_and_moments(pool):
    for measured in pool.run(2, train_on_a_frozen_base):
        adapters = measured["numbers of adapters"]
        assert measured["gradient of adapters"] == 4 * adapters
        assert measured["moments of adapters"] == 8 * adapters
        assert measured["changed of adapters"] == 4 * 4 * 2, "of 4 layers in 4 blocks"
        assert measured["numbers of base"] > 5 * adapters
        assert measured["changed of base"] == 0
        assert "gradient of base" not in measured
        assert "moments of base" not in measured


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("lora.targets=wq wz", ["lora.targets", "'wz'", "w1, w2, w3"]),
        ("lora.targets=q_proj", ["lora.targets", "'q_proj'; here that is wq"]),
        ("lora.targets=wq wk wq", ["lora.targets = 'wq wk wq'", "twice"]),
        ("lora.targets=", ["lora.targets is empty"]),
        ("lora.rank=129", ["lora.rank = 129", "at most 128 features"]),
        ("lora.layers=0-9", ["lora.layers", "'0-9'", "from 0 to 3"]),
        ("lora.layers=3-1", ["lora.layers", "'3-1'"]),
        ("lora.alpha=0", ["lora.alpha = 0"]),
    ],
)
def test_wrong_settings_are_reported(option, words):
    config = load_config(["debug", "--lora.rank=2", f"--{option}"])
    with refused(*words):
        check_layout(config, resolve_flavor(config.model, 64), 1)


def test_a_pipeline_needs_adapters_in_its_first_stage():
    config = load_config(["debug", "--lora.rank=2", "--lora.layers=2", "--parallel.pp=2"])
    with refused("lora.layers", "block 0"):
        check_layout(config, resolve_flavor(config.model, 64), 2)


def test_adapters_need_a_model(pool, arguments):
    with run_refused("lora.rank = 2", "checkpoint.initial_load"):
        pool.run(1, train_run, [*arguments, "--lora.rank=2"])


@pytest.fixture(scope="module")
def peft_model(tmp_path_factory):
    """A random model of transformers with PEFT's adapters, and both as files."""
    peft = pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("peft")
    base = make({"model_type": "qwen3", "head_dim": 20})
    base.save_pretrained(folder / "base")
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=3,
        lora_alpha=12,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
        init_lora_weights=False,  # random factors, B too
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, config).eval()
    model.save_pretrained(folder / "adapter")
    return model, folder


PEFT_NAMES = {
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "w2": "down_proj",
}


def masked(name: str, p: float, x: torch.Tensor) -> torch.Tensor:
    """In place of the dropout of one of PEFT's adapters: with the mask that ours has."""
    keys = dropout_keys(0, range(len(TOKENS)), TOKENS.shape[1])
    mask = dropped(keys, torch.tensor(zlib.crc32(name.encode())), 0, x.shape[-1], p)
    return x.masked_fill(mask, 0) / (1 - p)


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_adapters_of_peft_give_its_logits_and_gradients(peft_model, p, monkeypatch):
    model, folder = peft_model
    model.zero_grad()
    source = open_full_state(folder / "base", Selection(adapter=folder / "adapter"))
    expected = model(TOKENS).logits
    ours = load_model(source, torch.device("cpu"), 128)(TOKENS)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))

    for name, module in model.named_modules():
        if p > 0 and hasattr(module, "lora_dropout"):
            *_, number, _, theirs = name.split(".")
            (layer,) = [ours for ours, other in PEFT_NAMES.items() if other == theirs]
            block = "feed_forward" if layer == "w2" else "attention"
            forward = functools.partial(masked, f"layers.{number}.{block}.{layer}", p)
            monkeypatch.setattr(module.lora_dropout["default"], "forward", forward)
    expected = model(TOKENS).logits
    labels = TOKENS.roll(-1, 1)
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    base = open_folder(folder / "base")
    adapter = read_folder(folder / "adapter", base.model)
    trained = Llama(base.model, 128)
    targets = "wq wk wv wo w2"
    apply_lora(trained, LoraConfig(rank=3, alpha=12, targets=targets, dropout=p))
    freeze(trained, [], adapted=True)
    apply_dropout(trained)
    state = trained.state_dict()
    fill(base, {name: tensor for name, tensor in state.items() if not is_adapter(name)})
    fill(adapter, {name: tensor for name, tensor in state.items() if is_adapter(name)})
    inputs = {}
    if p > 0:
        inputs["dropout_keys"] = dropout_keys(0, range(len(TOKENS)), TOKENS.shape[1])
    logits = trained(TOKENS, **inputs)
    atol = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(logits, expected, rtol=0, atol=atol)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
            continue
        # The gradient of the same layer and factor; rows of B of wq and wk are in another order
        number = name.split(".")[1]
        factor = "lora_A" if "lora_a" in name else "lora_B"
        of_layer = f".layers.{number}."
        (gradient,) = [
            value
            for other, value in theirs.items()
            if of_layer in other and f".{PEFT_NAMES[name.split('.')[3]]}.{factor}" in other
        ]
        if name.split(".")[3] in ("wq", "wk") and "lora_b" in name:
            gradient = gradient.unflatten(0, (-1, 2, 10)).transpose(1, 2).flatten(0, 2)
        difference = (parameter.grad - gradient).norm() / gradient.norm()
        assert difference < 1e-5, name


@pytest.fixture(scope="module")
def base_run(whole_run) -> Path:
    """A run of a few steps, whose model gets adapters."""
    return whole_run()


def lora_arguments(arguments: list[str], base: Path) -> list[str]:
    lora = ["--lora.rank=4", "--lora.targets=wq wk wv wo w1 w2 w3"]
    more = ["--schedule.name=constant", "--optimizer.lr=1e-2", "--validation.freq=0"]
    return [*arguments, f"--checkpoint.initial_load={base}", *lora, *more]


@pytest.mark.slow  # each layout of adapters is in tests/tools/verify/test_compare.py
def test_a_run_under_tensor_parallel_goes_on_in_any_layout(pool, arguments, base_run, tmp_path):
    run = [*lora_arguments(arguments, base_run), "--lora.dropout=0.1"]
    first = [*run, "--training.steps=3", "--parallel.tp=2"]
    assert pool.run(4, train_run, first) == [0] * 4
    saved = read_manifest(tmp_path / "debug/checkpoints/step-3").tensors
    assert all(is_adapter(name) for name in saved if name.startswith("model."))
    moments = [name for name in saved if name.startswith("optimizer.") and "exp_avg" in name]
    assert len(moments) == 2 * sum(name.startswith("model.") for name in saved)

    for name, ranks, layout in (("pp", 2, ["--parallel.pp=2"]), ("one", 1, [])):
        shutil.copytree(tmp_path / "debug", tmp_path / name)
        last = [*run, "--training.steps=6", f"--run.name={name}", *layout]
        assert pool.run(ranks, train_run, last) == [0] * ranks
    losses = [[loss for loss, _ in curve(tmp_path / name).values()] for name in ("pp", "one")]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    assert losses[0][5] < losses[0][0]


@pytest.mark.slow
def test_a_run_with_dropout_resumes_to_the_same_bits(pool, arguments, base_run, tmp_path):
    """2 + 2 steps as 4 at once. PEFT's files name the dropout."""
    from titanlite.tools.formats.convert import Options, convert

    run = [*lora_arguments(arguments, base_run), "--validation.freq=2", "--lora.dropout=0.3"]
    for name, *options in (("whole",), ("without", "--lora.dropout=0")):
        whole = [*run, "--training.steps=4", f"--run.name={name}", *options]
        assert pool.run(1, train_run, whole) == [0]
    for steps in (2, 4):
        part = [*run, f"--training.steps={steps}", "--run.name=parts"]
        assert pool.run(1, train_run, part) == [0]
    whole = curve(tmp_path / "whole")
    assert curve(tmp_path / "parts") == whole
    assert validation(tmp_path / "parts") == validation(tmp_path / "whole")
    states = [
        load_file(tmp_path / n / "checkpoints/step-4/model-00000.safetensors")
        for n in ("whole", "parts")
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    without = curve(tmp_path / "without")
    convert(tmp_path / "whole", tmp_path / "peft", Options(to="peft"))
    written = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert written["lora_dropout"] == 0.3
    again = open_adapter(tmp_path / "peft", open_full_state(base_run).model)
    assert lora_of(again).dropout == 0.3
    # B begins as zeros, so the first loss depends on no mask
    assert [whole[step] == without[step] for step in (1, 2, 3)] == [False, False, False]
    assert whole[1][0] == without[1][0]
    with run_refused("lora.dropout", "0.3", "0.5"):
        pool.run(
            1, train_run, [*run, "--run.name=parts", "--training.steps=6", "--lora.dropout=0.5"]
        )


def test_the_whole_model_of_a_run_with_adapters(pool, arguments, base_run, tmp_path, caplog):
    """Merged on reading; in PEFT's folder and back; as the model that another run begins with."""
    from titanlite.tools.formats.convert import Options, convert

    run = lora_arguments(arguments, base_run)
    assert pool.run(1, train_run, run) == [0]
    merged = open_full_state(tmp_path / "debug")
    base = open_full_state(base_run)
    assert merged.tensors.keys() == base.tensors.keys()
    name = "layers.0.attention.wq"
    step = tmp_path / "debug/checkpoints/step-6"
    factors = load_file(step / "model-00000.safetensors")
    a = factors[f"model.{name}.lora_a.weight"]
    b = factors[f"model.{name}.lora_b.weight"]
    expected = base[f"{name}.weight"] + 4 * b @ a
    torch.testing.assert_close(merged[f"{name}.weight"], expected)
    assert torch.equal(merged["norm.weight"], base["norm.weight"])

    convert(tmp_path / "debug", tmp_path / "peft", Options(to="peft"))
    again = merge(base, open_adapter(tmp_path / "peft", base.model))
    for name in merged:
        assert torch.equal(merged[name], again[name])
    added = open_adapter(tmp_path / "debug")
    del added.tensors["layers.0.attention.wo.lora_a.weight"]
    for use in (lambda: merge(base, added), lambda: to_config(added)):
        with refused(str(step), "no adapter of 1 of 14 layers, as layers.0.attention.wo"):
            use()
    # A new run begins with the whole model, which is not in the PEFT file of its adapters
    assert "which has adapters too" not in caplog.text
    onwards = [*lora_arguments(arguments, tmp_path / "debug"), "--run.name=onwards"]
    assert pool.run(1, train_run, [*onwards, "--training.steps=1"]) == [0]
    convert(tmp_path / "onwards", tmp_path / "peft-of-onwards", Options(to="peft"))
    assert "which has adapters too" in caplog.text


def test_other_weights_under_the_adapters_are_refused(
    pool, arguments, base_run, whole_run, tmp_path, caplog
):
    """When a run resumes, or is read; the same weights in another format are not."""
    from titanlite.tools.formats.convert import Options, convert

    first = lora_arguments([*arguments, "--training.steps=3"], base_run)
    assert pool.run(1, train_run, first) == [0]
    convert(base_run, tmp_path / "base", Options(to="hf"))
    same = lora_arguments([*arguments, "--training.steps=4"], tmp_path / "base")
    assert pool.run(1, train_run, same) == [0]
    others = whole_run("--run.seed=7")
    with caplog.at_level("WARNING", "titanlite"):
        open_full_state(base_run, Selection(adapter=tmp_path / "debug"))
        assert "not the weights" not in caplog.text
        open_full_state(others, Selection(adapter=tmp_path / "debug"))
        assert "not the weights" in caplog.text
    with run_refused("checkpoint.initial_load", str(others), "not the weights"):
        pool.run(1, train_run, lora_arguments([*arguments, "--training.steps=5"], others))
    shutil.rmtree(tmp_path / "base")
    shutil.copytree(others, tmp_path / "base")
    with refused(str(tmp_path / "base"), "not the weights", "--adapter"):
        open_full_state(tmp_path / "debug")


@pytest.mark.slow
def test_peft_reads_what_is_written(pool, arguments, base_run, tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    from titanlite.tools.formats.convert import Options, convert

    assert pool.run(1, train_run, lora_arguments(arguments, base_run)) == [0]
    convert(tmp_path / "debug", tmp_path / "peft", Options(to="peft"))
    convert(base_run, tmp_path / "base", Options(to="hf"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft").eval()
    ours = load_model(open_full_state(tmp_path / "debug"), torch.device("cpu"), 128)
    expected = theirs(TOKENS).logits
    atol = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(ours(TOKENS), expected, rtol=0, atol=atol)


@pytest.fixture
def peft_folder(tmp_path) -> Path:
    """A small adapter as PEFT writes it, for a model of SMALL's shape."""
    layer = "base_model.model.model.layers.0.self_attn.o_proj"
    save_file(
        {f"{layer}.lora_A.weight": torch.ones(2, 32), f"{layer}.lora_B.weight": torch.ones(32, 2)},
        tmp_path / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"}
    config |= {"target_modules": ["o_proj"], "layers_to_transform": [0]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert read_folder(tmp_path, SMALL).tensors
    return tmp_path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, ["peft_type = 'IA3'", "'LORA'"]),
        ({"use_dora": True}, ["use_dora = True"]),
        ({"bias": "all"}, ["bias = 'all'"]),
        ({"rank_pattern": {"q_proj": 4}}, ["rank_pattern"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save"]),
        ({"use_rslora": "yes"}, ["use_rslora = 'yes'"]),
        ({"r": 0}, ["r = 0", "expected 1 to"]),
        ({"r": 2**62}, [f"r = {2**62}", "expected 1 to"]),
        ({"r": math.inf}, ["adapter_config.json", "r: expected int, found float"]),
        ({"r": 10**400}, ["adapter_config.json", "r: expected int, found float"]),
        ({"lora_alpha": 10**400}, ["lora_alpha = inf"]),
        ({"lora_dropout": math.nan}, ["lora_dropout = nan", "0 to below 1"]),
        ({"lora_alpha": math.inf}, ["lora_alpha = inf"]),
        ({"r": None}, ["adapter_config.json", "r: expected int, found NoneType"]),
        ({"lora_alpha": "x"}, ["adapter_config.json", "lora_alpha: expected float, found str"]),
        ({"layers_to_transform": None}, ["of 2 of 3 layers, as layers.1.attention.wo, layers.2."]),
        ({"target_modules": ["self_attn.v_proj"]}, ["of 1 of 1 layers, as layers.0.attention.wv"]),
        ({"layers_to_transform": "all"}, ["adapter_config.json", "another type than expected"]),
    ],
)
def test_adapters_that_are_not_supported_are_refused(peft_folder, change, words):
    path = peft_folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with refused(*words):
        read_folder(peft_folder, SMALL)


def test_adapters_that_do_not_fit_are_refused(peft_folder, base_run, tmp_path):
    narrow = dataclasses.replace(SMALL, dim=16)
    adapter = read_folder(peft_folder, SMALL)
    with_16 = Llama(narrow, 8).state_dict()
    save_file(with_16, peft_folder / "model.safetensors")
    (peft_folder / "model.json").write_text(narrow.to_json())
    with refused("layers.0.attention.wo", "(32, 2)", "(16, 16)"):
        merge(open_full_state(peft_folder / "model.safetensors"), adapter)
    config = json.loads((peft_folder / "adapter_config.json").read_text()) | {"r": 4}
    (peft_folder / "adapter_config.json").write_text(json.dumps(config))
    with refused("layers.0.attention.wo", "the rank 4"):
        merge(open_full_state(base_run), read_folder(peft_folder, SMALL))
    adapter.tensors.pop("layers.0.attention.wo.lora_b.weight")
    with refused("layers.0.attention.wo", "no other factor"):
        merge(open_full_state(base_run), adapter)
    tensors = load_file(peft_folder / "adapter_model.safetensors")
    tensors["base_model.model.score.weight"] = torch.ones(1)
    save_file(tensors, peft_folder / "adapter_model.safetensors")
    with refused("score.weight", "not adapters"):
        read_folder(peft_folder, SMALL)
    with refused("holds no adapters", "adapter_config.json"):
        open_adapter(base_run)
    (peft_folder / "model.safetensors").unlink()
    with refused(str(peft_folder), "PEFT's format", "--adapter"):
        open_full_state(peft_folder)
    with refused(str(peft_folder), "is in PEFT's format"):
        open_adapter(peft_folder)
    with refused("is a file of adapters", f"give its folder: {peft_folder}"):
        open_adapter(peft_folder / "adapter_model.safetensors")
    (peft_folder / "adapter_model.safetensors").unlink()
    with refused(str(peft_folder), "has no adapter_model.safetensors", "save_pretrained"):
        read_folder(peft_folder, SMALL)


def test_adapters_that_a_checkpoint_has_are_not_left_out(pool, arguments, base_run):
    first = lora_arguments([*arguments, "--training.steps=3"], base_run)
    assert pool.run(1, train_run, first) == [0]
    with run_refused("lora.targets was", "wq, wv"):
        pool.run(1, train_run, [*first, "--training.steps=4", "--lora.targets=wq, wv"])
    with run_refused("lora.rank was 4 and is 0", "cannot change within a run"):
        pool.run(1, train_run, [*first, "--training.steps=4", "--lora.rank=0"])
