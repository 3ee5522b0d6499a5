"""The time model: the guides' bubble, and what each of its rules says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from titanlite.config.load import load_config
from titanlite.model.flavors import resolve_flavor
from titanlite.model.flops import flops_per_token
from titanlite.tools.plan.counts import Collective, Product
from titanlite.tools.plan.estimate import estimate
from titanlite.tools.plan.fitted import FITTED
from titanlite.tools.plan.machines import MACHINES, Machine
from titanlite.tools.plan.step_time import (
    FASTEST,
    FULL_SPEED,
    Rates,
    StepTime,
    attention_part,
    bubble_fraction,
    collective_seconds,
    product_seconds,
    ranks_per_node,
    rates_of,
    step_time,
    timed,
    topology_warnings,
    work_of,
)

H100 = MACHINES["H100"]
DEGREES = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1}


def planned(
    world_size: int, *arguments: str, machine: Machine = H100, rates: Rates | None = None
) -> StepTime:
    config = load_config(["llama3_8b", "--training.global_batch_size=512", *arguments])
    llama = resolve_flavor(config.model, 128256)
    return step_time(estimate(config, llama, world_size), machine, config, llama, rates)


def test_the_bubble_of_the_guides():
    """175B: pp 16, 384 microbatches: 15/399 = 3.76 %."""
    assert bubble_fraction("1F1B", 16, 384, 1) == 15 / 399
    assert round(100 * bubble_fraction("1F1B", 16, 384, 1), 2) == 3.76
    assert bubble_fraction("Interleaved1F1B", 4, 8, 2) == 3 / 19
    assert bubble_fraction("InterleavedZeroBubble", 4, 8, 2) < 3 / 19
    assert bubble_fraction("GPipe", 1, 8, 1) == 0.0


def test_parts_add_up_to_the_step():
    time = planned(64, "--parallel.tp=4", "--parallel.pp=2", "--training.local_batch_size=4")
    assert time.total == pytest.approx(sum(time.parts.values()))
    assert all(seconds >= 0 for seconds in time.parts.values())
    tokens = 512 * 8192
    assert time.tokens_per_second == pytest.approx(tokens / time.total / 64)
    llama = resolve_flavor(load_config(["llama3_8b"]).model, 128256)
    flops = time.tokens_per_second * flops_per_token(llama, 8192)
    assert time.mfu == pytest.approx(flops / 989e12)
    assert 0.1 < time.mfu < 0.7


def test_larger_products_reach_more_of_the_peak():
    peak = 989e12
    large = Product(8192, 4096, 14336, "bfloat16", 3)
    assert product_seconds(large, H100) == pytest.approx(large.flops / peak, rel=0.04)
    small = Product(8192, 4096, 150, "bfloat16", 3)
    assert product_seconds(small, H100) == pytest.approx(2 * small.flops / peak)
    for dtype, slower in (("float8", False), ("float32", True)):
        other = product_seconds(replace(large, dtype=dtype), H100)
        assert (other > product_seconds(large, H100)) == slower
    by_row = replace(large, dtype="float8, scale per row")
    assert product_seconds(by_row, H100) == product_seconds(large, H100)


def test_a_ring_inside_a_node_and_over_nodes():
    """A node's ring of 8 leaves it through 8 ports of 50 GB/s, that of one rank through one."""
    rates = Rates(links=1.0)
    gigabytes = Collective("dp_shard_cp", "all_gather", 8, 1, 8 * 10**9)
    inside = collective_seconds(gigabytes, {**DEGREES, "dp_shard": 8}, H100, rates)
    assert inside == pytest.approx(7 / 450, rel=0.01)
    over = replace(gigabytes, size=64)
    sent = over.sent_bytes / 1e9
    by_eight = collective_seconds(over, {**DEGREES, "dp_shard": 64}, H100, rates)
    assert by_eight == pytest.approx(sent / 400, rel=0.02)
    degrees = {**DEGREES, "dp_shard": 64, "tp": 8}
    assert ranks_per_node("dp_shard_cp", 64, degrees, H100) == 1
    assert collective_seconds(over, degrees, H100, rates) == pytest.approx(sent / 50, rel=0.01)
    assert ranks_per_node("tp", 8, degrees, H100) == 8
    assert ranks_per_node("pp", 4, {**degrees, "pp": 4}, H100) == 1


def test_a_message_between_nodes_goes_through_one_port():
    """Ranks of cp = 16 are 8 to a node, but each sends to one other."""
    rates = Rates(links=1.0)
    message = Collective("cp", "send", 16, 1, 10**9)
    degrees = {**DEGREES, "cp": 16}
    assert ranks_per_node("cp", 16, degrees, H100) == 8
    assert collective_seconds(message, degrees, H100, rates) == pytest.approx(1 / 50, rel=0.01)
    inside = collective_seconds(replace(message, size=8), {**DEGREES, "cp": 8}, H100, rates)
    assert inside == pytest.approx(1 / 450, rel=0.01)


def test_an_all_to_all_over_nodes_goes_through_the_port_of_each_gpu():
    """A rank keeps one of 16 parts of 1 GB, and sends 7 inside its node and 8 to the other."""
    call = Collective("ep", "all_to_all", 16, 1, 16 * 10**9)
    degrees = DEGREES | {"dp_shard": 16}
    seconds = collective_seconds(call, degrees, H100, FULL_SPEED)
    assert seconds == pytest.approx(8 / H100.network_bandwidth, rel=0.01)
    inside = replace(call, size=8)
    seconds = collective_seconds(inside, degrees, H100, FULL_SPEED)
    assert seconds == pytest.approx(14 / H100.link_bandwidth, rel=0.01)


def test_ep_is_inside_a_node_and_the_shards_of_experts_are_not():
    degrees = DEGREES | {"dp_shard": 16, "tp": 2}
    assert ranks_per_node("ep", 4, degrees, H100) == 4
    assert ranks_per_node("ep", 8, degrees, H100) == 4
    assert ranks_per_node("expert_shard", 8, degrees, H100) == 2  # ep 2, tp 2
    assert ranks_per_node("expert_shard", 4, degrees, H100) == 1


def test_exchanges_of_experts_are_waited_for():
    flavor = ("--model.flavor=qwen3_30b_a3b", "--training.seq_len=4096")
    without = planned(8, *flavor)
    divided = planned(8, *flavor, "--parallel.ep=8")
    assert without.expert_parallel == 0
    rows = 512 // 8 * 6 * 48 * 8 * 4096 * 2048 * 2  # sequences, exchanges, blocks, rows, numbers
    sent = rows * 7 / 8 / (H100.link_bandwidth * 1e9) / rates_of(H100).links
    calls = 512 // 8 * (6 + 2) * 48  # of rows and of counts
    latency = calls * 3 * H100.link_latency_us * 1e-6  # 3 steps among 8 GPUs
    assert divided.expert_parallel == pytest.approx(sent + latency, rel=0.001)
    assert divided.sharding < without.sharding


def test_many_small_calls_cost_their_latency():
    calls = Collective("tp", "all_reduce", 8, 1000, 1000)
    seconds = collective_seconds(calls, {**DEGREES, "tp": 8}, H100, Rates())
    assert seconds == pytest.approx(1000 * 3 * 10e-6, rel=0.01)


def test_tp_over_nodes_is_slow_and_warned_of():
    inside = planned(64, "--parallel.tp=8")
    assert inside.warnings == ()
    four = replace(H100, gpus_per_node=4)
    across = planned(64, "--parallel.tp=8", machine=four)
    assert "parallel.tp = 8 crosses nodes of 4 GPUs (H100)" in across.warnings[0]
    assert across.tensor_parallel > 2 * inside.tensor_parallel
    assert topology_warnings({**DEGREES, "tp": 3}, H100)
    assert topology_warnings({**DEGREES, "tp": 36}, MACHINES["GB200-NVL72"]) == ()


def test_what_overlaps_is_not_waited_for():
    """FSDP behind the computation of other units; with a slow network it is not hidden."""
    fast = planned(64, "--training.local_batch_size=4")
    slow = planned(
        64, "--training.local_batch_size=4", machine=replace(H100, network_bandwidth=0.5)
    )
    assert fast.sharding < 0.1 * fast.total
    assert slow.sharding > 0.5 * slow.total
    exposed = planned(64, "--parallel.tp=4", "--parallel.async_tp=false")
    assert planned(64, "--parallel.tp=4", "--parallel.async_tp=true").tensor_parallel == (
        pytest.approx(exposed.tensor_parallel / 2)
    )


def test_what_makes_a_step_slower_or_faster():
    base = planned(8)
    assert planned(8, "--recompute.mode=full").products > base.products
    assert planned(8, "--recompute.mode=none").products < base.products
    assert planned(8, "--compile.enabled=false").pointwise > base.pointwise
    assert planned(8, "--float8.enabled=true").total < base.total
    assert planned(8, machine=MACHINES["A100-80GB"]).total > base.total
    assert planned(8, "--parallel.cpu_offload=true").offload > 0
    assert planned(8, "--parallel.optimizer_offload=true").offload > 0
    assert planned(8, "--optimizer.name=muon").optimizer > base.optimizer
    assert planned(8, "--parallel.cp=2").context_parallel > 0


def test_offloaded_weights_are_copied_for_each_local_batch():
    """8B numbers on 8 GPUs, two copies up and one down of 4 bytes, and one update."""
    batches = ("--parallel.cpu_offload=true", "--training.global_batch_size=32")
    numbers = 8030261248 / 8
    for local in (1, 2, 4):
        offload = planned(8, *batches, f"--training.local_batch_size={local}").offload
        copies = 12 * numbers * (4 / local) / 25e9
        assert offload == pytest.approx(copies + numbers / 1e9, rel=1e-3)
    once = planned(8, *batches, "--parallel.reduce_every_microbatch=false").offload
    assert once < planned(8, *batches, "--training.local_batch_size=1").offload
    # Two local batches of four microbatches: one copy up each, or five
    pipeline = (*batches, "--parallel.pp=2", "--training.local_batch_size=4")
    kept = planned(8, *pipeline).offload
    freed = planned(8, *pipeline, "--parallel.reshard_after_forward=always").offload
    seconds = kept / (2 * 2 * 4 / 25e9 + 1 / 1e9) * 4 / 25e9  # of a copy
    assert freed - kept == pytest.approx(2 * 4 * seconds, rel=1e-3)


def test_a_budget_of_memory_is_between_none_and_full():
    none = planned(8, "--recompute.mode=none")
    full = planned(8, "--recompute.mode=full")
    for budget in (1.0, 0.5, 0.0):
        some = planned(8, "--recompute.mode=memory_budget", f"--recompute.budget={budget}")
        for part in ("products", "attention", "pointwise"):
            expected = budget * none.parts[part] + (1 - budget) * full.parts[part]
            assert some.parts[part] == pytest.approx(expected, rel=1e-3)


def test_small_layers_wait_for_the_host():
    tiny = planned(8, "--model.dim=512", "--model.ffn_dim=1024", "--training.seq_len=512")
    assert tiny.host > 0.3 * tiny.total
    large = planned(8)
    assert large.host < 1e-3 * large.total


def test_cpu_and_gpu_that_take_equally_long_wait_for_each_other():
    """Cubes are added: equal times take 2^(1/3) of one."""
    config, llama = load_config(["llama3_8b"]), resolve_flavor(load_config(["llama3_8b"]).model, 0)
    work = work_of(estimate(config, llama, 8), H100, config, llama)
    gpu = sum(timed(work, replace(FULL_SPEED, host_ms=0.0), 1.0, config).values())
    waits = timed(work, replace(FULL_SPEED, host_ms=0.0), 1.0, config)
    on_device = sum(waits[name] for name in ("products", "attention", "pointwise"))
    even = replace(FULL_SPEED, host_ms=1e3 * on_device / work.launches)
    parts = timed(work, even, 1.0, config)
    assert parts["host"] == pytest.approx((2 ** (1 / 3) - 1) * on_device)
    assert sum(parts.values()) == pytest.approx(gpu + parts["host"])


def test_each_message_of_a_pipeline_is_launched():
    """A middle rank sends 2 and receives 2 per microbatch, each a fifth of a block."""
    config = load_config(["llama3_8b", "--parallel.pp=4", "--training.local_batch_size=8"])
    config = replace(config, training=replace(config.training, global_batch_size=16))
    llama = resolve_flavor(config.model, 0)
    work = work_of(estimate(config, llama, 8), H100, config, llama)
    assert work.messages == 4 * 8
    assert work.launches > 0
    rates = replace(FULL_SPEED, host_ms=1e6)  # the CPU is by far the slowest
    parts = timed(work, rates, 1.0, config)
    launching = (work.launches + 0.2 * work.messages) * 1e3
    working = sum(parts.values()) - parts["bubble"] - parts["sharding"] - parts["messages"]
    assert working - parts["optimizer"] == pytest.approx(launching, rel=1e-3)


def test_older_attention_kernels_are_slower_on_newer_gpus():
    """FlashAttention 2 has the speed of an H100 on a B200, which has 2.28 times the peak."""
    assert attention_part(FASTEST, "hopper") == attention_part("flash2", "ampere") == 1.0
    assert 1 / 2.0 <= attention_part("flash2", "hopper") <= 1 / 1.5
    blackwell = attention_part("flash2", "blackwell")
    assert blackwell * 2250 == pytest.approx(attention_part("flash2", "hopper") * 989)
    assert attention_part("flex", "ampere") == 0.85
    assert attention_part("triton", "hopper") < attention_part("flash2", "hopper")
    whole = planned(8).attention
    assert planned(8, "--data.document_mask=true").attention > 1.5 * whole


def test_a_machine_of_the_user_has_the_rates_of_its_base():
    lab = replace(H100, name="lab")
    assert rates_of(lab) == Rates()
    assert rates_of(replace(lab, base="H200")) == Rates(*FITTED["H200"].rates) != Rates()
