"""Agreement: one rank's finding on all, facts that must be equal, and the first objection of any rank."""

from __future__ import annotations

import torch.distributed as dist
from messages import assert_mentions

from titanlite.config.schema import ConfigError
from titanlite.distributed.agreement import broadcast_from_rank0, first_message, require_agreement


def problems_of(function, *arguments, **facts) -> list[str]:
    try:
        function(*arguments, **facts)
    except ConfigError as error:
        return error.problems
    return []


def disagree() -> tuple[list[str], list[str]]:
    """Problems with equal facts, and with one that differs on the last of the ranks."""
    last = dist.get_rank() == dist.get_world_size() - 1
    equal = problems_of(require_agreement, configuration="a", data="b")
    return equal, problems_of(require_agreement, configuration="c" if last else "a", data="b")


def test_facts_that_differ_are_refused_on_all_ranks_by_name(pool):
    for equal, different in pool.run(3, disagree):
        assert equal == []
        (problem,) = different
        assert_mentions(problem, "rank 2", "configuration", "rank 0")


def find_on_rank_0() -> tuple[int, list[str]]:
    def fail():
        raise ConfigError("only rank 0 knows")

    return broadcast_from_rank0(lambda: 10 + dist.get_rank()), problems_of(broadcast_from_rank0, fail)


def test_what_rank_0_finds_or_refuses_holds_on_all(pool):
    assert pool.run(2, find_on_rank_0) == [(10, ["only rank 0 knows"])] * 2


def object_on_rank_1() -> tuple[str, str]:
    return first_message(""), first_message("no compiler" if dist.get_rank() == 1 else "")


def test_the_first_message_is_the_same_on_all(pool):
    assert pool.run(2, object_on_rank_1) == [("", "rank 1: no compiler")] * 2


def test_alone_a_message_is_itself():
    assert first_message("no compiler") == "no compiler"
