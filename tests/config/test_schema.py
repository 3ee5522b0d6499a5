"""The schema: what it says agrees with what it describes."""

from __future__ import annotations

import dataclasses
import typing

from titanlite.config.schema import FROM_CHECKPOINT, sections
from titanlite.model.flavors import FLAVORS


def test_flavor_choices_are_the_flavors():
    (field,) = [f for f in dataclasses.fields(sections()["model"]) if f.name == "flavor"]
    assert set(field.metadata["choices"]) == {*FLAVORS, FROM_CHECKPOINT}


def test_defaults_have_the_type_of_their_key():
    """An int where a float belongs becomes an integer tensor, or is written to TOML as another
    type.
    """
    checked = 0
    for name, section in sections().items():
        types = typing.get_type_hints(section)
        for field, default in vars(section()).items():
            if default is None:  # absent: the flavor's value
                assert type(None) in typing.get_args(types[field])
                continue
            expected = typing.get_origin(types[field]) or types[field]
            assert type(default) is expected, (
                f"{name}.{field} = {default!r}: expected {expected.__name__}"
            )
            checked += 1
    assert checked > 100
