"""config.json: which model it describes, and which it refuses."""

from __future__ import annotations

import dataclasses

import pytest

from titanlite.model.flavors import FLAVORS
from titanlite.tools.formats.huggingface_config import from_config, to_config


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_configuration_of_hugging_face_tells_the_model(flavor, tmp_path):
    config = dataclasses.replace(FLAVORS[flavor], vocab_size=128256)
    fields = to_config(config, 100, "float32", 1, 2)
    assert from_config(tmp_path, fields) == config
