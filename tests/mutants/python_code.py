"""Mutations of Python code."""

from __future__ import annotations

import ast
import copy
from typing import NamedTuple

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd,
}  # fmt: skip
ORDER_FREE = {"min", "max", "isinstance", "issubclass", "zip", "isclose", "gcd", "lcm", "hypot"}
"""Functions whose first two arguments mean the same in either order, or which fail at once if they are swapped."""
TEXT_METHODS = {"__repr__", "__str__", "extra_repr"}
LOGS = {"logging", "logger", "log"}
TYPING = {"overload", "override", "final", "abstractmethod"}


class Mutation(NamedTuple):
    """A change of one place of a file.

    Attributes:
        line, column: the place of the changed code, from 1 and from 0.
        kind: the rule that made the change, such as "comparison".
        before, after: the code, in one line.
        start, end: the replaced bytes of the file.
        text: the replacement, which has as many line breaks.
        scope: the qualified name of the function or class, "" for the code of the module.
    """

    line: int
    column: int
    kind: str
    before: str
    after: str
    start: int
    end: int
    text: str
    scope: str = ""

    def applied(self, source: str) -> str:
        """Return the mutated source."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()


def mutations(source: str) -> list[Mutation]:
    """Return all mutations of a file, in the order of their places."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda mutation: (mutation.start, mutation.kind))


class _Finder(ast.NodeVisitor):
    """Collects mutations. Nodes that it does not visit stay as they are: annotations, texts and imports among them."""

    def __init__(self, source):
        self.found, self.scopes = [], []
        self.data = source.encode()
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    # -- what a mutation replaces ------------------------------------------------------------------------

    def replace(self, kind, node, after, scope=None):
        """Add the mutation that puts the expression or statement `after`, a node, in the place of `node`."""
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(after)
        breaks = "\n" * (self.data[start:end].count(b"\n") - text.count("\n"))
        text = f"({text}{breaks})" if isinstance(after, ast.expr) else text + breaks
        self.add(kind, node, ast.unparse(node), ast.unparse(after), (start, end), text, scope)

    def add(self, kind, node, before, after, span, text, scope):
        before, after = (" ".join(code.split()) for code in (before, after))
        if before != after:
            scope = ".".join(self.scopes) if scope is None else scope
            place = node.lineno, node.col_offset
            self.found.append(Mutation(*place, kind, before, after, *span, text, scope))

    # -- what stays as it is -----------------------------------------------------------------------------

    def visit_Import(self, node):
        pass

    visit_ImportFrom = visit_JoinedStr = visit_Global = visit_Nonlocal = visit_Import

    def visit_AnnAssign(self, node):
        self.visit(node.target)
        if node.value:
            self.visit(node.value)

    def visit_Assign(self, node):
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if "__all__" not in names:
            self.generic_visit(node)
            if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
                self.replace("deleted statement", node, ast.Pass())

    def visit_Assert(self, node):
        self.visit(node.test)

    def visit_match_case(self, node):
        for child in (*filter(None, [node.guard]), *node.body):
            self.visit(child)

    # -- statements --------------------------------------------------------------------------------------

    def visit_Raise(self, node):
        self.replace("deleted statement", node, ast.Pass())

    visit_Continue = visit_Break = visit_Delete = visit_Raise

    def visit_AugAssign(self, node):
        self.replace("deleted statement", node, ast.Pass())
        if type(node.op) in ARITHMETIC:
            self.replace("arithmetic", node, _with(node, op=ARITHMETIC[type(node.op)]()))
        self.visit(node.value)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Constant) or _logs(node.value):
            return
        if isinstance(node.value, ast.Call):
            self.replace("deleted statement", node, ast.Pass())
        self.generic_visit(node)

    def visit_Return(self, node):
        if node.value is None:
            return
        self.visit(node.value)
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.replace("return value", node, ast.Return(ast.Constant(None)))

    def visit_If(self, node):
        if isinstance(node.test, ast.Name | ast.Attribute) and "TYPE_CHECKING" in ast.unparse(
            node.test
        ):
            return
        if isinstance(node.test, ast.Compare) and ast.unparse(node.test.left) == "__name__":
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node):
        self.negate(node.test)
        self.generic_visit(node)

    visit_IfExp = visit_While

    def negate(self, test):
        if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr):
            self.replace("not", test, ast.UnaryOp(ast.Not(), test))

    # -- definitions -------------------------------------------------------------------------------------

    def visit_FunctionDef(self, node):
        names = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
        if node.name in TEXT_METHODS or names & TYPING:
            return
        own = ".".join([*self.scopes, node.name])
        self.visit_decorators(node, own)
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            for value in _neighbors(default):
                self.replace("default", default, value, own)
        self.scopes += [node.name, "<locals>"]
        for statement in node.body:
            self.visit(statement)
        del self.scopes[-2:]

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node):
        self.visit_decorators(node, ".".join([*self.scopes, node.name]))
        self.scopes.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.scopes.pop()

    def visit_decorators(self, node, scope):
        for decorator in node.decorator_list:
            at = self.starts[decorator.lineno - 1] + decorator.col_offset
            start = self.data.rindex(b"@", 0, at)
            end = self.starts[decorator.end_lineno - 1] + decorator.end_col_offset
            text = "\n" * self.data[start:end].count(b"\n")
            before = f"@{ast.unparse(decorator)}"
            self.add("decorator", decorator, before, "", (start, end), text, scope)
            self.visit(decorator)

    # -- expressions -------------------------------------------------------------------------------------

    def visit_Compare(self, node):
        for number, operator in enumerate(node.ops):
            other = COMPARISONS[type(operator)]()
            ops = [*node.ops[:number], other, *node.ops[number + 1 :]]
            self.replace("comparison", node, _with(node, ops=ops))
        self.generic_visit(node)

    def visit_BinOp(self, node):
        if type(node.op) in ARITHMETIC and not any(map(_is_text, (node.left, node.right))):
            self.replace("arithmetic", node, _with(node, op=ARITHMETIC[type(node.op)]()))
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.replace("and or", node, _with(node, op=other))
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            self.replace("not", node, node.operand)
        elif isinstance(node.op, ast.USub):
            self.replace("arithmetic", node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node):
        for value in _neighbors(node):
            self.replace("constant", node, value)

    def visit_Call(self, node):
        if _logs(node):
            return
        name = ast.unparse(node.func)
        if name != "warnings.warn":
            first = node.args[:2]
            starred = any(isinstance(argument, ast.Starred) for argument in first)
            if len(first) == 2 and not starred and name.split(".")[-1] not in ORDER_FREE:
                swapped = _with(node, args=[*first[::-1], *node.args[2:]])
                self.replace("swapped arguments", node, swapped)
            self.generic_visit(node)


def _with(node, **fields):
    """Return a copy of a node with other fields."""
    node = copy.copy(node)
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def _neighbors(node) -> list[ast.Constant]:
    """Return the constants that replace a constant: the other truth value, or the number plus and minus 1."""
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, bool):
        return [ast.Constant(not value)]
    if isinstance(value, int | float):
        return [ast.Constant(value + step) for step in (1, -1) if value + step != value]
    return []


def _is_text(node) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _logs(node) -> bool:
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return "." in name and name.split(".")[0].lstrip("_") in LOGS
