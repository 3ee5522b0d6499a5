"""Files that say how a model is used come back as they were; transformers is the judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from chats import CHATML
from foreign_tokenizers import trained
from transformers_models import MIXTRAL, QWEN3_MOE, TOKENS, make

import train
from titanlite.config.load import load_config
from titanlite.tokenizer.kept_files import KEPT_FILE, TRAINING_FIELDS
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.cli.main import main
from titanlite.tools.formats.convert import Options, convert
from titanlite.tools.formats.detect_format import open_full_state
from titanlite.tools.formats.huggingface_kept import end_tokens, stops_of

transformers = pytest.importorskip("transformers")
PROMPT = "import os"
TOKENIZER = {
    "tokenizer_class": "Qwen2Tokenizer",
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "padding_side": "left",
    "add_bos_token": False,
}
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}


def stored(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def generated(folder: Path) -> list[int]:
    """What transformers generates greedily, with its own tokenizer and files."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=60, do_sample=False)
    return ids[0, prompt["input_ids"].shape[1] :].tolist()


def run_adopted(arguments: list[str]) -> int:
    return train.main(train.adopt_model(load_config(arguments)))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """A folder whose model ends after five tokens, with a token that only its files name."""
    folder = tmp_path_factory.mktemp("qwen") / "model"
    size = Tokenizer("", trained("qwen").encode()).size
    theirs = make({"model_type": "qwen2", "vocab_size": size})
    theirs.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(trained("qwen"))
    config = TOKENIZER | {"chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    names = Tokenizer(folder).special
    ids = {"bos_token_id": None, "pad_token_id": names["<|endoftext|>"]}
    fields = stored(folder, "config.json") | ids | {"eos_token_id": names["<|im_end|>"]}
    (folder / "config.json").write_text(json.dumps(fields))
    free = generated(folder)
    assert len(free) == 60
    last = next(i for i in range(4, 60) if free[i] not in free[:i])
    generation = ids | SAMPLING | {"eos_token_id": [names["<|im_end|>"], free[last]]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert generated(folder) == free[: last + 1]
    return folder


def test_generate_begins_and_ends_as_transformers_does(qwen, capsys):
    tokenizer = Tokenizer(qwen)
    options = ["--prompt", PROMPT, "--max-new-tokens", "60", "--temperature", "0"]
    assert main(["generate", str(qwen), *options]) == 0
    output = capsys.readouterr()
    expected = generated(qwen)
    assert output.out == PROMPT + tokenizer.decode(expected[:-1]) + "\n"
    assert "prompts begin with no special token" in output.err
    assert stops_of(open_full_state(qwen), tokenizer) == {tokenizer.eos, expected[-1]}


@pytest.mark.slow
def test_a_sample_in_training_ends_as_transformers_ends(qwen, pool, arguments, tmp_path):
    """The sample before the first step, which has the folder's weights."""
    run = [word for word in arguments if not word.startswith("--model.")]
    run += ["--model.flavor=from_checkpoint", f"--checkpoint.initial_load={qwen}"]
    run += [f'--validation.prompts=["{PROMPT}"]', "--validation.prompt_tokens=60"]
    run += ["--validation.prompt_temperature=0", "--training.steps=1"]
    assert pool.run(1, run_adopted, run) == [0]
    sample = json.loads((tmp_path / "debug/samples.jsonl").read_text().splitlines()[0])
    expected = Tokenizer(qwen).decode(generated(qwen)[:-1])
    assert sample == {"step": 0, "prompt": PROMPT, "text": expected}


def test_the_perplexity_of_texts_is_that_of_transformers(qwen, tmp_path, capsys):
    """Each text on its own, with the ids that transformers makes of it and nothing else."""
    texts = ["import os\n" * 20, "def f(x):\n    return x\n" * 9]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(qwen)
    total = 0.0
    count = 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            mean = model(ids, labels=ids).loss
        count += ids.shape[1] - 1
        total += float(mean) * (ids.shape[1] - 1)
    found = tmp_path / "found.json"
    options = ["--perplexity", str(tmp_path / "rows.jsonl"), "--seq-len=2048", f"--json={found}"]
    assert main(["evaluate", str(qwen), *options, "--device=cpu"]) == 0
    (values,) = json.loads(found.read_text())["results"].values()
    assert values["tokens"] == count
    assert values["loss"] == pytest.approx(total / count, rel=1e-5)
    assert "texts begin with no special token" in capsys.readouterr().err


@pytest.mark.parametrize(
    "between",
    [
        "titanlite",
        *(pytest.param(form, marks=pytest.mark.slow) for form in ("dcp", "safetensors", "hf")),
    ],
)
def test_what_is_kept_comes_back(qwen, tmp_path, between):
    convert(qwen, tmp_path / "between", Options(between), log=lambda text: None)
    convert(tmp_path / "between", tmp_path / "back", Options("hf"), log=lambda text: None)
    back = tmp_path / "back"
    assert stored(back, "generation_config.json") == stored(qwen, "generation_config.json")
    assert stored(back, "tokenizer_config.json") == TOKENIZER
    assert (back / "chat_template.jinja").read_text() == CHATML
    before = stored(qwen, "config.json")
    after = stored(back, "config.json")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert after[name] == before[name]
    assert generated(back) == generated(qwen)


# Every family, with the fields that only transformers' training reads
TRAINED = {
    "llama": {"attention_dropout": 0.1, "initializer_range": 0.05, "use_cache": False},
    "mistral": {"attention_dropout": 0.1, "sliding_window": None},
    "ministral": {"attention_dropout": 0.1, "sliding_window": 7, "head_dim": 8},
    "qwen2": {"attention_dropout": 0.2, "initializer_range": 0.05},
    "qwen3": {"attention_dropout": 0.1, "initializer_range": 0.05},
    "qwen3_moe": {**QWEN3_MOE, "router_aux_loss_coef": 0.5, "output_router_logits": True},
    "mixtral": {
        **MIXTRAL,
        "router_aux_loss_coef": 0.5,
        "output_router_logits": True,
        "router_jitter_noise": 0.1,
    },
}


@pytest.mark.parametrize("family", TRAINED)
def test_their_training_goes_on_with_the_same_loss(tmp_path, family):
    make({"model_type": family, **TRAINED[family]}).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "between", Options("titanlite"), log=lambda text: None)
    convert(tmp_path / "between", tmp_path / "back", Options("hf"), log=lambda text: None)
    before = stored(tmp_path / "hf", "config.json")
    after = stored(tmp_path / "back", "config.json")
    for name in TRAINING_FIELDS:
        assert after.get(name) == before.get(name), name
    losses = []
    for folder in ("hf", "back"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, dtype=torch.float32
        )
        torch.manual_seed(0)
        losses.append(model.train()(TOKENS, labels=TOKENS).loss.item())
    assert losses[0] == losses[1]


def test_no_file_of_another_name_is_written(qwen, tmp_path):
    """Not even by a forged list of kept files, which would be written beside config.json."""
    convert(qwen, tmp_path / "between", Options("safetensors"), log=lambda text: None)
    kept = stored(tmp_path / "between", KEPT_FILE)
    (tmp_path / "between" / KEPT_FILE).write_text(json.dumps({**kept, "../forged.json": {"a": 1}}))
    convert(tmp_path / "between", tmp_path / "back", Options("hf"), log=lambda text: None)
    assert not (tmp_path / "forged.json").exists()
    assert stored(tmp_path / "back", "tokenizer_config.json") == TOKENIZER


def test_ends_and_sampling_need_no_tokenizer(qwen, tmp_path):
    generation = stored(qwen, "generation_config.json")
    (tmp_path / "bare").mkdir()
    for file in qwen.iterdir():
        if "token" not in file.name:
            (tmp_path / "bare" / file.name).symlink_to(file)
    target = tmp_path / "target"
    convert(tmp_path / "bare", target, Options("hf", verify=False), log=lambda text: None)
    assert not (target / "tokenizer.json").exists()
    assert stored(target, "generation_config.json") == generation
    ids = stored(target, "config.json")
    assert ids["eos_token_id"] == generation["eos_token_id"][0]
    assert (ids["bos_token_id"], ids["pad_token_id"]) == (None, generation["pad_token_id"])


def test_a_folder_without_the_file_has_the_ids_of_its_config(qwen, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for file in qwen.iterdir():
        if file.name != "generation_config.json":
            (source / file.name).symlink_to(file)
    convert(source, tmp_path / "back", Options("hf"), log=lambda text: None)
    assert not (tmp_path / "back/generation_config.json").exists()
    assert stored(tmp_path / "back", "config.json")["eos_token_id"] == Tokenizer(qwen).eos


def test_a_run_adds_the_ends_that_it_has_trained(qwen):
    state = open_full_state(qwen)
    tokenizer = Tokenizer(qwen)
    kept = stored(qwen, "generation_config.json")["eos_token_id"]
    assert end_tokens(state, tokenizer) == kept
    state.about.data = "what a run was trained on"
    state.about.files["chat_template.jinja"] = CHATML.replace("<|im_end|>", "<|im_start|>").encode()
    assert end_tokens(state, tokenizer) == [*kept, tokenizer.special["<|im_start|>"]]
