"""A calculator that the model may call, for word problems such as GSM8K's.

--tools docs/environments/calculator.py:calculator --reward gsm8k --max_turns 4
"""

import ast
import operator

OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.USub: operator.neg,
}  # fmt: skip


def calculator(expression: str) -> float:
    """Works out an expression of numbers, + - * / and brackets.

    Args:
        expression: The expression, for example "(3 + 4) * 2".
    """
    return value_of(ast.parse(expression.replace(",", ""), mode="eval").body)


def value_of(node: ast.expr) -> float:
    """The value of numbers and of the operators above alone: whatever a model writes, nothing else is run."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.operand))
    raise ValueError("only numbers, + - * / and brackets can be worked out")
