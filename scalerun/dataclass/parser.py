"""Command lines and YAML files -> a validated, read-only configuration.

Precedence, weakest first: the dataclasses' defaults, the architecture preset, ``--config`` files in
the order given, flags.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from omegaconf import DictConfig

from scalerun import __version__
from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.flags import Flag, FlagTable, flags_of
from scalerun.dataclass.foreign_flags import without_foreign_flags
from scalerun.dataclass.help_text import format_help
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.dataclass.yaml_config import (
    line_of,
    merge_group,
    read_yaml,
    to_yaml,
    unknown_key,
)

Cfg = TypeVar("Cfg", bound=ScalerunDataclass)
OWNERS_NAMED = 5
"""Components that a message names before it breaks off."""
BUILT_IN = {
    "--help": "show this help and end",
    "--version": "show the version and end",
    "--config": "YAML file of settings; may be repeated, later files win",
    "--print-config": "print the resolved configuration as YAML and end",
}


class Chooser(Protocol):
    """Names that a component flag accepts (a registry)."""

    def names(self) -> list[str]:
        """All names, sorted."""

    def kinds(self) -> list[str]:
        """Names that between them have every setting, sorted: presets share their model's."""

    def config_for(self, name: str) -> ScalerunDataclass:
        """A fresh configuration of a name; ConfigError where it is not known."""


@dataclass(frozen=True)
class _Slot:
    """A component slot of the root configuration."""

    field: str
    flag: str
    default: str | None
    help: str


def parse_config(
    config_class: type[Cfg],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    choosers: Mapping[str, Chooser] | None = None,
    load_plugins: Callable[[str | None], None] | None = None,
) -> Cfg:
    """Parse a command line into a configuration tree.

    Args:
        config_class: root of the tree. Its fields are settings, groups of settings, or component
            slots.
        argv: the arguments; None takes the process's own.
        prog: the command's name, for ``--help``.
        choosers: for each slot's field name, the registry that fills it.
        load_plugins: called with ``--user-dir`` (or None) before any component is looked up.

    Returns:
        The validated tree, read-only.

    Raises:
        ConfigError: anything on the command line or in a file is wrong; one sentence.
        SystemExit: code 0, after ``--help``, ``--version`` or ``--print-config``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--version" in words:
        print(f"{prog} {__version__}")
        raise SystemExit(0)
    builder = _Builder(config_class, words, prog, choosers or {})
    if load_plugins is not None:
        load_plugins(builder.early_value("--user-dir", "common", "user_dir"))
    return builder.build()


class _Builder:
    """One parse. Kept together because every step reads the words and the files."""

    def __init__(
        self, config_class: type[Any], words: list[str], prog: str, choosers: Mapping[str, Chooser]
    ) -> None:
        self.prog = prog
        self.choosers = choosers
        self.words = words
        self.root = config_class()
        self.slots = [
            _Slot(
                field.name,
                field.metadata["component"],
                field.metadata["default_component"],
                field.metadata["help"],
            )
            for field in dataclasses.fields(config_class)
            if "component" in field.metadata
        ]
        self.files = [(path, read_yaml(path)) for path in map(Path, self._early("--config"))]

    def build(self) -> Any:
        for path, content in self.files:
            self._refuse_flags_of_slots(path, content)
        for slot in self.slots:
            setattr(self.root, slot.field, self._component(slot))
        if "--help" in self.words or "-h" in self.words:
            unchosen = [
                slot.flag
                for slot in self.slots
                if not dataclasses.is_dataclass(getattr(self.root, slot.field))
            ]
            special = self._special_flags()
            print(format_help(self.prog, self._groups(), special, unchosen=unchosen))
            raise SystemExit(0)
        for path, content in self.files:
            self._merge_file(path, content)
        table = FlagTable(flag for name, group in self._groups() for flag in flags_of(group, name))
        self.words = without_foreign_flags(self.words, known=self._known(table))
        printing = self._scan(table)
        for flag in table.flags:
            flag.check()
        for _, group in reversed(list(self._groups())):
            group.validate()
        if printing:
            print(to_yaml(self.root), end="")
            raise SystemExit(0)
        return self.root.freeze()

    def early_value(self, flag: str, section: str, key: str) -> str | None:
        """A setting that is needed before the flags of the components are known."""
        given = self._early(flag)
        if given:
            return given[-1]
        for _, content in reversed(self.files):
            group = content.get(section)
            if isinstance(group, DictConfig) and group.get(key) is not None:
                return str(group.get(key))
        return None

    def _early(self, flag: str) -> list[str]:
        values = []
        for i, word in enumerate(self.words):
            if word == flag:
                if i + 1 == len(self.words) or self.words[i + 1].startswith("--"):
                    raise ConfigError(f"{flag} expects a value")
                values.append(self.words[i + 1])
            elif word.startswith(flag + "="):
                values.append(word.removeprefix(flag + "="))
        return values

    def _component(self, slot: _Slot) -> ScalerunDataclass:
        chooser = self.choosers[slot.field]
        name = self._chosen(slot) or slot.default or self._implied(slot)
        if name is None:
            if "--help" in self.words or "-h" in self.words:
                return ScalerunDataclass()
            raise ConfigError(
                f"{slot.flag} is required: {slot.help} (choices: {', '.join(chooser.names())})"
            )
        return chooser.config_for(name)

    def _chosen(self, slot: _Slot) -> str | None:
        return self.early_value(slot.flag, slot.field, "_name")

    def _implied(self, slot: _Slot) -> str | None:
        """What a component that is chosen needs in a slot that nobody has filled."""
        chosen = [(other.field, self._chosen(other)) for other in self.slots]
        configs = [self.choosers[field].config_for(name) for field, name in chosen if name]
        return next((c.implied[slot.field] for c in configs if slot.field in c.implied), None)

    def _refuse_flags_of_slots(self, path: Path, content: DictConfig) -> None:
        """Say how a file chooses a component, where it spells the flag that does: ``arch: NAME``.

        Before any component is looked up, since the file means to name one.
        """
        for slot in self.slots:
            word, section = slot.flag.removeprefix("--"), content.get(slot.field)
            wrong: list[tuple[str, ...]] = (
                [(word,)] if word != slot.field and word in content else []
            )
            if isinstance(section, str):
                wrong.append((slot.field,))
            if isinstance(section, DictConfig) and word in section:
                wrong.append((slot.field, word))
            for keys in wrong:
                raise ConfigError(
                    f"--config {path}:{line_of(path, keys)} chooses no component by "
                    f"{'.'.join(keys)}; write {slot.field}: {{_name: NAME}} for {slot.flag} NAME"
                )

    def _groups(self) -> Iterator[tuple[str, ScalerunDataclass]]:
        """Every group with its owner's name, the root's own settings first."""
        yield self.prog, self.root
        slots = {slot.field: slot for slot in self.slots}
        for field in dataclasses.fields(self.root):
            value = getattr(self.root, field.name)
            if isinstance(value, ScalerunDataclass) and dataclasses.is_dataclass(value):
                slot = slots.get(field.name)
                yield (f"{slot.flag} {value._name}" if slot else field.name), value

    def _merge_file(self, path: Path, content: DictConfig) -> None:
        groups = {
            field.name: getattr(self.root, field.name)
            for field in dataclasses.fields(self.root)
            if isinstance(getattr(self.root, field.name), ScalerunDataclass)
        }
        merge_group(self.root, content, path, sections=groups)
        for name, group in groups.items():
            section = content.get(name)
            if section is None:
                continue
            if not isinstance(section, DictConfig):
                raise ConfigError(
                    f"--config {path} has no settings under {name}; found {section!r}"
                )
            if section.get("_name", group._name) != group._name:
                raise ConfigError(
                    f"--config {path} describes the {name} {section.get('_name')}, but "
                    f"{group._name} is chosen; remove the section from the file or choose "
                    f"{section.get('_name')}"
                )
            self._refuse_foreign_keys(path, section, name)
            merge_group(group, section, path, (name,))

    def _refuse_foreign_keys(self, path: Path, section: DictConfig, name: str) -> None:
        """Refuse settings of a component that was not chosen."""
        for slot in self.slots:
            if slot.field == name:
                own = {flag.field for flag in flags_of(getattr(self.root, name), name)}
                for key in sorted(set(map(str, section)) - own - {"_name"}):
                    where = f"--config {path}:{line_of(path, (name, key))} sets {name}.{key}, which"
                    self._refuse_foreign(slot, where, partial(_has_field, key))

    def _refuse_foreign(self, slot: _Slot, what: str, wanted: Callable[[Flag], bool]) -> None:
        """Refuse a setting that only other components of a slot have."""
        chooser = self.choosers[slot.field]
        owners = [
            name
            for name in chooser.kinds()
            if any(map(wanted, flags_of(chooser.config_for(name), name)))
        ]
        if owners:
            chosen = getattr(self.root, slot.field)._name
            some = " or ".join(owners[:OWNERS_NAMED]) + " …" * (len(owners) > OWNERS_NAMED)
            raise ConfigError(f"{what} belongs to {slot.flag} {some}, but {slot.flag} is {chosen}")

    def _special_flags(self) -> dict[str, str]:
        special = dict(BUILT_IN)
        for slot in self.slots:
            names = ", ".join(self.choosers[slot.field].names())
            default = f"; default {slot.default}" if slot.default else ""
            special[slot.flag] = f"{slot.help} (choices: {names}{default})"
        return special

    def _scan(self, table: FlagTable) -> bool:
        """Apply the flags; return whether ``--print-config`` is among them."""
        with_value = {"--config", *(slot.flag for slot in self.slots)}
        free = list(table.positionals)
        seen: set[str] = set()
        printing = False
        words = iter(self.words)
        for word in words:
            spelling, equals, inline = word.partition("=")
            if not word.startswith("-") or word == "-":
                if not free:
                    raise ConfigError(f"{word!r} is not expected here; flags start with --")
                if free[0].type.container is list:
                    free[0].add(word)
                else:
                    free.pop(0).set(word)
            elif spelling == "--print-config":
                printing = True
            elif spelling in with_value:
                if not equals:
                    next(words)
            elif spelling in table.by_spelling:
                flag, on = table.by_spelling[spelling]
                self._set(flag, on, spelling, inline if equals else None, words, flag.name in seen)
                seen.add(flag.name)
            else:
                self._refuse(spelling, table)
        return printing

    @staticmethod
    def _set(
        flag: Flag, on: bool, spelling: str, value: str | None, words: Iterator[str], again: bool
    ) -> None:
        if flag.is_switch:
            if value is not None and not on:
                raise ConfigError(f"{spelling} takes no value; {value!r} was given")
            flag.set(value if value is not None else str(on).lower())
            return
        if value is None:
            value = next(words, None)
            if value is None or value.startswith("--"):
                raise ConfigError(f"{spelling} expects a value ({flag.type.metavar})")
        flag.set(value, append=again)

    def _known(self, table: FlagTable) -> list[str]:
        """Every spelling that the command takes."""
        return [*table.by_spelling, *BUILT_IN, *(slot.flag for slot in self.slots)]

    def _refuse(self, spelling: str, table: FlagTable) -> NoReturn:
        """Refuse an unknown flag, with the closest ones or the component that has it."""
        for slot in self.slots:
            self._refuse_foreign(
                slot, spelling, lambda flag: spelling in flag.spellings + flag.negations
            )
        known = self._known(table)
        close = difflib.get_close_matches(spelling, known, n=3, cutoff=0.6)
        prefixed = [name for name in known if name.startswith(spelling) and len(spelling) > 3]
        names = list(dict.fromkeys([*close, *prefixed[:3]]))[:3]
        hint = f"; did you mean {' or '.join(names)}?" if names else "; see --help"
        raise ConfigError(f"{spelling} is not a flag{hint}")


def _has_field(name: str, flag: Flag) -> bool:
    return flag.field == name


def config_from_dict(
    config_class: type[Cfg], content: dict[str, Any], *, choosers: Mapping[str, Chooser]
) -> Cfg:
    """Rebuild a configuration from :meth:`ScalerunDataclass.to_dict`; not yet frozen.

    Raises:
        ConfigError: a key is unknown; it was written by another version, or a plug-in is missing.
    """
    root = config_class()
    for field in dataclasses.fields(root):  # type: ignore[arg-type]
        if field.name not in content:
            continue
        values = content[field.name]
        if values is None:
            continue
        if "component" in field.metadata:
            setattr(root, field.name, choosers[field.name].config_for(values["_name"]))
        group = getattr(root, field.name)
        if not isinstance(group, ScalerunDataclass):
            setattr(root, field.name, values)
            continue
        known = [f.name for f in dataclasses.fields(group)]  # type: ignore[arg-type]
        for key, value in values.items():
            if key != "_name":
                if key not in known:
                    raise unknown_key("the stored configuration", f"{field.name}.{key}", key, known)
                setattr(group, key, value)
    return root
