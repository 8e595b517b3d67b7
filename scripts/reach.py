"""Files of tests that a change reaches: `python -m scripts.reach` (`make quick`).

The graph has a node for each function, class and constant at the top level of a module, and edges to what they mention:
names, modules that they import, the programs that they start (`-m server.gateway`; `server.cli` with a command), names
that a test has patched by a string, fixtures, files that they read. The options of `hotswap up` decide what it starts:
a module of tests that has it start something says what in a constant STARTS, as command lines.

A change is the names whose meaning differs from the base. Comments mean nothing, nor do docstrings of functions that
no decorator sees. A file that all tests run with (ALL) reaches all of them.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import subprocess
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from server.cli.app import GROUPS, OURS

ROOT = Path(__file__).parents[1]
ROOMS = ("server", "weightsync", "trainer", "loadtest", "tests")
ALL = (
    "pyproject.toml",
    "client/",
    "loadtest/pyproject.toml",
    "Makefile",
    "requirements/",
    "tests/tiers.py",
    "tests/report.py",
)
SECONDS = "tests/seconds.json"  # changes nothing that a test can see
CLI, UP = "server.cli", "server.up"
# Entry points of pyproject.toml: vLLM's plug-ins, in an instance; other packages' commands.
PLUGINS = ("weightsync.vllm_plugin.register", "server.instance.grammars.engine.register")
BENCH = "loadtest.cli"

CONFTEST = "tests.conftest"  # what it runs for every test reaches all when it is changed itself; what it calls does not

Node = tuple[str, str]  # a module and one of its names; a file that is no module, or one of tests, and ""
BODY, MAIN, WHOLE, STARTS = "", "__main__", "*", "STARTS"  # what a module runs when imported, as a program; all of it
IMPORTS = "import"  # of a module: what it imports, which is part of its body


@dataclass
class Name:
    """Mentions in the statements that bind one name of a module."""

    mentions: set[str] = field(default_factory=set)  # names, absolute and dotted
    imports: set[str] = field(default_factory=set)  # modules that are imported in it
    words: set[str] = field(default_factory=set)  # strings
    programs: set[str] = field(default_factory=set)  # of these, what stands where a command has its module
    fixtures: set[str] = field(default_factory=set)  # arguments of functions, and what is asked for by name
    always: bool = False  # a fixture that no test names
    text: str = ""  # what it means, if asked for


def is_module(path: str) -> bool:
    return path.endswith(".py") and path.split("/")[0] in ROOMS


def is_tests(path: str) -> bool:
    return is_module(path) and PurePosixPath(path).name.startswith("test_")


class Module:
    """The names of one source file."""

    def __init__(self, path: str, source: str, *, meaning: bool = False) -> None:
        parts = path.removesuffix(".py").split("/")
        self.path, self.is_package = path, parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.names: defaultdict[str, Name] = defaultdict(Name)
        self.aliases: dict[str, str] = {}  # names that are others': what they stand for
        self.stars: list[str] = []  # modules that it has all names of
        self._meaning, self._documented = meaning, "__doc__" in source
        tree = ast.parse(source)
        self.is_lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
        self._read(tree.body)
        own = len(self.name) + 1
        for bound in self.names.values():  # leaves names of libraries and of variables
            ours = (dotted for dotted in bound.mentions if dotted.partition(".")[0] in ROOMS)
            within = f"{self.name}."
            bound.mentions = {
                dotted
                for dotted in ours
                if not dotted.startswith(within) or self.is_package or dotted[own:].partition(".")[0] in self.names
            }

    def imported(self, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str, str]]:
        """For each name that is bound: the name, what it stands for, and the module or name that is imported."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or whole, whole, alias.name
            return
        parts = self.name.split(".") + ([BODY] if self.is_package else [])
        base = ".".join(filter(None, [*(parts[: -node.level] if node.level else []), node.module]))
        for alias in node.names:
            yield alias.asname or alias.name, f"{base}.{alias.name}", f"{base}.{alias.name}"

    def _read(self, body: Iterable[ast.stmt], under: tuple[ast.AST, ...] = (), *, late: bool = False) -> None:
        for node in body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name, target, module in self.imported(node):
                    if not late:
                        self.names[IMPORTS].imports.add(module.removesuffix(".*"))
                    if name == "*":
                        self.stars.append(module.removesuffix(".*"))
                        continue
                    self.aliases[name] = target
                    self.names[name].mentions.add(target)
                    self.names[name].text += target
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._bind(node.name, node, under)
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                plain = [one.id for to in targets for one in ast.walk(to) if isinstance(one, ast.Name)]
                inside = any(isinstance(to, ast.Attribute | ast.Subscript) for to in targets)
                for name in [*plain, *([BODY] if inside else [])]:
                    self._bind(name, node, under)
            elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                self._read(node.body if self.is_lazy else [], under, late=True)
                self._read(node.orelse, under)
            elif isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
                self._bind(MAIN, node, under)
            elif isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
                more = (*under, *(part for part in ast.iter_child_nodes(node) if not isinstance(part, ast.stmt)))
                self._read([part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)], more)
                for handler in getattr(node, "handlers", []):
                    self._read(handler.body, more)
            elif self._documented or not _is_text(getattr(node, "value", node)):  # not a docstring
                self._bind(BODY, node, under)

    def _bind(self, name: str, node: ast.stmt, under: tuple[ast.AST, ...]) -> None:
        bound = self.names[name]
        for part in (*under, node):
            self._mention(part, bound)
        if self._meaning:
            if not self._documented:
                for one in ast.walk(node):
                    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and not one.decorator_list:
                        one.body = [line for line in one.body if not _is_text(getattr(line, "value", line))]
            bound.text += " ".join([*map(ast.dump, (*under, node)), *sorted(bound.mentions)])
        for decorator in getattr(node, "decorator_list", []):
            bound.always |= any(word.arg == "autouse" for word in getattr(decorator, "keywords", []))
            self._register(name, decorator)

    def _register(self, name: str, decorator: ast.expr) -> None:
        """An argument of a decorator of ours is used by its owner (`app` of `@app.command()`), or by all importers."""
        root = _root(decorator)
        if self._is_own(root):
            self.names[root].mentions.add(f"{self.name}.{name}")
        elif self.aliases.get(root, "").split(".")[0] in ROOMS:
            self.names[BODY].mentions.add(f"{self.name}.{name}")

    def _is_own(self, name: str) -> bool:
        return name in self.names and name not in self.aliases

    def _mention(self, node: ast.AST, bound: Name) -> None:
        local: dict[str, str] = {}
        for late in _imports(node):
            for name, target, module in self.imported(late):
                local[name] = target
                bound.imports.add(module)
        todo: list[ast.AST] = [node]
        while todo:
            part = todo.pop()
            more: Iterable[ast.AST | None] = _parts(part)
            match part:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    arguments = [*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs]
                    bound.fixtures |= {argument.arg for argument in arguments}
                    seen = [one for one in part.decorator_list if not self._is_own(_root(one))]
                    types = [argument.annotation for argument in arguments] if part.decorator_list else []
                    more = [*seen, *types, *part.body, *part.args.defaults, *part.args.kw_defaults]
                case ast.Attribute() | ast.Name():
                    names, inner = list[str](), part
                    while isinstance(inner, ast.Attribute):
                        names, inner = [inner.attr, *names], inner.value
                    if isinstance(inner, ast.Name):
                        root = local.get(inner.id) or self.aliases.get(inner.id) or f"{self.name}.{inner.id}"
                        bound.mentions.add(".".join([root, *names]))
                        continue
                    more = [inner]
                case ast.Compare():  # asks what a command is, and starts none
                    bound.words |= set(_strings(part))
                    more = [one for one in more if not isinstance(one, ast.List)]
                case ast.List():
                    behind = [one for one, before in zip(part.elts, [None, *part.elts], strict=False) if _dash(before)]
                    bound.programs |= {one.value for one in behind if _is_text(one)}
                case ast.Call() if _root(part) != "logging":
                    called = getattr(part.func, "attr", getattr(part.func, "id", ""))
                    given = [one.value for one in part.args if _is_text(one)]
                    if called == "import_module":
                        bound.imports |= set(given)
                        more = []
                    elif called in ("getfixturevalue", "usefixtures"):
                        bound.fixtures |= set(given)
                    elif called[:1].isupper() or called == "start":
                        bound.programs |= set(given)
                case ast.Assign(value=ast.Constant(value=str() as text)):
                    bound.programs.add(text)
                case ast.Constant(value=str() as text):
                    bound.words.add(text)
            todo += [one for one in more if one is not None]


BLOCKS = ("body", "handlers", "cases", "orelse", "finalbody")


def _imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Those in a statement. Expressions, which most nodes are, have none."""
    todo = [node]
    for part in todo:
        if isinstance(part, ast.Import | ast.ImportFrom):
            yield part
        for name in BLOCKS:
            if isinstance(inner := getattr(part, name, None), list):
                todo += inner


@functools.cache
def _fields(kind: type[ast.AST]) -> tuple[str, ...]:
    return tuple(name for name in kind._fields if name not in ("ctx", "id", "attr", "kind", "type_comment"))


def _parts(node: ast.AST) -> list[ast.AST]:
    """As ast.iter_child_nodes, in less of the time, most of which goes on fields that hold no node."""
    found: list[ast.AST] = []
    for name in _fields(type(node)):
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            found.append(value)
        elif isinstance(value, list):
            found += [one for one in value if isinstance(one, ast.AST)]
    return found


def _root(node: ast.AST) -> str:
    """The first name of `a.b(...)`."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _dash(node: ast.AST | None) -> bool:
    """Whether a module may follow in a command: behind -m, or first of all."""
    return node is None or (isinstance(node, ast.Constant) and node.value == "-m")


def _strings(node: ast.AST) -> Iterator[str]:
    return (one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))


def _beside(path: str, other: str) -> bool:
    return PurePosixPath(other).is_relative_to(PurePosixPath(path).parent)


class Graph:
    """Of modules by path, and of the other files."""

    def __init__(self, modules: Mapping[str, Module], others: Iterable[str] = ()) -> None:
        self.modules = {module.name: module for module in modules.values()}
        self.edges: defaultdict[Node, set[Node]] = defaultdict(set)
        self._files: defaultdict[str, list[str]] = defaultdict(list)  # others by each word that stands for them
        for path in others:
            parts = path.split("/")
            for word in {path, parts[-1], "*" + PurePosixPath(path).suffix, parts[0], *parts[-2:-1]} - set(ROOMS):
                self._files[word].append(path)
        self._found: dict[str, Node | None] = {}
        for module in self.modules.values():
            self._connect(module)
        for path in filter(is_tests, modules):
            self._collect(modules[path])

    def find(self, dotted: str) -> Node | None:
        """The name of ours that this is, or the module."""
        if dotted not in self._found:
            self._found[dotted] = None  # a circle of names ends here
            self._found[dotted] = self._find(dotted)
        return self._found[dotted]

    def _find(self, dotted: str) -> Node | None:
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            if (module := self.modules.get(".".join(parts[:length]))) is None:
                continue
            if length == len(parts):
                return module.name, WHOLE
            name, rest = parts[length], parts[length + 1 :]
            if rest and module.aliases.get(name) in self.modules:
                return self.find(".".join([module.aliases[name], *rest]))
            if name not in module.names:
                for star in module.stars:
                    if (found := self.find(f"{star}.{name}")) is not None and found[1] in self.modules[found[0]].names:
                        return found
            return module.name, "__getattr__" if module.is_lazy and name not in module.names else name
        return None

    def _connect(self, module: Module) -> None:
        self.edges[module.name, WHOLE] = {(module.name, name) for name in module.names}
        if (parent := module.name.rpartition(".")[0]) in self.modules:
            self.edges[module.name, IMPORTS].add((parent, BODY))
        self.edges[module.name, BODY].add((module.name, IMPORTS))
        for name, bound in list(module.names.items()):
            out = self.edges[module.name, name]
            if module.name == CONFTEST and (name in (BODY, IMPORTS) or name.startswith("pytest_")):
                continue
            if name != IMPORTS:
                out.add((module.name, BODY))
            for dotted in bound.mentions:
                if (found := self.find(dotted)) is not None:
                    out |= {found, *([(found[0], BODY)] if found[0] != module.name else [])}
            out |= {(found[0], BODY) for dotted in bound.imports if (found := self.find(dotted)) is not None}
            if name == STARTS:
                for line in bound.words:
                    out |= self._program(line.split()[0], set(line.split()[1:]))
            elif not module.name.startswith(UP):
                for text in bound.programs:
                    out |= self._program(text, bound.words)
            for text in bound.words | bound.programs:
                found = self.find(text.replace(":", ".")) if "." in text else None
                if found is not None and found[1] in self.modules[found[0]].names:
                    out.add(found)
                for path in self._files.get(text) or self._files.get(text.rpartition("/")[2], ()):
                    # A folder's name is a common word: it means the folder to tests, and to modules above it.
                    if "." in text or module.name.startswith(("tests", "loadtest")) or _beside(module.path, path):
                        out.add((path, ""))
                if text.endswith(".py"):  # a program that is named by its file
                    beside = ".".join([*module.name.split(".")[: -1 + module.is_package or None], text[:-3]])
                    out |= {(found, WHOLE) for found in (beside,) if found in self.modules}
            if module.path.startswith("tests/"):
                if STARTS in module.names and name not in (STARTS, BODY, IMPORTS, *module.aliases):
                    out.add((module.name, STARTS))
                for fixture in bound.fixtures:
                    out |= self._fixture(module, fixture)
            out.discard((module.name, name))

    def _program(self, text: str, words: set[str]) -> set[Node]:
        """The nodes that `python -m TEXT` runs, with these words among its arguments."""
        if text != CLI:
            mains = [text, f"{text}.__main__"]
            ours = [name for name in mains if name in self.modules]
            return {(name, main) for name in ours for main in (BODY, MAIN)}
        nodes = set[Node]()
        for command in words:
            if command in OURS:
                nodes.add((OURS[command], command.replace("-", "_")))
            elif command in GROUPS:
                nodes.add((GROUPS[command][0], WHOLE))
            elif command == "bench":
                nodes.add((BENCH, WHOLE))
            if command == "instance":
                nodes |= {found for plugin in PLUGINS if (found := self.find(plugin)) is not None}
        return {*nodes, *((module, BODY) for module, _ in nodes), (f"{CLI}.app", BODY), (CLI, "main")}

    def _conftests(self, module: Module) -> Iterator[Module]:
        """Nearest first."""
        package = module.name.split(".")[: None if module.is_package else -1]
        for length in range(len(package), 0, -1):
            if (found := self.modules.get(".".join([*package[:length], "conftest"]))) is not None:
                yield found

    def _fixture(self, module: Module, name: str) -> set[Node]:
        places = [place for place in (module, *self._conftests(module)) if name in place.names]
        return {(place.name, name) for place in places[:1]}

    def _collect(self, module: Module) -> None:
        """A file of tests is a node of its own."""
        out = self.edges[module.path, ""]
        out |= {(module.name, name) for name in module.names if name.lower().startswith(("test", "pytest"))}
        for place in (module, *self._conftests(module)):
            out |= {(place.name, n) for n, found in place.names.items() if found.always or n.startswith("pytest_")}
            out.add((place.name, BODY))

    def imports(self) -> dict[str, set[str]]:
        """The modules that each imports, at its top level or in a function."""
        found = {
            name: {self.find(dotted) for bound in module.names.values() for dotted in bound.imports}
            for name, module in self.modules.items()
        }
        return {name: {node[0] for node in nodes if node is not None} - {name} for name, nodes in found.items()}

    @functools.cached_property
    def _mentioned_by(self) -> dict[Node, list[Node]]:
        found: defaultdict[Node, list[Node]] = defaultdict(list)
        for node, targets in self.edges.items():
            for target in targets:
                found[target].append(node)
        return found

    def reached(self, changed: Iterable[Node]) -> dict[str, list[Node]]:
        """Files of tests, the nearest first, each with the shortest way from what has changed to it."""
        before: dict[Node, Node | None] = dict.fromkeys(sorted(changed))
        todo, found = deque(before), dict[str, list[Node]]()
        while todo:
            node = todo.popleft()
            if is_tests(node[0]):
                way: list[Node] = [node]
                while (last := before[way[-1]]) is not None:
                    way.append(last)
                found[node[0]] = way[::-1]
                continue
            for nearer in self._mentioned_by.get(node, ()):
                if nearer not in before:
                    before[nearer] = node
                    todo.append(nearer)
        return found

    def undeclared(self) -> list[str]:
        """Files of tests that have `up` start something, of which nothing says what."""
        declared = self.reached((name, STARTS) for name, module in self.modules.items() if STARTS in module.names)
        return sorted(self.reached([(f"{UP}.server", "Server")]).keys() - declared.keys())


def changed_names(path: str, old: str | None, new: str | None) -> set[Node]:
    """The names that a change of this file changes; None where there is no such file."""
    if path == SECONDS:
        return set()
    if not is_module(path):
        return {(path, "")}
    read = [Module(path, source, meaning=True) for source in (old, new) if source is not None]
    texts = [{name: found.text for name, found in module.names.items() if found.text} for module in read]
    differ = {name for text in texts for name in text if len({text.get(name) for text in texts}) > 1}
    if len(read) == 1:
        differ |= {*texts[0], BODY}
    nodes = {(read[0].name, name) for name in differ}
    return nodes | ({(path, "")} if nodes and new is not None and is_tests(path) else set())


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@functools.cache
def load() -> Graph:
    """The graph of the files as they are here."""
    listed = git("ls-files", "-coz", "--exclude-standard").split("\0")
    listed = [path for path in listed if (ROOT / path).is_file()]
    with _uncollected():
        modules = {path: Module(path, (ROOT / path).read_text()) for path in listed if is_module(path)}
        return Graph(modules, [path for path in listed if path not in modules])


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Nodes of trees come and go by the million, without a cycle: collections would look at them for nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
