"""Private names of torch: they exist, do what is said of them, and no other file uses any."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import flop_registry

from titanlite.distributed import torch_private
from titanlite.tools import torch_private as of_tools

ROOT = Path(__file__).parents[2]
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
FILES = [ROOT / "train.py", *sorted((ROOT / "titanlite").rglob("*.py"))]


def private_names(path: Path) -> list[str]:
    """Names of torch with an underscore before a part, in imports and in expressions; not in
    strings or comments.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif (
            isinstance(node, ast.Attribute) and (text := ast.unparse(node)).split(".")[0] == "torch"
        ):
            found.append(text)
    return [name for name in found if re.search(r"\._(?!_)", name)]


def test_no_other_file_uses_a_private_name_of_torch():
    using = {str(path.relative_to(ROOT)): names for path in FILES if (names := private_names(path))}
    allowed = {f"titanlite/{room}/torch_private.py" for room in ("distributed", "tools")}
    assert set(using) == allowed, using


@pytest.mark.parametrize("module", [torch_private, of_tools])
def test_each_function_names_the_releases_it_was_checked_on(module):
    for name, function in vars(module).items():
        if getattr(function, "__module__", None) == module.__name__:
            assert re.search(r"2\.1[135]", function.__doc__ or ""), name


def public_twins() -> list[tuple[tuple[int, int], str, str]]:
    """The table in the header of torch_private.py: from which release on, private name, twin."""
    lines = re.findall(r"^    2\.(\d+) +(\S+) +(torch\S+)$", torch_private.__doc__, re.MULTILINE)
    return [((2, int(minor)), private, public) for minor, private, public in lines]


def oldest_torch() -> tuple[int, int]:
    requirement = re.search(r'"torch>=2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    return 2, int(requirement[1])


def test_no_private_name_is_kept_that_the_oldest_torch_has_in_public():
    oldest, code = oldest_torch(), Path(torch_private.__file__).read_text().split('"""', 2)[2]
    assert f"oldest release that is supported is 2.{oldest[1]};" in torch_private.__doc__
    assert len(public_twins()) >= 4
    for since, private, public in public_twins():
        assert private in code, f"{private} is gone: take it out of the table"
        assert since > oldest, f"the oldest torch has {public}: use it in place of {private}"
        if since <= TORCH:
            functools.reduce(getattr, public.split(".")[1:], torch)
            print(f"torch {torch.__version__} has {public}, for {private}")


def test_operators_on_lists_and_operators_by_name():
    a, b = [torch.ones(2), torch.ones(3)], [torch.full((2,), 2.0), torch.full((3,), 2.0)]
    torch_private.foreach_add_(a, 1.0)
    torch_private.foreach_mul_(a, 2.0)
    torch_private.foreach_lerp_(a, b, 0.5)
    torch_private.foreach_addcmul_(a, b, b, 1.0)
    torch_private.foreach_div_(a, 7.0)
    torch_private.foreach_addcdiv_(a, b, b, 1.0)
    assert all(torch.equal(x, torch.full_like(x, 2.0)) for x in a)
    assert torch_private.foreach_sqrt([torch.full((2,), 9.0)])[0].tolist() == [3.0, 3.0]
    assert float(torch_private.foreach_norm([torch.tensor([3.0, 4.0])], 2)[0]) == 5.0
    torch_private.foreach_copy_(a, [torch.zeros(2), torch.zeros(3)])
    assert not any(x.any() for x in a)
    for name in ("REDUCE_SCATTER", "WAIT_TENSOR", "SHARD_ALL_TO_ALL", "SCALED_MM"):
        assert isinstance(getattr(torch_private, name), torch._ops.OpOverload), name
    kinds = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
    assert all(isinstance(operator, kinds) for operator in torch_private.FUSED_ATTENTION)


def test_the_kernel_for_all_devices_is_called_past_one_for_a_device():
    with torch.library._scoped_library("titanlite_test", "FRAGMENT") as library:
        library.define("kind(Tensor x) -> Tensor")
        library.impl("kind", lambda x: x + 1, "CompositeExplicitAutograd")
        library.impl("kind", lambda x: x + 2, "CPU")
        operator = torch.ops.titanlite_test.kind.default
        assert operator(torch.zeros(1)) == 2
        assert torch_private.call_kernel(operator, torch.zeros(1)) == 1


def test_scaled_mm_multiplies_float8():
    x, one = torch.eye(16).to(torch.float8_e4m3fn), torch.ones(())
    assert torch.equal(
        torch_private.scaled_mm(x, x.t(), one, one, out_dtype=torch.float32), torch.eye(16)
    )


def test_attention_backend_is_one_of_torchs():
    q = torch.zeros(1, 2, 8, 8)
    assert SDPBackend(torch_private.attention_backend(q, q, q, enable_gqa=False)).name.endswith(
        ("ATTENTION", "MATH")
    )


def store_and_timeout() -> tuple[bytes, bool]:
    store = torch_private.clone_default_store()
    if dist.get_rank() == 0:
        store.set("titanlite/test", "seen")
    torch_private.set_group_timeout(dist.group.WORLD, 5)
    dist.barrier()
    return store.get("titanlite/test"), bool(torch_private.flight_recorder())


def test_store_time_out_and_flight_recorder(pool):
    assert pool.run(2, store_and_timeout) == [(b"seen", True)] * 2


def test_the_compilers_settings():
    torch_private.set_activation_memory_budget(0.5)
    torch_private.set_activation_memory_budget(1.0)
    assert isinstance(torch_private.has_triton_package(), bool)


def attention_flops(kv_heads: int) -> list[int]:
    """FLOPs of the forward and backward of GPUs' attention with 8 query heads, as torch's
    partitioner asks for them.
    """
    q, kv = torch.empty(2, 8, 16, 4, device="meta"), torch.empty(2, kv_heads, 24, 4, device="meta")
    found = []
    for kernel in ("flash", "efficient", "cudnn"):
        forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
        backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward")
        found += [flop_registry[forward](q, kv, kv), flop_registry[backward](q, q, kv, kv)]
    return found


def test_a_memory_budget_counts_attention_with_shared_heads(monkeypatch):
    """torch 2.11 refuses these heads, so that no graph for a GPU was compiled."""
    for operator, formula in list(flop_registry.items()):
        monkeypatch.setitem(flop_registry, operator, formula)
    expected = attention_flops(8)
    try:
        torch_private.set_activation_memory_budget(0.5)
    finally:
        torch_private.set_activation_memory_budget(1.0)
    assert attention_flops(2) == expected
    torch_private.count_grouped_attention()  # also where torch's own formulas do
    assert attention_flops(2) == attention_flops(8) == expected


def test_names_that_only_gpus_use_can_be_imported():
    from torch._inductor import config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    assert callable(enable_symm_mem_for_group)
    assert all(hasattr(inductor, name) for name in torch_private.OVERLAP_TENSOR_PARALLEL)


def test_the_stage_overrides_what_torchs_has():
    stage = torch_private.pipeline_stage_class()
    ours = [one for one in stage.__mro__ if issubclass(one, PipelineStage)]
    parent = ours.pop()
    assert parent is PipelineStage
    names = [name for one in ours for name in vars(one) if not name.startswith("__")]
    missing = {name for name in names if not hasattr(parent, name)}
    # Until 2.13; an attribute of its instances
    assert missing <= {"_get_init_p2p_neighbors_ops", "_inference_mode"}
