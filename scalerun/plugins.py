"""Code from outside the package: ``--user-dir`` folders and installed plug-ins."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path

from scalerun.dataclass.errors import ConfigError, UserError

PREFIX = "scalerun_user_modules"
ENTRY_POINT_GROUP = "scalerun.plugins"
_NOT_PLUGINS = {Path(__file__).parent, Path(importlib.__file__).parent}
"""Folders whose code only leads to a plug-in's."""


def load_plugins(user_dir: str | None) -> None:
    """Import installed plug-ins, then the folder of ``--user-dir``, so that they can register.

    Installed plug-ins announce a module in the entry-point group ``scalerun.plugins``. A folder is
    imported under a private prefix, so its name may be anything, and only once per process.

    Raises:
        ConfigError: the folder does not exist or holds no Python file.
        UserError: a plug-in's own code fails; names its file and line.
    """
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        with _explained(f"the installed plug-in {entry_point.name} ({entry_point.value})", None):
            entry_point.load()
    if user_dir is not None:
        import_user_dir(Path(user_dir))


def import_user_dir(folder: Path) -> None:
    """Import a folder: as a package where it has an ``__init__.py``, else every file in it."""
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(
            f"--user-dir {folder} is not a folder; give the one with the plug-in code"
        )
    package = f"{PREFIX}.{folder.name}"
    init = folder / "__init__.py"
    files = [] if init.exists() else sorted(folder.glob("*.py"))
    if not files and not init.exists():
        raise ConfigError(f"--user-dir {folder} holds no .py file")
    sys.modules.setdefault(PREFIX, _namespace(PREFIX, []))
    if init.exists():
        _import_file(package, init, [str(folder)])
        return
    sys.modules.setdefault(package, _namespace(package, [str(folder)]))
    for file in files:
        _import_file(f"{package}.{file.stem}", file, None)


def _namespace(name: str, path: list[str]) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = path
    return module


def _import_file(name: str, file: Path, search: list[str] | None) -> None:
    if name in sys.modules:
        if sys.modules[name].__file__ != str(file):
            raise ConfigError(
                f"--user-dir: another folder named {file.parent.name} is already loaded from "
                f"{sys.modules[name].__file__}"
            )
        return
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=search)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--user-dir: {file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _explained("--user-dir", file.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


@contextlib.contextmanager
def plugin_errors() -> Iterator[None]:
    """Around the building of components: an error that a plug-in's code raises names its place.

    Raises:
        UserError: code of a plug-in failed; other errors pass as they are.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # somebody else's code may raise anything
        installed = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
        packages = {PREFIX, *(each.module.partition(".")[0] for each in installed)}
        places = [
            f"{frame.f_code.co_filename}:{line}"
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_globals.get("__name__", "").partition(".")[0] in packages
        ]
        if not places:
            raise
        raise UserError(f"{places[-1]}: {type(error).__name__}: {error}; repair it") from error


@contextlib.contextmanager
def _explained(what: str, folder: Path | None) -> Iterator[None]:
    """Turn an error in a plug-in's own code into one sentence that names file and line.

    Args:
        what: how the user named the plug-in.
        folder: where its code lies; None takes any code but ours and the import machinery's.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # somebody else's code may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{what}: {_place(error, folder)}{reason}; repair it") from error


def _place(error: Exception, folder: Path | None) -> str:
    """``file:line: `` of the plug-in's last line on the way to an error, if there is one."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}: "
    frames = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    if folder is not None:
        frames = [frame for frame in frames if frame[0].is_relative_to(folder)]
    else:
        frames = [f for f in frames if f[0].exists() and not set(f[0].parents) & _NOT_PLUGINS]
    return f"{frames[-1][0]}:{frames[-1][1]}: " if frames else ""
