"""Every command, started in a folder of data whose author has put Python modules there: none of
them is imported.

The folder has a module for each name of the standard library, of our dependencies and of ours, and
a package that announces itself to torch. Each writes a line to a file when it is imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launches import environment

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    *(
        "titanlite",
        "train",
        "torch",
        "numpy",
        "tiktoken",
        "tiktoken_ext",
        "regex",
        "safetensors",
        "tqdm",
        "tomli",
    ),
    *(
        "tokenizers",
        "transformers",
        "datasets",
        "pyarrow",
        "zstandard",
        "tensorboard",
        "wandb",
        "mlflow",
        "ray",
    ),
    *(
        "pynvml",
        "triton",
        "yaml",
        "jinja2",
        "sympy",
        "networkx",
        "typing_extensions",
    ),
    *("sitecustomize", "usercustomize", "pip", "venv", "setuptools", "ray", "evil"),
}

# What pip installs as the command `titanlite`.
SCRIPT = (
    "import sys\nfrom titanlite.tools.cli.main import main\nif __name__ == '__main__':\n    "
    "sys.exit(main())\n"
)
# The same with parts of a few kilobytes, so that little data gives work to several workers.
SMALL_PARTS = SCRIPT.replace(
    "    sys", "    from titanlite.tools.prepare import job\n    job.PART = 4096\n    sys"
)
# A pool's worker, as Python 3.10 starts it: it does not know the variable
FORK_SERVER = """
from titanlite.runtime import interpreter
from titanlite.tools.verify.pool import Pool
known = interpreter.environment
interpreter.environment = lambda: {name: value for name, value in known().items() if name != "PYTHONSAFEPATH"}
if __name__ == "__main__":
    assert Pool([]).run(1, int, "7") == [7]
"""
COMPILED = """
from titanlite.runtime import interpreter
interpreter.HAS_SAFE_PATH = False
known = interpreter.environment
interpreter.environment = lambda: {name: value for name, value in known().items() if name != "PYTHONSAFEPATH"}
import train
train.process_group.finish(train.run(WORDS))
"""
LAUNCH = """
import titanlite
if __name__ == "__main__":
    overrides = dict(word.removeprefix("--").split("=", 1) for word in WORDS)
    assert titanlite.launch("debug", overrides, processes=2).exit_code == 0
"""
PREPARE = ("prepare", ".", "--pattern", "*.jsonl", "--workers", "2", "--out")


class Folder:
    """A folder of data with hostile modules, and the programs that are started in it."""

    def __init__(self, path: Path, elsewhere: Path) -> None:
        self.path, self.canary = path, elsewhere / "imported"
        elsewhere.mkdir()
        self.script = elsewhere / "titanlite"
        self.script.write_text(SCRIPT)
        self.small_parts = elsewhere / "small_parts"
        self.small_parts.write_text(SMALL_PARTS)
        path.mkdir()
        for name in PACKAGES | sys.stdlib_module_names:
            self.plant(name)
        announced = path / "evil-1.0.dist-info"
        announced.mkdir()
        (announced / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
        (announced / "entry_points.txt").write_text("[torch.backends]\nevil = evil:load\n")
        lines = "".join(
            json.dumps({"text": f"line {i} of some text that is prepared " * 4}) + "\n"
            for i in range(200)
        )
        for name in ("one.jsonl", "two.jsonl", "three.jsonl"):
            (path / name).write_text(lines)
        (path / "text.txt").write_text("".join(f"line {i} of some text\n" for i in range(1000)))
        torch.save({"tok_embeddings.weight": torch.zeros(4, 4)}, path / "weights.pt")

    def plant(self, name: str) -> None:
        (self.path / f"{name}.py").write_text(
            f"open({str(self.canary)!r}, 'a').write(__file__ + chr(10))\ndef load(): pass\n"
        )

    def imported(self) -> list[str]:
        return self.canary.read_text().splitlines() if self.canary.exists() else []

    def start(self, *command: object, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a program in the folder."""
        own = environment(**{"PYTHONPATH": str(ROOT), "LOG_RANK": "none"} | variables)
        words = [str(word) for word in command]
        return subprocess.run(
            words, cwd=self.path, env=own, capture_output=True, text=True, timeout=600
        )

    def check(self, *command: object, code: int = 0, **variables: str) -> str:
        """Its output. It must import nothing from the folder, and exit with this code."""
        done = self.start(*command, **variables)
        assert self.imported() == [], command
        assert done.returncode == code, (command, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def titanlite(self, *arguments: object, **variables: str) -> str:
        """The installed command."""
        return self.check(sys.executable, self.script, *arguments, **variables)

    def remove(self, names: set[str]) -> None:
        """These modules.

        Python itself imports them from the folder before it runs anything of ours.
        """
        for name in names:
            (self.path / f"{name}.py").unlink()


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path / "data", tmp_path / "elsewhere")


def test_python_itself_imports_them(folder):
    """So the tests below can fail."""
    assert folder.start(sys.executable, "-c", "import tiktoken").returncode == 0
    assert folder.imported() == [str(folder.path / "tiktoken.py")]


def test_prepare_and_its_workers(folder, tmp_path):
    folder.check(sys.executable, folder.small_parts, *PREPARE, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*"))) > 1
    folder.titanlite("prepare", "--inspect", tmp_path / "out")


def test_an_empty_entry_of_the_path_does_not_bring_the_folder_back(folder):
    """`export PYTHONPATH=$PYTHONPATH:/x` makes one."""
    folder.remove({"sitecustomize", "usercustomize", "titanlite", *sys.stdlib_module_names})
    folder.titanlite("tokenizer", "info", PYTHONPATH=f":{ROOT}:")


def test_python_m_titanlite(folder, tmp_path):
    folder.remove({"titanlite", *sys.stdlib_module_names})
    folder.check(sys.executable, "-m", "titanlite", *PREPARE, tmp_path / "out")


def test_run_train_in_the_folder(folder):
    """The shell script, which looks for an interpreter, and the launcher, which loads the config."""
    assert "error: " in folder.check(ROOT / "run_train.sh", "no-such-config", code=2)


def test_the_config_and_a_copy_of_the_program(folder, tmp_path):
    folder.titanlite("train", "debug", "--print-config")
    folder.titanlite("eject", tmp_path / "own")
    folder.remove({"train"})
    folder.titanlite("eject", ".")


@pytest.mark.slow
def test_training(folder, arguments):
    """Compiled where it is: inductor starts processes of its own."""
    compiled = [*arguments, "--compile.enabled=true"]
    folder.check(ROOT / "run_train.sh", *compiled, NGPU="2", PYTHONPATH=f":{ROOT}")
    folder.titanlite(
        "train",
        *arguments,
        "--training.steps=8",
        "--metrics.sinks=tensorboard,wandb,mlflow",
        NGPU="2",
    )
    # Without the launcher
    folder.check(sys.executable, ROOT / "train.py", *compiled, "--training.steps=10")


@pytest.mark.slow
def test_commands_with_a_model(folder, tmp_path, whole_run):
    run = whole_run()
    folder.titanlite("generate", run, "--max-new-tokens", "4")
    folder.titanlite("report", run, "--text")
    folder.titanlite("checkpoint", "verify", run)
    folder.titanlite("convert", run, tmp_path / "dcp", "--to", "dcp")
    folder.titanlite("convert", tmp_path / "dcp", tmp_path / "back", "--to", "safetensors")
    folder.titanlite("evaluate", run, "--perplexity", "text.txt")
    assert "error" in folder.titanlite(
        "convert", "weights.pt", tmp_path / "converted", "--to", "hf", code=2
    )


@pytest.mark.slow
def test_other_commands(folder, tmp_path):
    folder.titanlite("plan", "debug", "--estimate")
    folder.titanlite(
        "tokenizer", "train", tmp_path / "own.model", "--num-tokens=300", "--data-path=text.txt"
    )
    folder.titanlite("tokenizer", "encode", "", "some text")
    folder.titanlite("verify", "--layout", "dp_shard=2", "--processes", "2")
    folder.remove({"titanlite", *sys.stdlib_module_names})
    folder.check(
        sys.executable, "-m", "titanlite", "verify", "--layout", "dp_shard=2", "--processes", "2"
    )


@pytest.mark.slow
def test_titanlite_launch(folder, arguments):
    """From a program elsewhere: in its own process, what it imports is decided by its sys.path."""
    program = folder.script.with_name("program.py")
    program.write_text(LAUNCH.replace("WORDS", repr(arguments[1:])))
    folder.check(sys.executable, program)


@pytest.mark.slow
def test_a_compiled_run_where_python_has_no_safe_path(folder, arguments):
    """Inductor looks for the processor's instructions by `python -c`."""
    program = folder.script.with_name("program.py")
    program.write_text(
        COMPILED.replace(
            "WORDS", repr([*arguments, "--compile.enabled=true", "--training.steps=2"])
        )
    )
    folder.check(sys.executable, program)


@pytest.mark.slow
def test_the_fork_server_where_python_has_no_safe_path(folder):
    """Python 3.10, which ignores PYTHONSAFEPATH, as later versions ignore another name."""
    program = folder.script.with_name("program.py")
    program.write_text(FORK_SERVER)
    folder.check(sys.executable, program)
