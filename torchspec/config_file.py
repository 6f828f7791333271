"""A run's settings: read from TOML, checked, overlaid by the command line, written back.

    TOML --pydantic (strict types, no extra keys)--> Config --tyro (--draft.ttt-steps 5)--> Config
    --validate--> run
                                                                                              \\-->
                                                                                              <output>/config.toml

Nothing here imports torch: a wrong setting is refused before anything heavy is loaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchspec.config import Config
from torchspec.errors import ConfigError
from torchspec.validation import validate

FREE_FIELDS = ("environment.args", "draft.args")  # dict fields whose keys belong to the user's own code


def load_config(path: str | Path, overrides: Sequence[str] = (), prog: str = "torchspec train CONFIG.toml") -> Config:
    """The settings in the TOML file ``path`` with the command line's ``overrides`` on top, checked;
    output_dir filled in.

    Raises ConfigError with one sentence per fault. ``--help`` and a wrong flag leave through tyro's
    SystemExit (0 and 2).
    """
    path = Path(path)
    config = config_from_toml(read_text(path), str(path))
    config = overlay(config, overrides, prog)
    if not config.output_dir:
        config = dataclasses.replace(config, output_dir=str(Path("outputs") / path.stem))
    validate(config)
    return config


def read_text(path: Path) -> str:
    """The file's text; ConfigError where it is missing, a folder, or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"There is no config file {path}.{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The config file {path} cannot be read: {error}.") from error


# -- TOML -> Config -----------------------------------------------------------------------------------------


def config_from_toml(text: str, name: str = "config") -> Config:
    """A Config from TOML text: every type exact (a whole number may stand for a float), unknown settings
    refused.

    ``name`` is the file's name in the messages of ConfigError.
    """
    import pydantic  # 0.1 s; torchspec --help does without

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}.") from error
    _refuse_unwritable(table, name, ())
    try:
        return pydantic.TypeAdapter(Config).validate_json(json.dumps(table), strict=True, extra="forbid")
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_sentence(fault, name) for fault in error.errors())) from None


def _refuse_unwritable(value: Any, name: str, where: tuple[str, ...]) -> None:
    """TOML has dates and infinities; no setting does, and they cannot pass through JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_unwritable(item, name, (*where, key))
    elif isinstance(value, list):
        for item in value:
            _refuse_unwritable(item, name, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}: {'.'.join(where)} = {value} is not a finite number.")
    elif not isinstance(value, (str, int, float, bool)):
        raise ConfigError(f"{name}: {'.'.join(where)} = {value} is a date or time, which no setting takes; quote it.")


def _sentence(fault: dict[str, Any], name: str) -> str:
    """One of pydantic's faults as a sentence: the setting, its value, what would work."""
    where = ".".join(str(part) for part in fault["loc"])
    kind, value = fault["type"], fault["input"]
    if kind == "unexpected_keyword_argument":
        return f"{name}: {where} is not a setting.{nearest_setting(where)}"
    if kind == "missing":
        where = ".".join(str(part) for part in fault["loc"][:-1])
        return f"{name}: {where} = {_value(value)} has too few values."
    works = {
        "int_type": "a whole number",
        "float_type": "a number",
        "string_type": "text in quotes",
        "bool_type": "true or false",
        "tuple_type": "a list, [ ... ]",
        "dict_type": "a table",
        "dataclass_type": f"a table: write [{where}] and its settings below",
        "too_long": f"a list of at most {fault.get('ctx', {}).get('max_length')} values",
        "literal_error": f"one of {fault.get('ctx', {}).get('expected')}",
    }.get(kind)
    if works is None:
        return f"{name}: {where} = {_value(value)}: {fault['msg']}."
    return f"{name}: {where} = {_value(value)} does not fit; it takes {works}.{_unquoted(kind, value)}"


def _unquoted(kind: str, value: Any) -> str:
    """The commonest slip: a number or a boolean in quotes."""
    wanted = {"int_type": int, "float_type": (int, float), "bool_type": bool}.get(kind)
    if wanted is None or not isinstance(value, str):
        return ""
    try:
        inner = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        return ""
    fits = isinstance(inner, wanted) and (kind == "bool_type" or not isinstance(inner, bool))
    return f" Write {value} without quotes." if fits else ""


def setting_names(kind: type = Config, prefix: str = "") -> list[str]:
    """Every setting and table by its dotted name, in the order of the config files."""
    import typing

    names: list[str] = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        names.append(prefix + field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            names += setting_names(hints[field.name], f"{prefix}{field.name}.")
    return names


def nearest_setting(where: str) -> str:
    """' Did you mean ...?' for a dotted name that does not exist, or ''."""
    names = setting_names()
    last = where.rpartition(".")[2]
    # A right name in the wrong table is nearer than a similar name in the right one.
    elsewhere = [n for n in names if n.rpartition(".")[2] == last]
    # Wrong only in its last part: look among the neighbours first, since the long common prefix makes all
    # look alike.
    table = where.rpartition(".")[0]
    neighbours = [n for n in names if n.rpartition(".")[0] == table]
    by_last = {n.rpartition(".")[2]: n for n in reversed(neighbours)}
    near = [by_last[n] for n in difflib.get_close_matches(last, by_last, n=1, cutoff=0.6)]
    near = near or elsewhere[:2] or difflib.get_close_matches(where, names, n=1, cutoff=0.6)
    if not near:
        by_any = {n.rpartition(".")[2]: n for n in reversed(names)}
        near = [by_any[n] for n in difflib.get_close_matches(last, by_any, n=1, cutoff=0.7)]
    return f" Did you mean {' or '.join(near)}?" if near else " `torchspec train --help` lists all settings."


# -- command line -------------------------------------------------------------------------------------------


ONE_RANK = ("--parallelism.context-parallel-degree", "1", "--parallelism.no-shard", "--pipeline.ranks", "1")
"""Overrides for commands that run on one rank, whatever the config was trained with."""


def overlay(config: Config, overrides: Sequence[str], prog: str = "torchspec train CONFIG.toml") -> Config:
    """``config`` with flags like ``--draft.ttt-steps 5`` or ``--checkpoint.resume`` applied by tyro.

    A new key of a free table is taken too: ``--environment.args.min-word-len 3`` (its value is read as TOML,
    else as text).
    """
    if not overrides:
        return config
    import tyro  # 0.1 s

    config, rest = _new_free_keys(config, _switches(config, overrides))
    config = tyro.cli(
        Config,
        default=config,
        args=rest,
        prog=prog,
        config=(),
        description="Settings from the TOML file, each open to an override here.",
    )
    for name in setting_names():
        value = getattr_dotted(config, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} {value} is not a finite number.")
    return config


def _switches(config: Config, args: Sequence[str]) -> list[str]:
    """``--draft.enabled false`` (or ``=false``) as tyro spells it: ``--draft.no-enabled``."""
    names = {name for name in setting_names() if isinstance(getattr_dotted(config, name), bool)}
    rest: list[str] = []
    position = 0
    while position < len(args):
        flag, equals, value = args[position].partition("=")
        position += 1
        name = flag.removeprefix("--").replace("-", "_")
        if name in names and not equals and position < len(args) and args[position].lower() in ("true", "false"):
            value = args[position]
            position += 1
        if name in names and value.lower() in ("true", "false"):
            table, _, leaf = flag.removeprefix("--").rpartition(".")
            dot = f"{table}." if table else ""
            rest.append(f"--{dot}{leaf}" if value.lower() == "true" else f"--{dot}no-{leaf}")
        else:
            rest.append(flag + equals + value if equals else flag)
    return rest


def _new_free_keys(config: Config, args: list[str]) -> tuple[Config, list[str]]:
    """Take the flags of free tables whose key the TOML did not have: tyro knows only the keys that it had."""
    rest: list[str] = []
    position = 0
    while position < len(args):
        flag, equals, inline = args[position].partition("=")
        position += 1
        table = next((t for t in FREE_FIELDS if flag.replace("_", "-").startswith(f"--{t}.")), None)
        key = flag[len(f"--{table}.") :].replace("-", "_") if table else ""
        known = {} if table is None else getattr_dotted(config, table)
        if table is None or not key or key.removeprefix("no_").split(".")[0] in {k.replace("-", "_") for k in known}:
            rest.append(args[position - 1])
            continue
        if not equals and (position == len(args) or args[position].startswith("--")):
            raise ConfigError(f"{flag} needs a value, for example {flag} true.")
        text = inline if equals else args[position]
        position += 0 if equals else 1
        try:
            value = tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError:
            value = text
        _refuse_unwritable(value, flag, ("x",))
        config = _replace_dotted(config, table, {**known, key: value})
    return config, rest


def getattr_dotted(config: Any, name: str) -> Any:
    """The value of the setting with a dotted name."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def _replace_dotted(config: Any, name: str, value: Any) -> Any:
    first, _, rest = name.partition(".")
    inner = _replace_dotted(getattr(config, first), rest, value) if rest else value
    return dataclasses.replace(config, **{first: inner})


# -- Config -> TOML -----------------------------------------------------------------------------------------


def config_to_toml(config: Config) -> str:
    """The whole config as TOML text. Exact: reading it gives an equal Config, which is checked here."""
    lines = ["# All settings of this run. To run them again: torchspec train <this file> --output-dir <a new folder>"]
    _write_table(config, "", lines)
    text = "\n".join(lines) + "\n"
    if config_from_toml(text, "the resolved config") != config:
        raise ConfigError(
            "The settings cannot be written as TOML: a free table (environment.args, draft.args) holds a "
            "value other than text, numbers, booleans, lists and tables."
        )
    return text


def _write_table(table: Any, prefix: str, lines: list[str]) -> None:
    """Plain settings first, then one [section] per nested dataclass, as TOML demands."""
    fields = dataclasses.fields(table)
    for field in fields:
        value = getattr(table, field.name)
        if not dataclasses.is_dataclass(value):
            lines.append(f"{field.name} = {_value(value)}")
    for field in fields:
        value = getattr(table, field.name)
        if dataclasses.is_dataclass(value):
            lines += ["", f"[{prefix}{field.name}]"]
            _write_table(value, f"{prefix}{field.name}.", lines)


def _value(value: Any) -> str:
    """A value in TOML's notation. JSON's string escapes are TOML's, but for DEL; repr() of a float reads back
    exactly."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    return json.dumps(str(value))


def _key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "_-") for c in key)
    return key if bare else json.dumps(key, ensure_ascii=False).replace("\x7f", "\\u007f")
