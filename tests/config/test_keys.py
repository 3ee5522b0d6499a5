"""Keys: what the schema declares, by name."""

from __future__ import annotations

from titanlite.config.keys import all_keys, keys_of, schema_keys, setting
from titanlite.config.schema import Config, PhaseConfig


def test_every_key_has_the_type_of_its_default():
    assert list(schema_keys()) == all_keys()
    for name, key in schema_keys().items():
        assert setting(Config(), name) == key.default
        if key.default is None:  # absent: the flavor's value
            assert name.startswith("model."), name
        elif key.kind is not list:
            assert type(key.default) is key.kind, name


def test_kinds_of_keys():
    keys = schema_keys()
    assert keys["optimizer.betas"].kind is tuple
    assert keys["data.phases"].kind is list
    assert not keys["data.phases"].is_list_of_strings
    assert keys["validation.prompts"].is_list_of_strings
    assert keys["compile.loss"].words == ("auto", "true", "false")
    assert keys["compile.enabled"].words == ("auto", "true", "false")
    assert keys["training.steps"].words == ()
    assert list(keys_of(PhaseConfig)) == ["from_step", "from_tokens", "weights"]
