"""Load a class or function by name: the way that research code outside the package plugs in.

Two forms:
  "package.module:attribute"       imported; the current folder is searched too (last)
  "path/to/file.py:attribute"      a file, relative to the current folder; its folder is searched too (last)
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torchspec.errors import ConfigError


def load_object(spec: str) -> Any:
    """The object that ``spec`` names, "module:attribute" or "path/to/file.py:attribute".

    The same file gives the same module every time. Raises ConfigError when the form, the module or the
    attribute is wrong; an error that the module itself raises while imported is the ConfigError's cause.
    """
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute:
        raise ConfigError(f"'{spec}' does not name an object: write 'module:Name' or 'path/to/file.py:Name'.")
    module = _load_file(place, spec) if place.endswith(".py") else _load_module(place, spec)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, [n for n in dir(found) if not n.startswith("_")], n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"'{spec}': {place} was loaded but has no '{part}'.{hint}")
        found = getattr(found, part)
    return found


def _load_module(name: str, spec: str) -> ModuleType:
    _search_last(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The named module itself (or a package above it) is missing, as against something that the module
        # imports.
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"'{spec}': there is no module '{error.name}' on the Python path or in {Path.cwd()}; install"
                f" it, or give a file as 'path/to/file.py:{spec.rpartition(':')[2]}'."
            ) from error
        raise _import_failed(spec, error) from error
    except Exception as error:
        raise _import_failed(spec, error) from error


def _load_file(place: str, spec: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(
            f"'{spec}': there is no file {path}; the path is taken from the current folder, {Path.cwd()}."
        )
    # The digest keeps two files of the same name apart.
    name = f"torchspec_plugin_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    _search_last(path.parent)
    description = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(description)
    sys.modules[name] = module  # dataclasses and pickle look their module up while it runs
    try:
        description.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _import_failed(spec, error) from error
    return module


def _import_failed(spec: str, error: Exception) -> ConfigError:
    """The sentence for an error inside the plug-in, with the deepest place that the traceback knows."""
    place = ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" ({error.filename}, line {error.lineno})"
    else:
        step = error.__traceback__
        while step is not None and step.tb_next is not None:
            step = step.tb_next
        if step is not None:
            place = f" ({step.tb_frame.f_code.co_filename}, line {step.tb_lineno})"
    return ConfigError(f"'{spec}': its module raised {type(error).__name__} while being imported: {error}{place}.")


def _search_last(folder: Path) -> None:
    """Let imports find ``folder`` too, after everything that is installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
