"""The examples and pictures of the documents: what they print is what they show."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from fractions import Fraction
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import get_schedule_class

from docs.draw_schedule import (
    SCHEDULES,
    Task,
    bubble,
    draw,
    idle_time,
    place_in_slots,
    place_in_time,
    rank_orders,
)
from docs.settings_table import PAGE as CHECKPOINTS
from docs.settings_table import with_table
from titanlite.checkpoint.manifest import MAX_BYTES
from titanlite.config.keys import all_keys
from titanlite.config.schema import sections
from titanlite.distributed.torch_private import pipeline_stage_class
from titanlite.parallel.stage_split import stage_indices
from titanlite.tools.cli.main import main
from titanlite.tools.verify.ladder import ladder

DOCS = Path(__file__).parents[1] / "docs"
PARALLELISM = (DOCS / "parallelism.md").read_text()


def output_of(command: str) -> str:
    """What docs/parallelism.md shows as the output of a command."""
    (shown,) = re.findall(rf"```\n\$ {re.escape(command)}\n(.*?)```", PARALLELISM, re.DOTALL)
    return shown.strip()


def test_the_table_of_the_schedule_is_what_the_command_prints(capsys):
    text = (DOCS / "schedules.md").read_text()
    ((command, shown),) = re.findall(r"```\n\$ titanlite (plan .*?)\n(.*?)```", text, re.DOTALL)
    assert main(shlex.split(command)) == 0
    assert f"\n\n{shown.strip()}\n\n" in capsys.readouterr().out


def run_example(code: str) -> str:
    """Runs the example in a process group that exists already; returns what it prints."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as output,
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        exec(compile(code, "docs/parallelism.md", "exec"), {})
    return output.getvalue()


def test_the_example_of_collectives_prints_what_the_text_shows(pool):
    (code,) = re.findall(r"```python\n(.*?)```", PARALLELISM, re.DOTALL)
    printed = [text.strip() for text in pool.run(2, run_example, code)]
    assert "\n".join(printed) == output_of("torchrun --nproc-per-node 2 example.py")


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ("", ("1F1B", 2, 4, 1)),
        (" --schedule Interleaved1F1B --stages 2", ("Interleaved1F1B", 2, 4, 2)),
    ],
)
def test_pictures_of_schedules_are_drawn_from_the_schedules(options, arguments):
    slots = place_in_slots(rank_orders(*arguments))
    shown = output_of(f"python docs/draw_schedule.py{options}")
    assert shown == f"{draw(slots)}\nidle: {bubble(slots)} of all slots"


SIZES = [(1, 3), (2, 2), (2, 4), (2, 7), (3, 6), (4, 4), (4, 8), (8, 16)]
CASES = [
    (name, *size) for name in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS") for size in SIZES
]
CASES.remove(("Interleaved1F1B", 2, 7))  # the formula is for a multiple of pp


@pytest.mark.parametrize(("schedule", "pp", "microbatches"), CASES)
def test_the_bubble_is_that_of_the_formula(schedule, pp, microbatches):
    stages = 1 if schedule in ("GPipe", "1F1B") else 2
    slots = place_in_slots(rank_orders(schedule, pp, microbatches, stages))
    assert bubble(slots) == Fraction(pp - 1, stages * microbatches + pp - 1)
    assert len({len(row) for row in slots}) == 1
    # A backward that takes twice as long as a forward leaves as much idle
    assert idle_time(place_in_time(rank_orders(schedule, pp, microbatches, stages))) == bubble(
        slots
    )


def test_an_order_that_waits_for_itself_is_refused():
    with pytest.raises(ValueError, match="every rank waits"):
        place_in_time([[Task("B", 0, 0), Task("F", 0, 0)]])


class OneWeight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.one


class RecordingStage(pipeline_stage_class()):
    """Notes which of its microbatches a schedule has it compute."""

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        self.tasks.append(Task("F", self.stage_index, fwd_chunk_id))
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id, *args, full_backward=True, **kwargs):
        self.tasks.append(Task("B" if full_backward else "I", self.stage_index, bwd_chunk_id))
        super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id, *args, **kwargs):
        self.tasks.append(Task("W", self.stage_index, bwd_chunk_id))
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


def order_of_run(schedule: str, microbatches: int, stages_per_rank: int) -> list[Task]:
    """The order in which torch's schedule computes on this rank."""
    rank, pp, tasks = dist.get_rank(), dist.get_world_size(), []
    example = torch.zeros(1, 1, device="meta", requires_grad=True)
    stages = [
        RecordingStage(
            OneWeight(),
            stage,
            pp * stages_per_rank,
            torch.device("cpu"),
            input_args=example,
            output_args=example,
        )
        for stage in stage_indices(rank, pp, stages_per_rank, schedule)
    ]
    for stage in stages:
        stage.tasks = tasks
    cls = get_schedule_class(schedule)
    single = schedule in ("GPipe", "1F1B")
    run = cls(
        stages[0] if single else stages,
        n_microbatches=microbatches,
        loss_fn=lambda x, y: (x - y).sum(),
    )
    numbers = torch.arange(float(microbatches))[:, None]
    has_loss = any(stage.is_last for stage in stages)
    run.step(*[numbers] * (rank == 0), target=numbers if has_loss else None, losses=[])
    return tasks


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_drawn_order_is_the_order_in_which_torch_runs(pool, schedule):
    stages = 1 if schedule in ("GPipe", "1F1B") else 2
    assert pool.run(2, order_of_run, schedule, 4, stages) == rank_orders(schedule, 2, 4, stages)


def test_the_settings_that_a_resumed_run_shares_are_those_of_the_schema():
    text = CHECKPOINTS.read_text()
    assert "| cannot change | the model's shape; `optimizer.name`, " in text
    assert with_table(text) == text, "run python -m docs.settings_table"


def test_the_largest_manifest_is_that_of_the_code():
    text = (DOCS.parent / "SECURITY.md").read_text()
    assert f"the manifest of a checkpoint may have {MAX_BYTES >> 20} MB" in text


def test_the_pages_have_the_number_of_layouts_of_the_quick_ladder():
    number = len(list(ladder(4, True, "cpu")))
    readme = (DOCS.parent / "README.md").read_text()
    assert f"compares {number} parallel layouts with one process" in readme
    assert f"# {number} layouts: " in (DOCS.parent / "AGENTS.md").read_text()


def test_each_result_of_a_benchmark_is_cited_and_names_a_program_that_exists_or_a_commit():
    results = DOCS.parent / "benchmarks/results"
    pages = [*DOCS.glob("*.md"), DOCS.parent / "README.md"]
    pages.append(DOCS.parent / "titanlite/tools/plan/estimate_memory.py")
    cited = "".join(page.read_text() for page in pages)
    for path in results.iterdir():
        assert f"{path.stem}." in cited, path.name
        command = r"command: `?(at commit [0-9a-f]{8}, )?python benchmarks/(\w+)\.py"
        for commit, program in re.findall(command, path.read_text()):
            assert commit or (results.parent / f"{program}.py").exists(), path.name


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = [
    *sorted(DOCS.parent.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted((DOCS.parent / "learn").rglob("*.md")),
]


@pytest.mark.parametrize("document", PAGES, ids=lambda path: str(path.relative_to(DOCS.parent)))
def test_links_of_documents_lead_somewhere(document):
    prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", prose):
        if link.startswith("https://"):
            continue
        target = document.parent / link if link else document
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}#{anchor}"


def linked(page: Path) -> set[Path]:
    """The pages that a page links to."""
    links = re.findall(r"\]\(([^)#]+\.md)", page.read_text())
    return {(page.parent / link).resolve() for link in links if "://" not in link}


def test_every_page_can_be_reached_from_the_readme():
    seen: set[Path] = set()
    waiting = {DOCS.parent / "README.md"}
    while waiting:
        page = waiting.pop()
        seen.add(page)
        waiting |= linked(page) - seen
    assert set(PAGES) <= seen


def test_each_page_stands_in_the_map_once():
    links = re.findall(r"\]\(([^)#]+)", (DOCS / "README.md").read_text())
    assert len(set(links)) == len(links)
    assert {path.name for path in DOCS.glob("*.md")} - {"README.md"} <= set(links)


def test_the_picture_of_four_layouts_is_drawn_from_the_stored_losses():
    newest = max((DOCS.parent / "benchmarks/results").glob("*-four_layouts.json"))
    layouts = json.loads(newest.read_text())["results"]["layouts"]
    picture = (DOCS / "images/four_layouts.svg").read_text()
    assert len(layouts) == 4
    assert all(f">{name}</text>" in picture for name in layouts)
    one, *others = layouts.values()
    for losses in others:
        largest = max(abs(a - b) for a, b in zip(losses, one, strict=True))
        assert f"largest: {largest:.3f}</text>" in picture


def test_the_programs_that_are_printed_find_titanlite_where_it_is_not_installed():
    """Those of docs/ are modules of the current folder; others change their path first."""
    root = DOCS.parent
    texts = [*root.glob("*.md"), *DOCS.glob("*.md"), *DOCS.glob("*.py")]
    texts += [*(root / "benchmarks").glob("*.py"), *(root / "learn").rglob("*.py")]
    printed = set()
    for text in texts:
        printed |= set(re.findall(r"(?<!=\. )python ((?:[a-z]+/)+\w+\.py)", text.read_text()))
    programs = [name for name in printed if (root / name).exists()]
    assert len(programs) > 20
    for name in programs:
        source = (root / name).read_text()
        first = re.search(r"^(import report|sys\.path|(from|import) titanlite)", source, re.M)
        assert not first or "titanlite" not in first[0], name


SYMPTOMS = (DOCS / "symptoms.md").read_text()


def test_the_keys_that_the_symptoms_name_exist():
    named = set(re.findall(rf"`((?:{'|'.join(sections())})\.[a-z_]+)", SYMPTOMS))
    assert len(named) > 50
    assert named <= set(all_keys())


def test_the_columns_that_show_a_symptom_are_columns_of_a_run():
    described = (DOCS / "metrics.md").read_text() + (DOCS / "measures.md").read_text()
    described += (DOCS / "running.md").read_text()
    files = {"hang/", "log.txt", "events.jsonl", "checkpoints/"}
    for section in SYMPTOMS.split("\n## ")[1:]:
        (look_at,) = re.findall(r"^Look at: (.*?)\n\n", section, re.MULTILINE | re.DOTALL)
        names = re.findall(r"`([^` ]+)`", look_at)
        assert names, section
        for name in names:
            assert name in (*files, *all_keys()) or f"`{name}`" in described, name
    assert len(re.findall(r"^\| .* \|$", SYMPTOMS, re.MULTILINE)) > 60
