"""The schema: what it says agrees with what it describes."""

from __future__ import annotations

import dataclasses

from titanlite.config.schema import sections
from titanlite.model.flavors import FLAVORS


def test_flavor_choices_are_the_flavors():
    (field,) = [f for f in dataclasses.fields(sections()["model"]) if f.name == "flavor"]
    assert set(field.metadata["choices"]) == set(FLAVORS)
