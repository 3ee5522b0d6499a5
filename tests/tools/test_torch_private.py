"""Private names of torch that the tools use; what holds of all is in tests/distributed."""

from __future__ import annotations

import torch

from titanlite.tools import torch_private


def test_a_tensor_on_meta_knows_where_its_storage_lies(tmp_path):
    torch.save([torch.arange(3.0), torch.arange(5)], tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    loaded = torch.load(tmp_path / "a.pt", map_location="meta", weights_only=True)
    for tensor, saved in zip(loaded, (torch.arange(3.0), torch.arange(5)), strict=True):
        begin = torch_private.checkpoint_offset(tensor)
        assert content[begin:].startswith(saved.numpy().tobytes())


def test_compiled_graphs_are_counted():
    before = torch_private.num_compiled_graphs()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert torch_private.num_compiled_graphs() == before + 1
