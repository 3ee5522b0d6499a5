"""Lists in a config, and values that change during a run, as text."""

from __future__ import annotations

import pytest
from messages import assert_mentions, refused

from titanlite.config.changes import Change, milestones, read_changes
from titanlite.config.load import load_config
from titanlite.config.schema import PhaseConfig, SourceConfig
from titanlite.config.to_toml import to_toml
from titanlite.runtime.errors import ConfigError

TWO = """
[data]
pattern = "*.txt"

[[data.sources]]
name = "code"
path = "corpus/code.v1"
weight = 3

[[data.sources]]  # its name comes from its path
path = "corpus/web text.jsonl"
field = "body"
validation = "corpus/held-out.jsonl"

[[data.phases]]
from_step = 9000
weights = { code = 0, "web_text" = 0.5 }
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(text: str, *argv: str):
        (tmp_path / "run.toml").write_text(text)
        return load_config(["run.toml", *argv])

    return load


@pytest.fixture
def problems(load):
    def problems(text: str, *argv: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, *argv)
        return caught.value.problems

    return problems


def test_a_wrong_ramp_does_not_hide_other_problems(load):
    with refused(
        "training.batch_ramp", "run.name = '../x'", "data.phases[1].weights: no weight for web_text"
    ):
        load(
            TWO.replace(', "web_text" = 0.5', ""),
            "--training.batch_ramp=3 from nowhere",
            "--run.name=../x",
        )


def test_sources_and_phases(load, tmp_path):
    config = load(TWO, "--data.field=content")
    code, web = config.data.all_sources()
    path = str(tmp_path / "corpus/code.v1")
    assert code == SourceConfig(path, "code", 3.0, "*.txt", "content", "")
    held_out = str(tmp_path / "corpus/held-out.jsonl")
    assert web == SourceConfig(
        str(tmp_path / "corpus/web text.jsonl"), "web_text", 1.0, "*.txt", "body", held_out
    )
    assert config.data.phases == (
        PhaseConfig(from_step=9000, weights=(("code", 0.0), ("web_text", 0.5))),
    )
    assert load(to_toml(config)) == config
    assert hash(config) == hash(load(to_toml(config)))


def test_the_short_form_is_one_source(load):
    (source,) = load('[data]\npath = "a.txt"\n').data.all_sources()
    assert (source.path[-5:], source.pattern, source.field, source.weight) == (
        "a.txt",
        "**/*",
        "text",
        1.0,
    )
    for path, name in (("python-stdlib", "python-stdlib"), ("hf:owner/name", "name")):
        (source,) = load(f'[[data.sources]]\npath = "{path}"\n').data.sources
        assert (source.path, source.name) == (path, name)
    assert load('[[data.sources]]\npath = "a/b.jsonl.gz"\n').data.sources[0].name == "b"


def test_a_later_file_or_the_command_line_replaces_all_sources(load, tmp_path):
    (tmp_path / "base.toml").write_text(TWO.partition("[[data.phases]]")[0])
    config = load('base = "base.toml"\n[[data.sources]]\npath = "other"\n')
    assert [source.name for source in config.data.sources] == ["other"]
    assert load('base = "base.toml"\n', "--data.path=a.txt").data.sources == ()
    (tmp_path / "phases.toml").write_text(TWO)
    section = load('base = "phases.toml"\n', "--data.path=a.txt").data
    assert (section.path[-5:], section.sources, section.phases) == ("a.txt", (), ())
    assert load('base = "base.toml"\n[data]\npath = "b"\n', "--data.tokenizer=c").data.sources == ()


SOURCE = '[[data.sources]]\nname = "{}"\npath = "{}"\n'
A, B = SOURCE.format("a", "x"), SOURCE.format("b", "y")
PHASE = "[[data.phases]]\nfrom_step = 5\nweights = "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{A}wieght = 2\n", ("run.toml:4:", "wieght", "[[data.sources]]", "did you mean weight?")),
        (f"{A}{B}tokenizer = "
         "2\n", ("run.toml:7:", "tokenizer", "path, name, weight, pattern, field, validation")),
        (f"{A}weight = -1\n", ("run.toml:4:", "data.sources[1].weight = -1", "at least 0")),
        (f"{A}weight = nan\n", ("run.toml:4:", "data.sources[1].weight = NaN", "number")),
        (f"{A}weight = inf\n", ("run.toml:4:", "data.sources[1].weight = Infinity", "finite")),
        (f'{A}{B}weight = "2"\n', ("run.toml:7:", 'data.sources[2].weight = "2"', "number")),
        (f"{A}weight = 0\n{B}", ("data.sources[1].weight = 0", "more than 0", "a in a phase")),
        ('[[data.sources]]\nname = "a"\n', ("data.sources[1].path is missing",)),
        (SOURCE.format("a/b", "x"), ('data.sources[1].name = "a/b"', "letters")),
        (A + B + SOURCE.format("a", "z"), ('data.sources[3].name = "a"', "data.sources[1]")),
        (f'[data]\npath = "x"\n{A}', ("run.toml: ", "data.path and data.sources", "only one")),
        ("[data]\nsources = 3\n", ("run.toml:2:", "data.sources = 3", "tables")),
        ("[data]\nsources = [3]\n", ("run.toml", "data.sources[1] = 3", "[[data.sources]]")),
        ("[data.sources]\npath = 3\n", ("data.sources = ", "list of tables")),
        (f"{A}{B}{PHASE}{{ a = 1 }}\n", ("data.phases[1].weights", "no weight for b")),
        (f"{A}{B}{PHASE}{{ a = 1, b = 1, c = 1 }}\n", ("data.phases[1].weights", "name c", "a, b")),
        (f"{A}{B}{PHASE}{{ a = 0, b = 0 }}\n", ("data.phases[1].weights", "all are 0")),
        (f"{A}{B}{PHASE}{{ a = -1, b = 1 "
         "}\n", ("run.toml:9:", "data.phases[1].weights.a = -1", "at least 0")),
        (f"{A}{B}{PHASE}{{ a = true, b = 1 "
         "}\n", ("run.toml:9:", "data.phases[1].weights.a = true", "number")),
        (f"{A}{B}{PHASE}[1, 2]\n", ("run.toml:9:", "data.phases[1].weights = [1, 2]", "table")),
        (f"{A}{B}{PHASE}{{ a = 1, b = 1 }}\nfrom_tokens = "
         "5\n", ("data.phases[1]", "from_step or from_tokens")),
        (f"{A}{PHASE}{{ a = 1 }}\n", ("data.phases", "two [[data.sources]]")),
    ],
)  # fmt: skip
def test_mistakes(problems, text, expected):
    (problem,) = problems(text)
    assert_mentions(problem, *expected)


def test_a_phase_switches_a_source_on(load):
    assert load(f"{A}weight = 0\n{B}{PHASE}{{ a = 1, b = 1 }}\n").data.sources[0].weight == 0


def test_tables_are_not_given_on_the_command_line(problems):
    (problem,) = problems("", '--data.sources=[{"path": "x"}]')
    assert_mentions(problem, "data.sources", "TOML file")
    (problem,) = problems("", "--data.sources.path=x")
    assert_mentions(problem, "unknown key data.sources.path")


def test_the_line_of_a_key_after_a_table_of_another_section(problems):
    (problem,) = problems(f"{A}[training]\npath = 3\n")
    assert_mentions(problem, "run.toml:5:", "unknown key training.path")
    (problem,) = problems(f"{A}pattern = 3\n[data]\ncache = 'x'\n")
    assert_mentions(problem, "run.toml:4:", "data.sources[1].pattern = 3")


def test_the_name_in_an_error_leads_to_the_one_to_accept(load):
    with refused("checkpoint.accept: data.sources", "did you mean data?"):
        load("", "--checkpoint.accept=data.sources")


PROMPTS = '[validation]\nprompts = ["def add(x, y):\\n", "\\"\\u001b,"]\n'


def test_a_list_of_strings(load):
    config = load(PROMPTS)
    assert config.validation.prompts == ("def add(x, y):\n", '"\x1b,')
    assert load(to_toml(config)) == config
    assert load("").validation.prompts == ()
    assert load(PROMPTS, "--validation.prompts=[]").validation.prompts == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('["def add(x, y)", "A"]', ("def add(x, y)", "A")),
        ("def add(X, y)", ("def add(X, y)",)),
        ("7", ("7",)),
        ("", ()),
        ('["[1, 2"]', ("[1, 2",)),
    ],
)
def test_a_list_of_strings_on_the_command_line(load, text, expected):
    """A JSON array, or one string as it is."""
    assert load(PROMPTS, f"--validation.prompts={text}").validation.prompts == expected


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--validation.prompts=[1, 2", ("a list of strings", "[1, 2")),
        ('--validation.prompts=["a", 2]', ("validation.prompts[2] = 2", "a string")),
        ('--validation.prompts=["a\\u0000"]', ("validation.prompts[1]", "NUL")),
        ("--validation.prompts", ("validation.prompts", "a list of strings")),
    ],
)
def test_mistakes_in_a_list_of_strings(problems, argument, expected):
    (problem,) = problems("", argument)
    assert_mentions(problem, *expected)


def test_the_line_of_a_wrong_list_of_strings(problems):
    (problem,) = problems("[validation]\nfreq = 1\nprompts = 3\n")
    assert_mentions(problem, "run.toml:3:", "validation.prompts = 3", "a list of strings")


def test_entries_in_steps_and_in_tokens():
    entries = read_changes("a.b", "32 from step 101, 64 by 8 from 4e9 tokens", "", increments=True)
    assert entries == [Change(32, 0, 101, 0), Change(64, 8, 0, 4_000_000_000)]
    assert milestones("0.5 from step 7") == (Change(0.5, 0, 7, 0),)


@pytest.mark.parametrize(
    "entry", ["", "5", "5 from step 2.5", "5 by 0 from step 9", "1e99 from step 9"]
)
def test_other_text_is_refused(entry):
    with refused(f"a.b = {entry!r}", "expected entries as in `EXAMPLE`"):
        read_changes("a.b", entry, "EXAMPLE", increments=True)


def test_increments_and_the_first_step_are_refused():
    with refused("5 by 1 from step 9", "EXAMPLE"):
        read_changes("a.b", "5 by 1 from step 9", "EXAMPLE")
    with refused("5 from step 1", "expected step 2 or later"):
        read_changes("a.b", "5 from step 1", "EXAMPLE")
