"""The YAML of `accelerate config`."""

from __future__ import annotations

import pytest
from foreign_configs import ACCELERATE, imported, values


def test_fsdp2_with_offload(tmp_path):
    config, draft = imported(tmp_path, "accelerate")
    names = (
        "parallel.reshard_after_forward parallel.cpu_offload recompute.mode training.compute_dtype"
    )
    assert values(config, names) == ["never", True, "full", "bfloat16"]
    assert draft.lacks == []
    assert draft.processes == 8


@pytest.mark.parametrize(
    ("added", "names", "expected"),
    [
        ("distributed_type: MULTI_GPU", "parallel.dp_replicate parallel.dp_shard", [-1, 1]),
        ("mixed_precision: fp8", "training.compute_dtype float8.enabled", ["bfloat16", True]),
        ("mixed_precision: 'no'", "training.compute_dtype", ["float32"]),
        ("fsdp_config:\n  fsdp_sharding_strategy: 1", "parallel.reshard_after_forward", ["always"]),
        ("fsdp_config:\n  fsdp_reshard_after_forward: SHARD_GRAD_OP", "parallel.reshard_after_forward", ["never"]),
        ("deepspeed_config:\n  zero_stage: 3\n  offload_param_device: cpu\n  gradient_clipping: 0.5",
         "parallel.reshard_after_forward parallel.cpu_offload training.max_norm", ["always", True, 0.5]),
        ("parallelism_config:\n  parallelism_config_tp_size: 2\n  parallelism_config_cp_size: 4",
         "parallel.tp parallel.cp", [2, 4]),
        ("megatron_lm_config:\n  megatron_lm_tp_degree: 2\n  megatron_lm_recompute_activations: true",
         "parallel.tp recompute.mode", [2, "selective"]),
        ("dynamo_config:\n  dynamo_backend: INDUCTOR\nuse_cpu: true",
         "compile.enabled compile.backend run.device", ["true", "inductor", "cpu"]),
    ],
)  # fmt: skip
def test_other_settings(added, names, expected, tmp_path):
    text = f"compute_environment: LOCAL_MACHINE\nnum_processes: 2\n{added}\n"
    config, _ = imported(tmp_path, "accelerate", text)
    assert values(config, names) == expected


def test_hybrid_sharding_and_accumulation_are_decisions(tmp_path):
    text = ACCELERATE.replace(
        "fsdp_reshard_after_forward: false", "fsdp_sharding_strategy: HYBRID_SHARD"
    )
    _, draft = imported(tmp_path, "accelerate", text + "gradient_accumulation_steps: 4\n")
    said = "\n".join(draft.decisions)
    for word in ("parallel.dp_replicate", "gradient_accumulation_steps = 4"):
        assert word in said
