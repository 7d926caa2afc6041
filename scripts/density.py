"""Counts what a reader has to understand: `python scripts/density.py`; tests/test_core.py lets no number rise.

A node is an expression or a statement. The core is what `minimal.py` imports, all imports followed, and what lets its
run survive; `minimal.py` needs none of `ROOMS`, and `train_grpo.py` gate/ and watch/. What its two steps never enter is
counted by `entered.py`, on one rank: the other ranks' and the GPUs' functions, and those of grading workers, are in it.
"""

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
BESIDE = {"tests", "scripts", "benchmarks", "docs", ".venv", "runs"}
ROOMS = ("gate", "extras", "watch", "plan", "reports")
PROGRAMS = ("train_grpo", "evaluate", "report")  # which may enter the rooms
NEVER_ENTERED = "minimal.py: nodes that two steps never enter"
STEP = ("train_grpo", "sampling", "rollout", "batch", "packing", "update", "grpo", "policy", "fsdp_utils")


@cache
def files() -> dict[str, Path]:
    """Module -> file, of the program: of what stands beside it nothing counts."""
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        place = file.relative_to(ROOT)
        if place.parts[0] not in BESIDE:
            found[".".join(place.with_suffix("").parts).removesuffix(".__init__")] = file
    return found


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(files()[module].read_text("utf-8"))


def room_of(module: str) -> str:
    """The room that the module is in; "core" for all that may not be deleted."""
    top = module.partition(".")[0]
    return top if top in ROOMS else "core"


def loaded(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when this code is loaded: not in functions, nor for types alone."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            yield from loaded(getattr(node, "orelse", []) if is_for_types else node.body + getattr(node, "orelse", []))


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules that these nodes import, and what is taken out of them."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def imports_of(body: list[ast.stmt]) -> set[str]:
    """The program's modules that are imported when this code is loaded."""
    names = imported(loaded(body))
    parents = {".".join(name.split(".")[:i]) for name in names for i in range(1, name.count(".") + 2)}
    return (names | parents) & files().keys()


def closure(module: str) -> set[str]:
    """The module and all that is loaded with it."""
    found, left = set(), [module]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += imports_of(tree_of(name).body)
    return found


def nodes_of(modules: set[str]) -> int:
    nodes = (node for module in modules for node in ast.walk(tree_of(module)))
    return sum(isinstance(node, ast.expr | ast.stmt) for node in nodes)


def lines_of(modules: set[str]) -> int:
    return sum(len(files()[module].read_text("utf-8").splitlines()) for module in modules)


def never_entered(entered: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Function of the core -> its nodes, if two steps of minimal.py have not entered it nor one around it.

    `entered`: what `entered.py` has written.
    """
    found, entered = {}, set(map(tuple, entered))

    def look(node: ast.AST, file: str, name: str) -> None:
        for each in ast.iter_child_nodes(node):
            inner = f"{name}.{each.name}" if isinstance(each, ast.FunctionDef | ast.ClassDef) else name
            if isinstance(each, ast.FunctionDef):
                first = min([each.lineno, *(decorator.lineno for decorator in each.decorator_list)])
                if (file, first) not in entered:
                    found[inner] = sum(isinstance(part, ast.expr | ast.stmt) for part in ast.walk(each))
                    continue
            look(each, file, inner)

    for module in closure("minimal"):
        look(tree_of(module), str(files()[module].relative_to(ROOT)), module)
    return found


def crossings() -> list[str]:
    """The imports from the core to `ROOMS`, when a module loads; the two programs may enter them."""
    found = []
    for module in files():
        if room_of(module) == "core" and module not in PROGRAMS:
            targets = sorted(name for name in imports_of(tree_of(module).body) if room_of(name) != "core")
            found += [f"{module} imports {target}" for target in targets]
    return found


def optional_fields() -> list[str]:
    """The fields of records in batch.py that may be None."""
    classes = (node for node in tree_of("batch").body if isinstance(node, ast.ClassDef))
    fields = (node for each in classes for node in each.body if isinstance(node, ast.AnnAssign))
    return [ast.unparse(node.target) for node in fields if re.search(r"\bNone\b", ast.unparse(node.annotation))]


def unused_flags() -> list[str]:
    """The flags that no script, row of a paper or test names."""
    sys.path.insert(0, str(ROOT))
    from flags import FLAGS

    texts = [ROOT / "docs" / "papers.json", *(ROOT / "scripts").glob("*.*"), *(ROOT / "tests").rglob("*.py")]
    named = set(re.findall(r"\w+", " ".join(path.read_text("utf-8") for path in texts)))
    return [name for name in FLAGS if name.removeprefix("--") not in named]


def measured() -> dict[str, float]:
    """Name -> number, each of which may only fall."""
    from flags import FLAGS

    modules, core = set(files()), closure("minimal")
    code = wide = 0
    for module in modules:
        docs = set()
        for node in ast.walk(tree_of(module)):
            has_docstring = isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if has_docstring and ast.get_docstring(node):
                docs |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        lines = files()[module].read_text("utf-8").splitlines()
        wide += sum(len(line) > 100 for line in lines)
        outside = [line.strip() for i, line in enumerate(lines, start=1) if i not in docs]
        code += sum(bool(line) and not line.startswith("#") for line in outside)
    return {
        "minimal.py: files": len(core),
        "minimal.py: lines": lines_of(core),
        "minimal.py: nodes": nodes_of(core),
        "nodes": nodes_of(modules),
        "lines": lines_of(modules),
        "nodes of a line of code, times 100": round(100 * nodes_of(modules) / code),
        "lines beyond 100 columns, of 1,000": round(1000 * wide / lines_of(modules)),
        "nodes of the nine files of a step": nodes_of(set(STEP)),
        "imports from the core to rooms": len(crossings()),
        "fields of batch.py that may be None": len(optional_fields()),
        "flags": len(FLAGS),
        "flags that nothing names": len(unused_flags()),
    }


if __name__ == "__main__":
    unused_flags()  # makes flags.py importable
    policy, output = ROOT / "scripts" / "tiny_policy", Path(tempfile.mkdtemp()) / "entered.json"
    flags = f"--model {policy} --train_data {policy}/train.jsonl --max_prompt_tokens 16 --max_completion_tokens 48"
    flags += " --out_dir - --prompts_per_step 16 --prompts_per_update 8 --kl_coef 0.001 --total_steps 2"
    command = [sys.executable, ROOT / "scripts" / "entered.py", output, "minimal.py", *flags.split()]
    subprocess.run(command, check=True, capture_output=True)
    missed = never_entered(json.loads(output.read_text("utf-8")))
    for name, number in (measured() | {NEVER_ENTERED: sum(missed.values())}).items():
        print(f"{number:7,} {name}")
    for line in [*crossings(), *(f"nothing names {flag}" for flag in unused_flags())]:
        print(line)
    if "--list" in sys.argv:
        for name in sorted(missed, key=missed.get, reverse=True):
            print(f"{missed[name]:7,} {name} is never entered")
