"""Sampling: the cache changes nothing, and the options do what they say."""

from __future__ import annotations

import pytest
import torch
from model_builder import small_model

from titanlite.model.generate import KVCache, generate, sample_token


def options(**changes):
    return {"stop": -1, "temperature": 0.0, "top_k": 0, "seed": 0, **changes}


@pytest.mark.parametrize("prompt", [[5], [5, 17, 3, 99]])
def test_cached_greedy_tokens_equal_those_of_the_whole_text(prompt):
    model = small_model(seq_len=24)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # sharper logits: no near-ties
    found = list(generate(model, prompt, 20, **options()))
    text = list(prompt)
    for _ in range(20):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert found == text[len(prompt) :]
    assert len(set(found)) > 3


def test_stop_token_ends_and_is_not_given():
    model = small_model(seq_len=24)
    tokens = list(generate(model, [5], 20, **options(temperature=1.0)))
    stop = tokens[7]
    first = tokens.index(stop)
    assert list(generate(model, [5], 20, **options(temperature=1.0, stop=stop))) == tokens[:first]


def test_the_seed_decides():
    model = small_model(seq_len=24)
    one, same, other = (
        list(generate(model, [5], 20, **options(temperature=1.0, seed=s))) for s in (1, 1, 2)
    )
    assert one == same != other


def test_too_long_is_refused():
    with pytest.raises(ValueError, match="4 prompt tokens"):
        list(generate(small_model(seq_len=8), [1, 2, 3, 4], 5, **options()))


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
