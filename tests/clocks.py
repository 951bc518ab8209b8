"""Find comparisons of a clock in a test's source: what passes on an idle machine and fails on a busy one.

A value is a clock's if a clock was called for it, if it was computed from such a value, or if it is a variable,
attribute or container that such a value was put into. Variables are followed within a function (with the functions in
it) and within a module; attributes by their name within a module.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_NAMES = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
CLOCKS = {f"time.{name}{unit}" for name in _NAMES for unit in ("", "_ns")}
CLOCKS |= {"time.clock_gettime", "time.clock_gettime_ns", "timeit.default_timer", "resource.getrusage", "os.times"}
_MODULES = {name.partition(".")[0] for name in CLOCKS}
# What returns times when it is given times. Any other function may return whatever it likes.
_KEEPING = {"abs", "dict", "divmod", "float", "int", "list", "max", "min", "next", "reversed", "round", "set", "sorted"}
_KEEPING |= {"sum", "tuple", "zip", "enumerate", "array", "copy", "timedelta", "Decimal"}
_KEEPING |= {"approx", "fmean", "mean", "median", "percentile", "quantiles", "stdev", "pstdev"}
_FILLING = {"add", "append", "appendleft", "extend", "insert", "put", "setdefault", "update"}
_A_FUNCTION = "a function that returns times"
_JUDGING = {"approx", "skipif", "xfail", "lt", "le", "gt", "ge"}
_JUDGING |= {f"assert{name}" for name in ("Less", "LessEqual", "Greater", "GreaterEqual", "AlmostEqual")}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_TEACHING = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign, ast.For, ast.AsyncFor)
_TEACHING += (ast.comprehension, ast.Call, ast.FunctionDef, ast.AsyncFunctionDef, ast.withitem)
_NEEDED = re.compile(rf"\b(?:import|from)\b.*\b(?:asyncio|{'|'.join(sorted(_MODULES))})\b")


@dataclass(frozen=True, order=True)
class Finding:
    """One comparison of a clock: its line, and its source."""

    line: int
    source: str


@dataclass
class _Scope:
    """The names of one outermost function, or of the module: which are clocks, and which hold times.

    Attributes:
        clocks: Names that are called for the time, or modules that have such functions, and what each stands for.
        times: Names whose values came from a clock.
    """

    clocks: dict[str, str] = field(default_factory=dict)
    times: set[str] = field(default_factory=set)


class ClockComparisons:
    """Find where a module compares a clock, or branches on one."""

    def __init__(self, source: str) -> None:
        self._tree = ast.parse(source if _NEEDED.search(source) else "")  # most files know no clock
        self._module = _Scope()
        self._attributes: set[str] = set()
        self._scopes: dict[ast.AST, _Scope] = {}
        self._around: dict[ast.AST, _Scope] = {}
        self._place(self._tree, self._module, in_function=False)
        size = -1
        while size != (size := self._num_known()):  # what is found makes more be found
            for node in self._around:
                self._learn(node)

    def findings(self) -> list[Finding]:
        """Return every comparison once, in the order of lines."""
        found = {Finding(node.lineno, ast.unparse(node)) for node in self._judgements(self._tree)}
        return sorted(found)

    # -- what is known

    def _place(self, node: ast.AST, scope: _Scope, in_function: bool) -> None:
        """Give each node the scope of its outermost function."""
        self._scopes[node] = scope
        for child in ast.iter_child_nodes(node):
            starts = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not in_function
            if isinstance(child, _TEACHING):
                self._around[child] = scope
            self._place(child, _Scope() if starts else scope, in_function or starts)

    def _num_known(self) -> int:
        scopes = {id(scope): scope for scope in self._scopes.values()}.values()
        return len(self._attributes) + sum(len(scope.clocks) + len(scope.times) for scope in scopes)

    def _learn(self, node: ast.AST) -> None:
        scope = self._scopes[node]  # a function's own is that of its arguments and body
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name in _MODULES:
                        scope.clocks[alias.asname or alias.name] = alias.name
            case ast.ImportFrom(module=module, names=names):
                for alias in names:
                    if f"{module}.{alias.name}" in CLOCKS:
                        scope.clocks[alias.asname or alias.name] = f"{module}.{alias.name}"
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                self._assign(target, value)
            case ast.AugAssign(target=target, value=value) if self._is_time(value):
                self._hold(target)
            case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
                self._assign_each(target, value)
            case ast.comprehension(target=target, iter=value):
                self._assign_each(target, value)
            case ast.Call(func=ast.Attribute(value=holder, attr=name), args=args) if name in _FILLING:
                if any(map(self._is_time, args)):
                    self._hold(holder)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if any(self._is_time(value) for value in _returned(node)):
                    self._around[node].clocks[node.name] = _A_FUNCTION
                self._learn_defaults(node)
            case ast.withitem(context_expr=value, optional_vars=ast.expr() as target) if self._is_time(value):
                self._hold(target)

    def _learn_defaults(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """An argument whose default is a clock is one."""
        given = node.args
        pairs = list(zip(reversed([*given.posonlyargs, *given.args]), reversed(given.defaults), strict=False))
        pairs += [(each, value) for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value]
        for argument, value in pairs:
            if self._is_clock(value):
                self._scopes[node].clocks[argument.arg] = _A_FUNCTION

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        sides = (target, value)
        if all(isinstance(side, ast.Tuple | ast.List) for side in sides) and not _is_starred(target):
            for one, other in zip(target.elts, value.elts, strict=True):  # type: ignore[attr-defined]
                self._assign(one, other)
        elif isinstance(target, ast.Name) and self._is_clock(value):
            self._scopes[target].clocks[target.id] = _A_FUNCTION
        elif isinstance(target, ast.Attribute) and self._is_clock(value):
            self._module.clocks[target.attr] = _A_FUNCTION
        elif self._is_time(value):
            self._hold(target)

    def _assign_each(self, target: ast.expr, values: ast.expr) -> None:
        """What a loop takes out of a container; `enumerate` and `zip` keep times in their own place."""
        match values:
            case ast.Call(func=ast.Name(id="enumerate"), args=[of, *_]) if isinstance(target, ast.Tuple):
                self._assign_each(target.elts[-1], of)
            case ast.Call(func=ast.Name(id="zip"), args=args) if isinstance(target, ast.Tuple):
                for one, other in zip(target.elts, args, strict=False):
                    self._assign_each(one, other)
            case _ if self._is_time(values):
                self._hold(target)

    def _hold(self, target: ast.expr) -> None:
        match target:
            case ast.Name(id=name):
                self._scopes[target].times.add(name)
            case ast.Attribute(attr=name):
                self._attributes.add(name)
            case ast.Subscript(value=inner) | ast.Starred(value=inner):
                self._hold(inner)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for element in elements:
                    self._hold(element)

    def _is_clock(self, node: ast.AST) -> bool:
        """Whether calling this gives a time."""
        match node:
            case ast.Name(id=name):
                known = (scope.clocks[name] for scope in self._known_in(node) if name in scope.clocks)
                return any(clock not in _MODULES for clock in known)
            case ast.Attribute(value=ast.Call(func=maker), attr="time"):  # of an event loop
                return _name_of(maker) in ("get_running_loop", "get_event_loop")
            case ast.Attribute(value=ast.Name(id="loop"), attr="time"):
                return True
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                modules = [scope.clocks.get(name) for scope in self._known_in(node)]
                if any(f"{module}.{attribute}" in CLOCKS for module in modules):
                    return True
                return name in ("self", "cls") and attribute in self._module.clocks
            case ast.Call(func=ast.Name(id="partial") | ast.Attribute(attr="partial"), args=[made, *_]):
                return self._is_clock(made)
            case ast.Lambda(body=body):
                return self._is_time(body)
        return False

    def _known_in(self, node: ast.AST) -> tuple[_Scope, _Scope]:
        return self._scopes[node], self._module

    def _is_time(self, node: ast.AST | None) -> bool:
        """Whether this expression's value comes from a clock."""
        match node:
            case ast.Call(func=function, args=args, keywords=keywords):
                if self._is_clock(function):
                    return True
                is_keeping = _name_of(function) in _KEEPING
                given = [*args, *(keyword.value for keyword in keywords if keyword.arg != "key")]
                if is_keeping and any(map(self._is_time, given)):
                    return True
                return isinstance(function, ast.Attribute) and self._is_time(function.value)
            case ast.Name(id=name):
                return any(name in scope.times for scope in self._known_in(node))
            case ast.Attribute(value=value, attr=name):
                return name in self._attributes or self._is_time(value)
            case ast.BinOp(left=left, right=right):
                return self._is_time(left) or self._is_time(right)
            case ast.BoolOp(values=values):
                return any(map(self._is_time, values))
            case ast.IfExp(body=body, orelse=orelse):
                return self._is_time(body) or self._is_time(orelse)
            case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
                return any(map(self._is_time, elements))
            case ast.Dict(values=values):
                return any(map(self._is_time, values))
            case ast.ListComp(elt=value) | ast.SetComp(elt=value) | ast.GeneratorExp(elt=value):
                return self._is_time(value)
            case ast.DictComp(value=value):
                return self._is_time(value)
            case ast.UnaryOp(operand=value, op=op):
                return not isinstance(op, ast.Not) and self._is_time(value)
            case ast.NamedExpr(value=value) | ast.Subscript(value=value) | ast.Starred(value=value):
                return self._is_time(value)
            case ast.Await(value=value) | ast.Yield(value=ast.expr() as value) | ast.YieldFrom(value=value):
                return self._is_time(value)
        return False

    # -- what is judged

    def _judgements(self, node: ast.AST) -> Iterator[ast.expr]:
        """Yield what compares or tests a time, but for arguments that are named timeout."""
        match node:
            case ast.keyword(arg="timeout"):
                return
            case ast.Compare(left=left, comparators=others, ops=ops):
                if not all(isinstance(op, ast.Is | ast.IsNot) for op in ops) and any(
                    map(self._is_time, [left, *others])
                ):
                    yield node
            case ast.Assert(test=test) | ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield from self._bare(test)
            case ast.Call(func=function, args=args) if _name_of(function) in _JUDGING:
                yield from filter(self._is_time, args)
            case ast.comprehension(ifs=tests):
                for test in tests:
                    yield from self._bare(test)
        for child in ast.iter_child_nodes(node):
            yield from self._judgements(child)

    def _bare(self, test: ast.expr) -> Iterator[ast.expr]:
        """Yield times that are themselves the condition, or a part of it."""
        match test:
            case ast.BoolOp(values=parts):
                for part in parts:
                    yield from self._bare(part)
            case ast.UnaryOp(op=ast.Not(), operand=part):
                yield from self._bare(part)
            case _ if self._is_time(test):
                yield test


def _name_of(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _is_starred(target: ast.AST) -> bool:
    return any(isinstance(each, ast.Starred) for each in ast.iter_child_nodes(target))


def _returned(function: ast.AST) -> Iterator[ast.expr]:
    """Yield what a function itself returns or yields, and not a function inside it."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, _FUNCTIONS):
            continue
        if isinstance(child, ast.Return | ast.Yield) and child.value is not None:
            yield child.value
        yield from _returned(child)
