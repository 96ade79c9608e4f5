"""Test that no Triton kernel selects a pointer at run time.

AMD's compiler of Triton 3.6 aborts with an assertion. Later versions abort, too, if only one of the
tensors has 2 GiB (triton#9859). Each branch must load for itself and may return the value.
"""

import ast
from pathlib import Path

import pytest
from compiling import kernel_modules

pytestmark = pytest.mark.quick


def choices(source: str) -> list[str]:
    """Return "function: line" of each choice between pointers in a module's Triton functions."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and any(
            "triton.jit" in ast.unparse(each) for each in function.decorator_list
        ):
            found += [f"{function.name}: {line}" for line in Reader(function).found]
    return found


class Reader(ast.NodeVisitor):
    """Follows pointers through a Triton function, from its parameters named `..._ptr`."""

    def __init__(self, function: ast.FunctionDef):
        self.found: list[str] = []
        self.in_runtime_if = 0
        arguments = function.args.args
        self.pointers = {each.arg for each in arguments if each.arg.split("_")[-1] == "ptr"}
        self.constants = {
            each.arg
            for each in arguments
            if each.annotation and "constexpr" in ast.unparse(each.annotation)
        }
        for statement in function.body:
            self.visit(statement)

    def is_pointer(self, value: ast.expr) -> bool:
        match value:
            case ast.Name():
                return value.id in self.pointers
            case ast.BinOp():
                return self.is_pointer(value.left) or self.is_pointer(value.right)
            case ast.IfExp():
                return self.is_pointer(value.body) or self.is_pointer(value.orelse)
            case ast.Tuple():
                return any(map(self.is_pointer, value.elts))
            case ast.Call() if ast.unparse(value.func) in (
                "tl.where",
                "tl.multiple_of",
                "tl.broadcast_to",
            ):
                return any(map(self.is_pointer, value.args))
        return False

    def is_constant(self, test: ast.expr) -> bool:
        """Return whether the compiler knows the value.

        True for constexprs, module constants (in capitals) and `x is None`.
        """
        match test:
            case ast.BoolOp():
                return all(map(self.is_constant, test.values))
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                return True
        names = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)}
        return all(name in self.constants or name.isupper() for name in names)

    def visit_If(self, node: ast.If) -> None:
        runtime = not self.is_constant(node.test)
        self.in_runtime_if += runtime
        self.generic_visit(node)
        self.in_runtime_if -= runtime

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if self.is_pointer(node) and not self.is_constant(node.test):
            self.found.append(ast.unparse(node))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func) == "tl.where" and self.is_pointer(node):
            self.found.append(ast.unparse(node))
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.assigned(node.targets, node.value, node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.assigned([node.target], ast.BinOp(node.target, node.op, node.value), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if "constexpr" in ast.unparse(node.annotation):
            self.constants.add(ast.unparse(node.target))
        elif node.value is not None:
            self.assigned([node.target], node.value, node)

    def assigned(self, targets: list[ast.expr], value: ast.expr, node: ast.stmt) -> None:
        if self.is_pointer(value):
            self.pointers |= {
                each.id
                for target in targets
                for each in ast.walk(target)
                if isinstance(each, ast.Name)
            }
            if self.in_runtime_if:
                self.found.append(ast.unparse(node))
        self.generic_visit(node)


@pytest.mark.parametrize(
    "module", kernel_modules(), ids=lambda module: module.__name__.rpartition(".")[2]
)
def test_no_kernel_chooses_between_pointers(module):
    assert choices(Path(module.__file__).read_text()) == []


BODIES = {  # of a kernel with the parameters (a_ptr, b_ptr, head, heads, HALF: tl.constexpr)
    "if head < heads:\n  x = a_ptr + head\nelse:\n  x = b_ptr": 2,
    "place = a_ptr\nif head < heads:\n  place += HALF": 1,
    "if head < heads:\n  if HALF == 2:\n    place = a_ptr": 1,
    "x = tl.load(a_ptr if head < heads else b_ptr)": 1,
    "x = tl.load(tl.where(head < heads, a_ptr, b_ptr))": 1,
    "if head < heads:\n  x = tl.load(a_ptr + head)\nelse:\n  x = tl.load(b_ptr)": 0,
    "if HALF == 2 and b_ptr is None:\n  x = a_ptr\nelse:\n  x = b_ptr": 0,
    "x = a_ptr if b_ptr is None else b_ptr": 0,
}


@pytest.mark.parametrize(
    ("body", "count"), BODIES.items(), ids=lambda value: str(value).splitlines()[0]
)
def test_the_check_finds_choices_between_pointers(body, count):
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    assert (
        len(
            choices(
                "@triton.jit\ndef kernel(a_ptr, b_ptr, head, heads, HALF: tl.constexpr):\n"
                f"{lines}\n"
            )
        )
        == count
    )
