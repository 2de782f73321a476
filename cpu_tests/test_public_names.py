"""Rules that hold for every file of the package: docstrings, sizes, registrations, imports."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import scalerun

PACKAGE = Path(scalerun.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LINES = {"scalerun/trainer.py": 500, "scalerun/models/hf/modeling_scalerun.py": 500}
FUNCTION_LINES, FORWARD_LINES = 60, 40
CONTRACTS = {"initializers", "reset_buffers"}
"""Methods of documented protocols, which modules follow without deriving from them."""


def name_of(path):
    """A file's place in the repository."""
    return path.relative_to(PACKAGE.parent).as_posix()


def module_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def is_public(node):
    named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return named and not node.name.startswith("_")


def overrides(module, class_name, method):
    """Whether a base of the class has the method too, and with it the contract."""
    if method in CONTRACTS:
        return True
    cls = getattr(importlib.import_module(module), class_name)
    return any(hasattr(base, method) for base in cls.__mro__[1:])


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_public_name_has_a_docstring(path):
    tree, module = tree_of(path), module_of(path)
    bare = [] if ast.get_docstring(tree) else [module]
    for node in filter(is_public, tree.body):
        if not ast.get_docstring(node):
            bare.append(node.name)
        if isinstance(node, ast.ClassDef):
            bare += [
                f"{node.name}.{method.name}"
                for method in filter(is_public, node.body)
                if not ast.get_docstring(method) and not overrides(module, node.name, method.name)
            ]
    assert bare == []


def test_every_file_is_short():
    too_long = {}
    for path in FILES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > LINES.get(name_of(path), 400):
            too_long[name_of(path)] = lines
    assert too_long == {}


def test_every_function_is_short():
    too_long = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                limit = FORWARD_LINES if node.name == "forward" else FUNCTION_LINES
                lines = _code_lines(node)
                if lines > limit:
                    too_long[f"{name_of(path)}:{node.name}"] = lines
    assert too_long == {}


def _code_lines(function):
    """Lines of a function without its docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function):
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    return lines


def registering(path):
    """Whether a file uses a ``register_*`` decorator, or calls what one returns."""
    calls = [node.func for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    return any(isinstance(f, ast.Name) and f.id.startswith("register_") for f in calls)


def registries():
    """Packages whose ``__init__`` imports registered files."""
    return sorted({path.parent for path in FILES if registering(path)})


def test_there_are_registries():
    found = {folder.name for folder in registries()}
    assert {"tasks", "models", "criterions", "optim", "lr_scheduler"} <= found


@pytest.mark.parametrize("folder", registries(), ids=lambda folder: folder.name)
def test_an_init_imports_exactly_the_files_that_register_something(folder):
    package = module_of(folder / "__init__.py")
    imported = set()
    for node in tree_of(folder / "__init__.py").body:
        if isinstance(node, ast.ImportFrom) and node.module == package:
            imported |= {alias.name for alias in node.names}
    assert imported == {path.stem for path in folder.glob("*.py") if registering(path)}


def test_no_modules_import_each_other_in_a_circle():
    """Of all imports at the top of a file, also those for type checkers."""
    graph = {module_of(path): _imports(path) for path in FILES}
    done, circles = set(), []

    def visit(module, trail):
        if module in trail:
            circles.append([*trail[trail.index(module) :], module])
        elif module not in done:
            for other in sorted(graph[module]):
                visit(other, [*trail, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    assert circles == []


def _imports(path):
    """Modules of the package that a file imports."""
    modules = {module_of(each) for each in FILES}
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from package import module` needs the module; the package's own names its file.
            found |= (inner & modules) or {node.module}
    return found & modules - {module_of(path)}


IMPORT_ALONE = """
import importlib, json, sys
failed = {}
for name in json.loads(sys.argv[1]):
    for loaded in [key for key in sys.modules if key.split(".")[0] == "scalerun"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed[name] = str(error)
print(json.dumps(failed))
"""


@pytest.mark.long
def test_every_module_can_be_imported_first():
    """In one fresh interpreter that forgets our modules, not the libraries, before each."""
    names = [module_of(path) for path in FILES]
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALONE, json.dumps(names)],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {}


def test_settings_and_names_need_no_torch():
    probe = "import sys, scalerun.registry, scalerun.plugins, scalerun.dataclass.parser;"
    probe += "print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert result.stdout == "False\n", result.stderr


def test_an_all_lists_what_is_there():
    for path in FILES:
        if "__all__" not in path.read_text(encoding="utf-8"):
            continue
        module = importlib.import_module(module_of(path))
        for name in getattr(module, "__all__", []):
            assert hasattr(module, name), f"{module.__name__}.{name}"


def test_every_setting_is_explained():
    """No flag without a help text, and none that ends in a full stop."""
    from scalerun.cli.registries import CHOOSERS
    from scalerun.dataclass.configs import ScalerunConfig

    groups = [c.config_for(name) for c in CHOOSERS.values() for name in c.names()]
    groups += [group for group in vars(ScalerunConfig()).values() if group is not None]
    for group in groups:
        for field in inspect.get_annotations(type(group)):
            metadata = type(group).__dataclass_fields__[field].metadata
            if "help" in metadata:
                assert metadata["help"], field
                assert not metadata["help"].endswith("."), field
