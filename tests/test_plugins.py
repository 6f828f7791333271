"""load_object: both forms of a name, and every way in which a name can be wrong."""

from __future__ import annotations

import pytest

from torchspec.errors import ConfigError
from torchspec.plugins import load_object


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nonexistent", *__import__("sys").path])
    return tmp_path


def test_module_and_file_forms(folder):
    from pathlib import PurePosixPath

    assert load_object("pathlib:PurePosixPath") is PurePosixPath
    assert load_object("pathlib:PurePosixPath.joinpath") is PurePosixPath.joinpath
    (folder / "sub").mkdir()
    (folder / "sub" / "sibling_of_mine.py").write_text("VALUE = 7\n")
    (folder / "sub" / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom sibling_of_mine import VALUE\n"
        "@dataclass\nclass Mine:\n    x: int = VALUE\n"
    )
    mine = load_object("sub/mine.py:Mine")
    assert mine().x == 7
    assert load_object(f"{folder}/sub/mine.py:Mine") is mine, "the same file must give the same class"


def test_a_module_in_the_current_folder(folder):
    (folder / "local_plugin_module.py").write_text("def f():\n    return 3\n")
    assert load_object("local_plugin_module:f")() == 3


def test_files_of_the_same_name_stay_apart(folder):
    for name, value in (("a", 1), ("b", 2)):
        (folder / name).mkdir()
        (folder / name / "same.py").write_text(f"X = {value}\n")
    assert (load_object("a/same.py:X"), load_object("b/same.py:X")) == (1, 2)


@pytest.mark.parametrize(
    "spec, words",
    [
        ("nothing", "does not name an object"),
        (":x", "does not name an object"),
        ("no_such_module_xyz:f", "no module 'no_such_module_xyz'"),
        ("pathlib.nope:f", "pathlib"),
        ("pathlib:PurePosixPaht", "Did you mean 'PurePosixPath'?"),
        ("missing/file.py:f", "no file"),
        ("boom.py:f", "raised ZeroDivisionError while being imported"),
        ("needs.py:f", "raised ModuleNotFoundError while being imported"),
        ("bad_syntax.py:f", "line 2"),
    ],
)
def test_wrong_names_are_sentences(folder, spec, words):
    (folder / "boom.py").write_text("x = 1\ny = 1 / 0\n")
    (folder / "needs.py").write_text("import a_module_that_is_not_there\n")
    (folder / "bad_syntax.py").write_text("x = 1\ny = = 2\n")
    with pytest.raises(ConfigError, match=None) as caught:
        load_object(spec)
    assert words in str(caught.value)


def test_the_modules_own_error_is_the_cause_and_it_can_be_mended(folder):
    (folder / "mend.py").write_text("y = 1 / 0\n")
    with pytest.raises(ConfigError) as caught:
        load_object("mend.py:y")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "mend.py, line 1" in str(caught.value)
    (folder / "mend.py").write_text("y = 12345  # mended\n")
    assert load_object("mend.py:y") == 12345
