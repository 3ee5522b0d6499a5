"""The rules of the house, and what a run loads.

Which room may import which, and that there is no circle, are contracts in pyproject.toml, which
run_lint.sh checks with import-linter.
"""

import ast
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import rows

from titanlite.config.load import load_config
from titanlite.runtime.errors import LAUNCHED
from titanlite.tokenizer.tokenizer import Tokenizer
from titanlite.tools.prepare.cache import prepare

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "train.py", *sorted((ROOT / "titanlite").rglob("*.py"))]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


DOWN = "a room imports only from rooms below it"
NO_CIRCLE = "no module imports itself by way of others"
# What is forbidden -> the contract, a file, and what is added to it
PLANTED = {
    "up": (DOWN, "model/llama.py", "import titanlite.data.stream"),
    "in a function": (DOWN, "model/llama.py", "def f():\n    from titanlite.data import stream"),
    "a room beside it": (DOWN, "rules/check.py", "from titanlite.data.rows import IGNORED"),
    "tools in the core": (DOWN, "checkpoint/state.py", "import titanlite.tools.verify.pool"),
    "a room without a layer": (DOWN, "new/__init__.py", ""),
    "train.py": ("nothing imports train.py", "tools/cli/main.py", "import train"),
    "a circle in a room": (NO_CIRCLE, "config/schema.py", "import titanlite.config.load"),
    "a circle of tools": (NO_CIRCLE, "tools/verify/pool.py", "import titanlite.tools.faults.quiz"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_the_contracts_find_each_forbidden_import(tmp_path, planted):
    """Without it they hold: run_lint.sh checks that."""
    contract, name, statement = PLANTED[planted]
    shutil.copytree(ROOT / "titanlite", tmp_path / "titanlite")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "titanlite" / name
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(f"\n{statement}\n")
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", lint, "--no-cache"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{contract} BROKEN" in result.stdout


def is_own(module: str) -> bool:
    return module.split(".")[0] in ("titanlite", "train")


def file_of(module: str) -> Path:
    """The file of a module, or of a package; it need not exist."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported_by(node: ast.stmt) -> list[str]:
    """Modules of the project that an import statement loads.

    In `from package import name` the name may be a module of the package: then that one.
    """
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if is_own(alias.name)]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, "imports are absolute"
    assert node.module is not None
    if not is_own(node.module):
        return []
    candidates = [f"{node.module}.{alias.name}" for alias in node.names]
    modules = [name for name in candidates if file_of(name).exists()]
    if len(modules) < len(candidates):
        modules.append(node.module)
    return modules


# A reader can take model/ without the rest
LOAD_MODEL_THEN_PARALLEL = """
import sys
import titanlite.model.llama
print("torch.distributed.tensor" in sys.modules)
for name in [name for name in sys.modules if name.startswith("titanlite")]:
    del sys.modules[name]
import titanlite.parallel.parallelize, titanlite.parallel.stages
print("titanlite.model.llama" in sys.modules)
"""


def test_the_model_knows_no_parallelism_and_parallelism_only_the_type_of_the_model():
    for path in (ROOT / "titanlite/model").glob("*.py"):
        assert "torch.distributed" not in path.read_text(), path
    result = subprocess.run(
        [sys.executable, "-c", LOAD_MODEL_THEN_PARALLEL],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert result.stdout.split() == ["False", "False"]


def test_nothing_but_the_entry_points_is_at_the_root():
    assert {path.name for path in (ROOT / "titanlite").glob("*.py")} == {
        "__init__.py",
        "__main__.py",
    }


CORE = [path for path in FILES if "tools" not in path.relative_to(ROOT).parts]

# file -> modules that it imports within a function, for good
IMPORTS_IN_FUNCTIONS = {
    # `titanlite.launch`, by __getattr__: a training process does not need it
    "titanlite/__init__.py": {"titanlite.tools.cli.from_python", "titanlite.runtime.errors"},
    # Each sink imports an optional package
    "titanlite/sinks/feed.py": {
        "titanlite.sinks.mlflow_sink",
        "titanlite.sinks.tensorboard_sink",
        "titanlite.sinks.wandb_sink",
    },
}


def functions_of(path: Path) -> list[ast.AST]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))]


@pytest.mark.parametrize("path", CORE, ids=module_of)
def test_imports_of_our_own_stand_at_the_top(path):
    name = str(path.relative_to(ROOT))
    within = {
        module
        for function in functions_of(path)
        for node in ast.walk(function)
        if isinstance(node, ast.stmt)
        for module in imported_by(node)
    }
    others = within - IMPORTS_IN_FUNCTIONS.get(name, set())
    assert not others, f"move {others} to the top"
    if name != "titanlite/bridge/tools.py":  # the one place where the core looks for the tools
        for indirect in ("import_module", "__import__"):
            assert indirect not in path.read_text(), "an import statement is found by this test"


# file -> attributes of other objects that it may set: of torch and Python, and of modules that
# `apply_*` changes, which is what it is for
SETS_ATTRIBUTES = {
    "titanlite/checkpoint/async_save.py": {"thread.buffer", "thread.stream"},
    "titanlite/checkpoint/state.py": {"parameter.grad"},
    "titanlite/config/load.py": {"layer.values[name]"},  # what `set_value` is for
    "titanlite/tokenizer/bpe.py": {"tokenizer.pre_tokenizer"},
    "titanlite/distributed/torch_private.py": {
        "info.buffer",
        "Stage._inference_mode",
        "functorch.activation_memory_budget",
        "functorch.unsafe_treat_script_objects_as_zero_size",
    },
    "titanlite/tools/torch_private.py": {
        "ShardingPropagator._propagate_tensor_meta_non_cached",
        "schedules._PipelineSchedule._warmup_p2p",
        "stage._PipelineStageBase._get_init_p2p_neighbors_ops",
    },
    "titanlite/distributed/process_group.py": {"os.environ['GLOO_SOCKET_IFNAME']"},
    "titanlite/parallel/parallelize.py": {"model.document_mask"},
    "titanlite/observe/logging.py": {"logger.propagate", "logging.raiseExceptions"},
    "titanlite/observe/waits.py": {
        "dist[name]",
        "stream.wait_event",
        "stream.wait_stream",
        "work.wait",
    },
    "titanlite/optim/found_inf.py": {"optimizer.found_inf"},
    "titanlite/optim/muon.py": {"others.state"},
    "titanlite/optim/offload.py": {
        "local.data",
        "self.inner.param_groups",
        "self.inner.state",
        "self.inner.state[parameter]",
    },
    "titanlite/optim/router_balance.py": {
        "ctx.layer",
        "layer.gradient",
        "layer.sums[0]",
        "layer.sums[1]",
        "moe.probabilities",
    },
    "titanlite/parallel/compile.py": {"torch.compiler.config.recompile_limit"},
    "titanlite/parallel/expert_parallel.py": {"ctx.sizes"},
    "titanlite/parallel/context_parallel.py": {
        "model.document_mask",
        "model.positions",
    },
    "titanlite/parallel/lora.py": {
        "module[name]",
        "adapter.dropout_keys",
    },
    "titanlite/parallel/float8.py": {"ctx.scaling"},
    "titanlite/parallel/mixed_precision.py": {"module.__class__"},
    "titanlite/parallel/pipeline_parallel.py": {
        "part.layers[name]",
        "part.output",
        "part.tok_embeddings",
        "part[name]",
        "stage[name]",
    },
    "titanlite/parallel/tensor_parallel.py": {"end[name]"},
    "titanlite/runtime/device.py": {
        "compiler_config.cache_key_tag",
        "os.environ['CUBLAS_WORKSPACE_CONFIG']",
        "os.environ['PYTORCH_ALLOC_CONF']",
        "torch.backends.cudnn.benchmark",
    },
    "titanlite/runtime/files.py": {"error.filename"},
    "titanlite/runtime/interpreter.py": {
        "os.environ['PYTHONPATH']",
        "os.environ['PYTHONSAFEPATH']",
        "sys.path[0]",
        "sys.path[:]",
        "sys[name]",
    },
    "titanlite/parallel/deferred_output.py": {"model.output"},
    "train.py": {"progress.step"},
}


def assigned_attributes(path: Path) -> set[str]:
    """The targets of assignments that belong to another object: `a.b`, `self.a.b`, `a.b[i]`, and
    `a[name]` for `setattr(a, name, value)`. Not `self.a` and `self.a[i]`.
    """
    targets: list[ast.expr] = []
    changed: list[tuple[ast.expr, str]] = []  # an object, and what of it
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets += node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets.append(node.target)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            owner, attribute = node.args[:2]
            changed.append((owner, f"{ast.unparse(owner)}[{ast.unparse(attribute)}]"))
    for target in targets:
        if isinstance(target, ast.Tuple):
            targets += target.elts  # also visited by this loop
        part = target.value if isinstance(target, ast.Subscript) else target
        if isinstance(part, ast.Attribute):  # else a local name, or an element of one
            changed.append((part.value, ast.unparse(target)))
    return {text for owner, text in changed if ast.unparse(owner) not in ("self", "cls")}


@pytest.mark.parametrize("path", CORE, ids=module_of)
def test_an_object_changes_only_itself(path):
    name = str(path.relative_to(ROOT))
    assert assigned_attributes(path) == SETS_ATTRIBUTES.get(name, set())


def test_each_way_to_change_another_object_is_found(tmp_path):
    file = tmp_path / "changes.py"
    file.write_text(
        "self.a = self.a[0] = b[1] = c = 1\n"
        "setattr(self, 'a', 1)\n"
        "d.e, f.g[h] = 1, 2\n"
        "setattr(i, j, 1)\n"
        "self.k.l += 1\n"
        "del m.n\n"
    )
    assert assigned_attributes(file) == {"d.e", "f.g[h]", "i[j]", "self.k.l", "m.n"}


def seconds(command: list[str], attempts: int) -> float:
    """The least CPU time of the command in a process of its own: other work delays the clock."""
    times = []
    for _ in range(attempts):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(times)


def test_help_starts_at_once():
    """`titanlite --help`, beside the start of Python itself."""
    bare = seconds([sys.executable, "-c", "pass"], 5)
    assert seconds([sys.executable, "-m", "titanlite", "--help"], 5) - bare < 0.2


THIRD_PARTY = """
import sys
import train
names = [name for name in sys.modules if name.split(".")[0] not in ("titanlite", "train", "__main__")]
print(*names, sep="\\n")
"""
IMPORT_EACH = """
import importlib, sys
for name in open(sys.argv[1]).read().split():
    try:
        importlib.import_module(name)
    except ImportError:  # made by a module that is no package, such as torch.ops
        pass
"""


@pytest.mark.slow
def test_importing_train_takes_little_more_than_the_packages_that_it_uses(tmp_path):
    """Less than half a second, beside Python, torch and the other packages."""
    python = [sys.executable, "-c"]
    listed = subprocess.run(
        [*python, THIRD_PARTY], cwd=ROOT, check=True, capture_output=True, text=True
    )
    names = tmp_path / "names.txt"
    names.write_text(listed.stdout)
    packages = seconds([*python, IMPORT_EACH, str(names)], 3)
    assert seconds([*python, "import train"], 3) - packages < 0.5


def without_tools(folder: Path) -> Path:
    """A copy of train.py, the core and the configs."""
    shutil.copy(ROOT / "train.py", folder)
    shutil.copytree(ROOT / "train_configs", folder / "train_configs")
    left_out = shutil.ignore_patterns("tools", "__pycache__")
    shutil.copytree(ROOT / "titanlite", folder / "titanlite", ignore=left_out)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_core_trains_validates_and_resumes_without_the_tools(options, tmp_path, ranks):
    """From prepared data, started by torchrun."""
    (tmp_path / "core").mkdir()
    core = without_tools(tmp_path / "core")
    arguments = [*options, f"--run.folder={tmp_path}", "--run.name=run", "--checkpoint.freq=3"]
    arguments.append(f"--data.path={prepare(load_config(arguments).data, Tokenizer())}")
    # Without what finds this repository in place of the copy in the current folder
    paths = ("PYTHONPATH", "PYTHONSAFEPATH")
    environment = {name: value for name, value in os.environ.items() if name not in paths}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc-per-node={ranks}", "train.py"]
    for steps in (6, 9):  # the second continues the first
        result = subprocess.run(
            [*launcher, *arguments, f"--training.steps={steps}", "--schedule.name=constant"],
            cwd=core,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert "Traceback" not in result.stdout + result.stderr
        logged = rows(tmp_path / "run")
        assert [row["step"] for row in logged if "loss" in row] == list(range(1, steps + 1))
        validated = [row["step"] for row in logged if "validation/numbers/loss" in row]
        assert {3, 6} <= set(validated)
        assert (tmp_path / f"run/checkpoints/step-{steps}").is_dir()


LOADED = """
import json, sys
from pathlib import Path
from titanlite.parallel import step
import train

root = Path(train.__file__).parent

def stop(*arguments):  # the first step's forward and backward are done
    files = {Path(m.__file__) for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
    names = [str(path.relative_to(root)) for path in files if path.is_relative_to(root / "titanlite")]
    print("LOADED", json.dumps(sorted(names)), flush=True)
    train.process_group.finish(0)

step.clip_gradients = stop
train.run(sys.argv[1:])
"""


def test_a_plain_run_loads_no_room_that_training_does_not_need(arguments):
    """The modules that are really imported by the first step of a run with one process.

    The launcher, in a process before it, has prepared the data.
    """
    prepared = prepare(load_config(arguments).data, Tokenizer())
    command = [sys.executable, "-c", LOADED, *arguments]
    environment = os.environ | {LAUNCHED: json.dumps([str(prepared)])}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("LOADED ")] or [
        result.stderr
    ]
    rooms = {name.split("/")[1] for name in json.loads(line.removeprefix("LOADED "))}
    assert {"checkpoint", "data", "model", "optim", "parallel"} <= rooms
    assert "tools" not in rooms


@pytest.mark.parametrize("path", [p for p in FILES if p.read_text()], ids=module_of)
def test_every_file_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))
