"""Counts what a reader has to understand: `python scripts/density.py`; docs/design.md has the goals."""

import ast
import re
from pathlib import Path

ROOT, BESIDE = Path(__file__).parent.parent, {"tests", "scripts", "benchmarks", "docs", ".venv", "runs"}
STEP = ("train_grpo", "sampling", "rollout", "batch", "update", "grpo", "policy", "fsdp_utils")
lines = nodes = code = wide = step_code = step_comments = 0
for file in (path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in BESIDE):
    text, docs = file.read_text("utf-8"), set()
    for node in ast.walk(ast.parse(text)):
        nodes += isinstance(node, ast.expr | ast.stmt)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(
            node
        ):
            docs |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    outside = [line for i, line in enumerate(text.splitlines(), start=1) if line.strip() and i not in docs]
    own = [line for line in outside if not line.strip().startswith("#")]
    lines, code = lines + len(text.splitlines()), code + len(own)
    wide += sum(len(line) > 100 for line in text.splitlines())
    if file.parent == ROOT and file.stem in STEP:
        step_code += len(own)
        step_comments += sum(bool(re.search(r"(^|\s)# ", line)) for line in outside)
print(f"{lines:,} lines, {nodes:,} expressions and statements, {nodes / code:.2f} a line of code")
print(
    f"{wide / lines:.1%} of lines beyond 100 columns; {step_comments / step_code:.0%} comments in the files of a step"
)
