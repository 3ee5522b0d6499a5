"""Sampling: the cache does not change the text, and the options do what they say."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from model_builder import GROUPED, ODD, SMALL, small_model

from titanlite.model.flavors import LlamaConfig, RopeScaling
from titanlite.model.generate import KVCache, generate, sample_token
from titanlite.model.llama import Llama


def options(**changes):
    return {"stop": set(), "temperature": 0.0, "top_k": 0, "seed": 0, **changes}


@pytest.mark.parametrize("window", [0, 1, 3, 4, 23])
@pytest.mark.parametrize("layers", ["all", "0, 2"])
@pytest.mark.parametrize("prompt", [[5], [5, 17, 3, 99]])
def test_cached_greedy_tokens_equal_those_of_the_whole_text(prompt, window, layers):
    config = dataclasses.replace(SMALL, sliding_window=window, window_layers=layers)
    model = small_model(seq_len=24, config=config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # sharper logits: no near-ties
    found = list(generate(model, prompt, 20, **options()))
    text = list(prompt)
    for _ in range(20):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert found == text[len(prompt) :]
    assert len(set(found)) > 3 or window == 1


def test_stop_token_ends_and_is_not_given():
    model = small_model(seq_len=24)
    tokens = list(generate(model, [5], 20, **options(temperature=1.0)))
    stop = tokens[7]
    first = tokens.index(stop)
    assert list(generate(model, [5], 20, **options(temperature=1.0, stop={stop}))) == tokens[:first]


def test_the_seed_decides():
    model = small_model(seq_len=24)
    one, same, other = (
        list(generate(model, [5], 20, **options(temperature=1.0, seed=s))) for s in (1, 1, 2)
    )
    assert one == same != other


def test_too_long_is_refused():
    with pytest.raises(ValueError, match="4 prompt tokens"):
        list(generate(small_model(seq_len=8), [1, 2, 3, 4], 5, **options()))


@pytest.mark.slow
def test_top_k_and_temperature():
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    generator = torch.Generator().manual_seed(0)

    def share(**kwargs):
        drawn = [sample_token(logits, generator=generator, **kwargs) for _ in range(2000)]
        return torch.bincount(torch.tensor(drawn), minlength=4) / 2000

    assert share(temperature=0.0, top_k=0).tolist() == [0, 1, 0, 0]
    two = share(temperature=1.0, top_k=2)
    assert two[0] == two[2] == 0
    torch.testing.assert_close(two[[1, 3]], torch.tensor([3.0, 2.0]).softmax(0), atol=0.04, rtol=0)
    torch.testing.assert_close(
        share(temperature=2.0, top_k=0), (logits / 2).softmax(0), atol=0.04, rtol=0
    )


def test_a_tiny_temperature_takes_the_likeliest():
    logits = torch.tensor([0.0, 3.0, 1.0])
    assert sample_token(logits, 1e-45, 0, torch.Generator().manual_seed(0)) == 1


def test_the_cache_refuses_what_attention_has_no_mask_for():
    cache = KVCache(8)
    cache.append(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    with pytest.raises(ValueError, match="one position per call"):
        cache.append(torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 4))


SHAPES = {  # heads, widths and layers that are no powers of two, and what families add to the blocks
    "small": SMALL,
    "one head for keys": dataclasses.replace(GROUPED, num_kv_heads=1, tied_embeddings=True),
    "biases and yarn": ODD,
    "norms and wide heads": LlamaConfig(
        dim=20,
        num_layers=2,
        num_heads=5,
        num_kv_heads=5,
        ffn_dim=33,
        vocab_size=61,
        explicit_head_dim=6,
        qk_norm=True,
        rope_scaling=RopeScaling(8.0, original_context=16),
    ),
}
LONGEST = 32


def sharp_model(config: LlamaConfig) -> Llama:
    """With logits that are far apart, and biases that are not zero."""
    model = small_model(seq_len=LONGEST, config=config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                generator = torch.Generator().manual_seed(len(name))
                parameter.normal_(0, 0.5, generator=generator)
            else:
                parameter.mul_(3)
    return model


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_of_odd_shapes_equal_those_without_a_cache(name, length):
    model = sharp_model(SHAPES[name])
    generator = torch.Generator().manual_seed(7)
    prompt = torch.randint(SHAPES[name].vocab_size, (length,), generator=generator).tolist()
    found = list(generate(model, prompt, 15, **options()))
    text = list(prompt)
    with torch.no_grad():
        for _ in range(15):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert prompt + found == text
    end = found[5]
    assert list(generate(model, prompt, 15, **options(stop={end}))) == found[: found.index(end)]
