"""The summary beside a trace: sums per name, and communication that computation does not cover."""

from __future__ import annotations

import random
from types import SimpleNamespace

from torch.autograd import DeviceType

from titanlite.observe.hottest import ROWS, covered, length, summary, without


def event(
    name: str, start: float, end: float, device: DeviceType = DeviceType.CUDA, children: tuple = ()
):
    times = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    label = name.startswith("FSDP::")
    return SimpleNamespace(
        name=name,
        device_type=device,
        time_range=times,
        cpu_children=list(children),
        is_user_annotation=label,
    )


def test_kernels_of_a_gpu_are_summed_and_overlap_hides_communication():
    """10 ms of matmul; an all-gather of 8 ms, of which 3 before it; all in two steps."""
    events = [
        event("matmul", 3000, 8000),
        event("matmul", 8000, 13000),
        event("ncclDevKernel_AllGather", 0, 8000),
        event("aten::mm", 0, 20, DeviceType.CPU),  # the host's launch is not the device's work
    ]
    matmul, gather, *_, collective, whole = summary(events, steps=2).splitlines()[1:]
    assert matmul.split() == ["5.000", "55.6%", "1.0", "matmul"]
    assert gather.split() == ["4.000", "44.4%", "0.5", "ncclDevKernel_AllGather"]
    assert collective.split() == ["4.000", "1.500", "0.5", "ncclDevKernel_AllGather"]
    assert whole.split() == ["4.000", "1.500", "all,", "counted", "once"]


def test_on_a_cpu_operators_count_without_those_that_they_call():
    """And without labels, and what launches a collective."""
    inner = event("aten::mm", 1000, 3000, DeviceType.CPU)
    outer = event("aten::linear", 0, 4000, DeviceType.CPU, (inner,))
    label = event("FSDP::forward", 0, 9000, DeviceType.CPU)
    launch = event("c10d::allreduce_", 1900, 9000, DeviceType.CPU)
    text = summary(
        [outer, inner, label, launch, event("gloo:all_reduce", 2000, 6000, DeviceType.CPU)], steps=1
    )
    rows = [line.split() for line in text.splitlines()]
    assert [(row[0], row[-1]) for row in rows[1:4]] == [
        ("4.000", "gloo:all_reduce"), ("2.000", "aten::linear"), ("2.000", "aten::mm"),
    ]  # fmt: skip
    assert rows[-1][:2] == ["4.000", "2.000"]
    assert "FSDP" not in text
    assert "c10d" not in text


def test_rare_kernels_are_one_line():
    lines = summary(
        [event(f"kernel {i}", 10 * i, 10 * i + 1 + i / 100) for i in range(ROWS + 5)], 1
    ).splitlines()
    assert lines[ROWS + 1].endswith(" 5 more")


def test_without_anything_to_show():
    assert "counted once" in summary([], 1)


def test_differences_of_intervals_are_those_of_their_points():
    draw = random.Random(0)
    for _ in range(200):
        sets = [
            [(a, a + draw.randrange(6)) for a in draw.choices(range(30), k=draw.randrange(8))]
            for _ in range(2)
        ]
        points = [{p for start, end in intervals for p in range(start, end)} for intervals in sets]
        unions = [covered(intervals) for intervals in sets]
        assert [length(union) for union in unions] == [len(found) for found in points]
        assert length(without(*unions)) == len(points[0] - points[1])
