"""Configuration: what is read, what is refused, and how it is said."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from fuzz_samples import TOML, Reader, given
from messages import assert_mentions

from titanlite.config.keys import all_keys
from titanlite.config.load import flavors, load_config
from titanlite.config.schema import FROM_CHECKPOINT, Config
from titanlite.config.to_toml import to_toml
from titanlite.model.flavors import FLAVORS, resolve_flavor
from titanlite.rules.check import check_layout
from titanlite.runtime.errors import ConfigError


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(list(argv))
    return caught.value.problems


@pytest.fixture
def toml(tmp_path):
    """Writes a TOML file and returns its path."""

    def write(text: str, name: str = "run.toml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("flavor", flavors())
def test_every_flavor_loads_and_its_resolved_form_reads_back_equal(flavor, toml):
    config = load_config([flavor])
    assert config.run.name == flavor
    assert config.model.flavor in {*FLAVORS, FROM_CHECKPOINT}
    assert load_config([toml(to_toml(config))]) == config


def test_defaults_base_file_and_command_line_in_this_order(toml):
    toml(
        "[training]\nsteps = 5\nseq_len = 32\n[optimizer]\nlr = 1\nbetas = [0.8, 0.9]\n",
        "first.toml",
    )
    toml('base = "first.toml"\n[training]\nseq_len = 64\n', "second.toml")
    config = load_config(
        [toml('base = "second.toml"\n[training]\nlocal_batch_size = 8\n'), "--training.steps=7"]
    )
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (
        7,
        64,
        8,
    )
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.optimizer.eps == 1e-8
    assert config.run.name == "run"


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--training.steps=12"], "training.steps", 12),
        (["--training.steps", "1_000"], "training.steps", 1000),
        (["--training.steps=2.5e3"], "training.steps", 2500),
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 1e-3),
        (["--optimizer.betas=[0.5, 0.6]"], "optimizer.betas", (0.5, 0.6)),
        (["--float8.enabled"], "float8.enabled", True),
        (["--float8.enabled", "--training.steps=3"], "float8.enabled", True),
        (["--compile.enabled"], "compile.enabled", "true"),
        (["--compile.enabled", "False"], "compile.enabled", "false"),
        (["--compile.enabled=auto"], "compile.enabled", "auto"),
        (["--parallel.reduce_every_microbatch=false"], "parallel.reduce_every_microbatch", False),
        (
            ["--parallel.reduce_every_microbatch", "False"],
            "parallel.reduce_every_microbatch",
            False,
        ),
        (["--parallel.dp_shard", "-1"], "parallel.dp_shard", -1),
        (["--float8.skip=a = b"], "float8.skip", "a = b"),
        (["--run.name=7"], "run.name", "7"),
        (["--optimizer.lr=.1"], "optimizer.lr", 0.1),
        (["--optimizer.lr=+1E-3"], "optimizer.lr", 1e-3),
        (["--metrics.sinks=wandb, tensorboard,wandb"], "metrics.sinks", ("wandb", "tensorboard")),
        (['--metrics.sinks=["mlflow"]'], "metrics.sinks", ("mlflow",)),
        (["--metrics.sinks", "mlflow"], "metrics.sinks", ("mlflow",)),
        (["--metrics.sinks="], "metrics.sinks", ()),
    ],
)
def test_command_line_forms(argv, key, value):
    section, name = key.split(".")
    assert getattr(getattr(load_config(["debug", *argv]), section), name) == value


def test_a_flag_does_not_swallow_the_config():
    assert load_config(["--float8.enabled", "cpu_25m"]).run.name == "cpu_25m"
    assert load_config(["--compile.enabled", "cpu_25m"]).run.name == "cpu_25m"


def test_a_switch_takes_true_and_false_of_toml(toml):
    for text, value in (
        ("true", "true"),
        ("false", "false"),
        ('"auto"', "auto"),
        ('"true"', "true"),
    ):
        assert load_config([toml(f"[compile]\nenabled = {text}\n")]).compile.enabled == value


def test_a_list_of_names_in_a_file(toml):
    config = load_config([toml('[metrics]\nsinks = ["tensorboard", "mlflow"]\n')])
    assert config.metrics.sinks == ("tensorboard", "mlflow")
    assert 'sinks = ["tensorboard", "mlflow"]\n' in to_toml(config)
    assert load_config([toml(to_toml(config))]) == config
    found = problems(toml('[metrics]\nsinks = ["tensorboard", "tensorflow", 3]\n'))
    for problem, what in zip(found, ('sinks[2] = "tensorflow"', "sinks[3] = 3"), strict=True):
        assert_mentions(problem, "run.toml:2", what, "tensorboard, wandb, mlflow")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--training.steps=0", ("training.steps = 0", "integer", "at least 1")),
        ("--training.steps=1.5", ("training.steps = 1.5", "integer")),
        ("--training.steps=true", ('training.steps = "true"', "integer")),
        ("--training.steps=", ('training.steps = ""', "integer")),
        ("--training.steps", ("--training.steps", "missing", "integer")),
        ("--float8.enabled=1", ("float8.enabled = 1", "true or false")),
        ("--compile.enabled=1", ('compile.enabled = "1"', "auto, true, false")),
        ("--compile.enabled=ture", ('compile.enabled = "ture"', "auto, true, false", "did you mean true?")),
        ("--optimizer.lr=nan", ("optimizer.lr = NaN", "number", "at least 0")),
        ("--optimizer.agc_factor=0", ("optimizer.agc_factor = 0", "number", "at least 1e-06")),
        ("--optimizer.lr=inf", ("optimizer.lr = Infinity", "finite number")),
        ("--optimizer.betas=" + "[" * 100_000, ("optimizer.betas", "list of two numbers")),
        ("--run.seed=99999999999999999999", ("run.seed = 99999999999999999999", "integer", "at least 0", "at most 9223372036854775807")),
        ("--float8.skip=\udcff", ("float8.skip", "UTF-8")),
        ("--training=5", ("--training", "unknown key training", "section", "training.steps")),
        ("--unrelated.thing=5", ("--unrelated.thing", "unknown key unrelated.thing")),
        ("--optimizer.betas=[0.9]", ("optimizer.betas = [0.9]", "list of two numbers")),
        ("--optimizer.betas=[0.9, 1.5]", ("optimizer.betas = [0.9, 1.5]", "list of two numbers", "at least 0", "at most 0.999999")),
        ("--schedule.name=cosin", ('schedule.name = "cosin"', "cosine, linear, wsd, constant", "did you mean cosine?")),
        ("--run.name=../x", ("run.name = '../x'", "folder name")),
        ("--metrics.sinks=wandb,tensorbord", ('metrics.sinks[2] = "tensorbord"', "one of tensorboard, wandb, mlflow", "did you mean tensorboard?")),
        ("--metrics.sinks", ("--metrics.sinks", "missing", "list of strings")),
        ("--metrics.sinks=3", ('metrics.sinks[1] = "3"', "one of tensorboard, wandb, mlflow")),
        ("--schedule.name", ("--schedule.name", "missing", "one of cosine")),
        ("--training.global_batch_size=7", ("training.global_batch_size = 7", "multiple of training.local_batch_size = 2")),
        ("--training.lr=3", ("--training.lr", "unknown key", "did you mean optimizer.lr?")),
        ("--checkpoint.zzz=3", ("checkpoint.zzz; [checkpoint] has freq, freq_epochs,",)),
        ("--checkpoint.interval=3", ("--checkpoint.interval", "did you mean checkpoint.freq or validation.freq or")),
        ("--parallelism.tensor_parallel_degree=2", ("tensor_parallel_degree", "did you mean parallel.tp?")),
        ("--help=", ("--help", "unknown key help", "--help SECTION")),
        ("--help=lora", ("--help", "unknown key help", "--help SECTION")),
        ("--steps=3", ("--steps", "unknown key", "did you mean training.steps?")),
        ("steps=3", ("steps=3: ", "--section.key=value", "did you mean training.steps?")),
        ("training.steps=3", ("training.steps=3: ", "did you mean --training.steps=3?")),
    ],
)  # fmt: skip
def test_bad_values_on_the_command_line(argv, expected):
    (problem,) = problems("debug", argv)
    assert_mentions(problem, *expected)
    assert ("did you mean" in problem) == ("did you mean" in "".join(expected))


def test_a_toml_file_is_refused_with_file_and_line_and_all_problems_at_once(toml):
    path = toml(
        '[training]\nsteps = "many"\nseqlen = 3\n\n[trainig]\nx = 1\n[optimizer]\nlr = true\nbetas = 3\n'
    )
    expected = [
        (f"{path}:2: ", 'training.steps = "many"', "integer"),
        (f"{path}:3: ", "training.seqlen", "did you mean training.seq_len?"),
        (f"{path}:5: ", "[trainig]", "did you mean training?"),
        (f"{path}:8: ", "optimizer.lr = true", "number"),
        (f"{path}:9: ", "optimizer.betas = 3", "list of two numbers"),
        ("--model.flavour: ", "unknown key model.flavour", "did you mean model.flavor?"),
    ]
    for problem, parts in zip(problems(path, "--model.flavour=debug"), expected, strict=True):
        assert_mentions(problem, *parts)


def test_a_byte_order_mark_and_odd_letters_survive(toml):
    assert load_config([toml("\ufeff[training]\nsteps = 5\n")]).training.steps == 5
    config = load_config(["debug", '--float8.skip=a\x7f\t"é\\'])
    assert load_config([toml(to_toml(config))]) == config


def test_files_are_kept_as_absolute_paths(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load_config(["debug", "--data.path=text/a.txt"]).data.path == str(
        tmp_path / "text/a.txt"
    )
    assert load_config(["debug"]).data.path == ""


def test_a_run_is_where_its_folder_is(tmp_path, monkeypatch):
    """A copied run goes on in the copy, and a step's folder, which has a config too, is no run."""
    folder = tmp_path / "outputs/copy"
    step = folder / "checkpoints/step-4"
    step.mkdir(parents=True)
    text = to_toml(load_config(["debug", "--training.steps=7", "--run.name=first"]))
    for place in (folder, step):
        (place / "config.toml").write_text(text)
    (folder / "log.txt").touch()
    monkeypatch.chdir(tmp_path)
    config = load_config(["outputs/copy/"])
    assert (config.run.folder, config.run.name, config.training.steps) == ("outputs", "copy", 7)
    assert load_config(["outputs/copy", "--run.name=other"]).run.name == "other"
    assert load_config(["outputs/copy/config.toml"]).run.name == "first"
    assert_mentions(problems(str(step))[0], "no such file", "a run's folder")
    monkeypatch.chdir(folder)
    config = load_config(["."])
    assert (config.run.folder, config.run.name) == (str(folder.parent), "copy")


def test_files_that_cannot_be_read(toml, tmp_path):
    assert "no such file" in problems("x" * 300)[0]
    (problem,) = problems("debgu")
    assert "did you mean debug?" in problem
    assert "no such file" in problems(str(tmp_path / "absent.toml"))[0]
    assert "line 1" in problems(toml("[training\n"))[0]
    loop = toml('base = "run.toml"\n')
    assert_mentions(problems(loop)[0], "base", "run.toml", "itself")
    toml("", "other.toml")
    assert "did you mean other.toml?" in problems(toml('base = "othr.toml"\n'))[0]
    assert_mentions(problems("debug", "cpu_25m")[0], "one config", "2", "debug, cpu_25m")
    assert_mentions(problems(toml("training = 3\n"))[0], "training", "section", "[training]")


def misspellings(word: str):
    """The word with each letter left out, doubled, replaced, and swapped with the next."""
    for i in range(len(word)):
        yield word[:i] + word[i + 1 :]
        yield word[:i] + word[i] + word[i:]
        yield word[:i] + ("x" if word[i] != "x" else "y") + word[i + 1 :]
        if i + 1 < len(word) and word[i] != word[i + 1]:
            yield word[:i] + word[i + 1] + word[i] + word[i + 2 :]


@pytest.mark.parametrize("key", all_keys())
def test_every_key_mistyped_by_one_character_is_suggested(key):
    keys = all_keys()
    typos = sorted({typo for typo in misspellings(key) if typo not in keys})
    found = problems("debug", *(f"--{typo}=1" for typo in typos))
    messages = {line.split(":")[0][2:]: line for line in found if "unknown key" in line}
    for typo in typos:
        named = messages[typo].partition("did you mean ")[2].removesuffix("?").split(" or ")
        # `training.lobal_batch_size` is one letter from two keys, `parallel.p` from four: all are
        # named
        alike = (
            {"parallel.pp", "parallel.cp", "parallel.tp", "parallel.ep"}
            if key[-2:] in ("pp", "cp", "tp", "ep")
            else {key}
        )
        assert named == [key] or (key in named and ("batch_size" in key or set(named) <= alike)), (
            messages[typo]
        )


def test_a_mistake_is_found_fast_and_without_torch():
    code = (
        "import sys, time; from titanlite.tools.cli.main import main;"
        "code = main(['train', 'debug', '--training.stpes=3']);"
        "print(code, 'torch' in sys.modules, time.process_time())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    exit_code, imported, seconds = result.stdout.split()
    assert (exit_code, imported) == ("2", "False")
    assert float(seconds) < 1
    assert "did you mean training.steps?" in result.stderr


@pytest.mark.parametrize(
    "text",
    [
        "[training]\nsteps = 1" + "0" * 400,
        "[training]\nsteps = 1" + "0" * 5000,
        "[training]\nsteps = " + "[" * 5000 + "]" * 5000,
        "a = " + "[" * 100_000,
        '[run]\nname = "a\\u0000b"',
        '[run]\nname = "\\u001b[2J"',
        '[data]\npath = "a\\u0000b"',
        '[training]\n"steps\\nerror: forged" = 1',
        '[training]\n"\\u001b[31msteps" = 1',
        "\udcff",
    ],
    ids=range(10),
)
def test_harmful_files_are_one_printable_line(tmp_path, text):
    path = tmp_path / "x.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        load_config([str(path)])
    assert len(caught.value.problems) == 1
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.slow
def test_thousands_of_unknown_keys_take_seconds_not_minutes():
    """The time grows with their number, not with its square."""
    seconds = []
    for count in (500, 5000):
        options = [f"--compile.enabled{number}=1" for number in range(count)]
        started = time.process_time()
        with pytest.raises(ConfigError) as caught:
            load_config(options)
        seconds.append(time.process_time() - started)
        assert len(caught.value.problems) == count
    assert seconds[1] < 30 * seconds[0]


def use(config: Config) -> None:
    to_toml(config)
    check_layout(config, resolve_flavor(config.model, 4112), 1)


def read_toml(folder: Path, data: bytes) -> None:
    (folder / "run.toml").write_bytes(data)
    (folder / "base.toml").write_bytes(b"[run]\nseed = 1\n")
    use(load_config([str(folder / "run.toml")]))


def read_arguments(folder: Path, data: bytes) -> None:
    arguments = data.decode("utf-8", "surrogateescape").split("\n")  # as the system gives them
    use(load_config(arguments))


SHORT = b"""base = "base.toml"
[training]
steps = 10
seq_len = 64
[optimizer]
betas = [0.9, 0.95]
"""
ARGUMENTS = b"""debug
--training.steps=100
--training.seq_len
64
--compile.enabled
--optimizer.betas=[0.9, 0.95]"""
FUZZED = {
    "TOML": Reader("text", given(TOML, SHORT), read_toml, names_files=True),
    "command line": Reader("text", given(ARGUMENTS), read_arguments, names_files=True),
}
