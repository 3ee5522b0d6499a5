"""FLOPs and peaks against published numbers."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from titanlite.config.schema import LoraConfig
from titanlite.model.flavors import FLAVORS, LlamaConfig
from titanlite.model.flops import flops_per_token, num_adapter_parameters, peak_tflops
from titanlite.model.llama import Llama
from titanlite.parallel.lora import apply_lora
from titanlite.parallel.parallelize import freeze


@pytest.mark.parametrize(
    ("flavor", "seq_len", "flops"),
    [
        ("llama3_8b", 8192, 57_914_449_920),
        ("llama3_70b", 8192, 481_442_709_504),
        ("llama3_405b", 8192, 2_625_449_459_712),
        ("llama3_1b", 4096, 9_025_597_440),
    ],
)
def test_flops_per_token(flavor, seq_len, flops):
    assert flops_per_token(FLAVORS[flavor], seq_len) == pytest.approx(
        flops, rel=1e-3 if flavor == "llama3_1b" else 0
    )


def test_adapters():
    """Rank 16 on q, k, v and o of Qwen2.5-0.5B, as PEFT counts them."""
    model = FLAVORS["qwen2.5_0.5b"]
    lora = LoraConfig(rank=16)
    assert num_adapter_parameters(model, lora) == 2_162_688
    assert num_adapter_parameters(model, LoraConfig()) == 0
    frozen = 4 * model.num_parameters + 6 * 2_162_688
    frozen -= 2 * (896 + (896 + 128 + 128) * 897)  # the first block's input has no gradient
    attention = flops_per_token(model, 128) - 6 * model.num_parameters
    assert flops_per_token(model, 128, lora) == frozen + attention


@pytest.mark.parametrize(
    ("frozen", "lora"),
    [
        ("", LoraConfig()),
        ("tok_embeddings.*", LoraConfig()),
        ("tok_embeddings.* layers.0.* layers.1.*", LoraConfig()),
        ("*", LoraConfig(rank=4, layers="2-3")),
        ("layers.* output.*", LoraConfig()),
        ("tok_embeddings.* layers.0.* layers.1.attention.w[qk].*", LoraConfig()),
        ("layers.3.* norm.* output.*", LoraConfig()),
    ],
)
def test_the_matrix_products_are_those_that_torch_makes(frozen, lora):
    """Counted by torch's FlopCounterMode in a forward and backward; it does not count norms."""
    config = LlamaConfig(128, 4, 4, 2, 344, vocab_size=512)
    config = replace(config, qk_norm=True)
    model = Llama(config, 32)
    if lora.rank > 0:
        apply_lora(model, lora)
    patterns = [] if lora.rank > 0 else frozen.split()
    freeze(model, patterns, adapted=lora.rank > 0)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    made = sum(count for operator, count in counts.items() if "attention" not in str(operator))
    expected = tokens.numel() * flops_per_token(config, 0, lora, patterns)
    assert made == pytest.approx(expected, rel=0.01)


def test_a_window_counts_its_keys():
    model = FLAVORS["mistral_7b_v0.1"]
    whole = flops_per_token(replace(model, sliding_window=0), 16384)
    attention = 12 * 32 * 32 * 128 * 16384
    assert whole - flops_per_token(model, 16384) == attention * 3 // 4
    some = replace(model, window_layers="8-31")
    assert whole - flops_per_token(some, 16384) == attention * 9 // 16
    assert flops_per_token(model, 4096) == flops_per_token(replace(model, sliding_window=0), 4096)


def test_mfu_of_a_published_row():
    """8B at 8,192 tokens and 5,847 tokens/s on an H100: 338.6 TFLOP/s, 34.24 %."""
    tflops = 5847 * flops_per_token(FLAVORS["llama3_8b"], 8192) / 1e12
    assert tflops == pytest.approx(338.6, abs=0.05)
    peak = peak_tflops("NVIDIA H100 80GB HBM3")
    assert peak is not None
    assert 100 * tflops / peak == pytest.approx(34.24, abs=0.005)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("AMD Instinct MI300X", 1300),
        ("NVIDIA GeForce RTX 4090", None),
        ("CPU", None),
    ],
)
def test_peaks(name, peak):
    assert peak_tflops(name) == peak
