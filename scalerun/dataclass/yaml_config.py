"""YAML files <-> configuration groups. OmegaConf reads, types and merges."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass


def option_names(group: ScalerunDataclass) -> list[str]:
    """Names of a group's own settings, without nested groups and component slots."""
    return [f.name for f in dataclasses.fields(group) if "aliases" in f.metadata]  # type: ignore[arg-type]


def read_yaml(path: Path, flag: str = "--config") -> DictConfig:
    """Read a configuration file.

    Args:
        flag: the flag that named it, for messages.

    Raises:
        ConfigError: the file is missing, is not YAML, or is not a mapping; names file and line.
    """
    try:
        loaded = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None)
        if isinstance(error, UnicodeDecodeError):
            reason = "it is not UTF-8 text"
        elif reason is None:
            raise ConfigError(f"{flag} {path} must be a mapping of settings") from error
        raise ConfigError(f"{flag} {path} cannot be read: {reason}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise ConfigError(f"{flag} {path}{line} is not YAML: {problem}") from error
    if isinstance(yaml.compose(path.read_text(encoding="utf-8")), yaml.ScalarNode):
        raise ConfigError(f"{flag} {path} must be a mapping of settings")
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{flag} {path} holds a list; it must be a mapping of settings")
    return loaded


def line_of(path: Path, keys: tuple[str, ...]) -> int:
    """The line (from 1) on which a nested key of a YAML file stands; 1 when it cannot be told."""
    node: Any = yaml.compose(path.read_text(encoding="utf-8"))
    line = 1
    for key in keys:
        for key_node, value_node in getattr(node, "value", []):
            if key_node.value == key:
                line, node = key_node.start_mark.line + 1, value_node
                break
    return line


def merge_group(
    group: ScalerunDataclass,
    values: DictConfig,
    path: Path,
    keys: tuple[str, ...] = (),
    *,
    sections: Iterable[str] = (),
) -> None:
    """Set a group's settings from a section of a YAML file.

    Args:
        keys: where in the file the section stands, for messages.
        sections: names of nested groups, which somebody else merges.

    Raises:
        ConfigError: an unknown key, with the closest names, or a value of the wrong type.
    """
    names = option_names(group)
    for key in map(str, values):
        if key == "_name" or key in sections:
            continue
        where = f"--config {path}:{line_of(path, (*keys, key))}"
        dotted = ".".join((*keys, key))
        if key not in names:
            raise unknown_key(where, dotted, key, [*names, *sections])
        try:
            typed = OmegaConf.structured(type(group), flags={"allow_objects": False})
            merged = OmegaConf.merge(typed, OmegaConf.masked_copy(values, [key]))
            value = OmegaConf.to_container(merged, resolve=True, throw_on_missing=False)[key]  # type: ignore[index,call-overload]
        except (OmegaConfBaseException, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{where} sets {dotted} to a wrong value: {reason}") from error
        setattr(group, key, value)


def unknown_key(where: str, dotted: str, key: str, known: list[str]) -> ConfigError:
    """The error for a key that is no setting, with the closest names."""
    close = difflib.get_close_matches(key, known, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else f" (known: {', '.join(known)})"
    return ConfigError(f"{where} sets {dotted}, which is no setting{hint}")


def to_yaml(cfg: ScalerunDataclass) -> str:
    """A configuration as a YAML file that ``--config`` reads back to the same values."""
    return yaml.safe_dump(_escaped(cfg.to_dict()), sort_keys=False, allow_unicode=True)


def _escaped(value: Any) -> Any:
    """Protect ``${`` in text, which would be read back as a reference."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value
