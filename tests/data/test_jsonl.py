"""JSONL environments: bad files are named by line, splits are disjoint, epochs are reshuffled, scorers
score."""

from __future__ import annotations

import json

import pytest

from torchspec.data.config import EnvironmentConfig
from torchspec.data.environments import build_environment
from torchspec.data.scorers import BUILT_IN, numbers_in
from torchspec.errors import ConfigError


def half_when_short(prompt, response, answer, row):
    """A scorer of a user's own, named from the config."""
    return {"short": 0.5 * (len(response) <= row["limit"]), "answerless": float(answer is None)}


CONSTANT = 3


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="data.jsonl"):
        file = tmp_path / name
        file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
        return str(file)

    return write


def build(path, scorer="exact", seed=0, eval_items=2, **fields):
    return build_environment(
        EnvironmentConfig(name="jsonl", path=path, scorer=scorer, eval_items=eval_items, **fields), seed
    )


def rows(n):
    return [{"prompt": f"p{i}", "answer": i} for i in range(n)]


def test_an_epoch_is_a_permutation_and_epochs_differ(write):
    path = write(*rows(30))
    environment = build(path, eval_items=6)
    held_out = {environment.item(i, "eval").prompt for i in range(6)}
    epochs = [[environment.item(e * 24 + i, "train").prompt for i in range(24)] for e in range(3)]
    assert all(sorted(e) == sorted({f"p{i}" for i in range(30)} - held_out) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = build(path, eval_items=6)
    assert [again.item(48 + i, "train").prompt for i in range(24)] == epochs[2]
    assert {again.item(i, "eval").prompt for i in range(6)} == held_out
    other = build(path, eval_items=6, seed=1)
    assert [other.item(i, "eval").prompt for i in range(6)] != [again.item(i, "eval").prompt for i in range(6)]


def test_the_held_out_items_do_not_depend_on_the_order_of_the_file(write):
    one, two = build(write(*rows(30), name="a")), build(write(*rows(30)[::-1], name="b"))
    assert [one.item(i, "eval") for i in range(2)] == [two.item(i, "eval") for i in range(2)]


def test_a_prompt_that_occurs_twice_is_on_one_side(write):
    doubled = [{"prompt": f"p{i % 5}", "answer": str(i)} for i in range(20)]
    environment = build(write(*doubled), eval_items=3)
    held_out = {environment.item(i, "eval").prompt for i in range(3)}
    assert len(held_out) == 3
    assert {environment.item(i, "train").prompt for i in range(50)} == {f"p{i}" for i in range(5)} - held_out


def test_messages_columns_and_a_byte_order_mark(write):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write("\ufeff" + json.dumps({"prompt": messages, "answer": 7, "level": "easy"}), "", *rows(2))
    environment = build(path, eval_items=0)
    item = next(i for i in (environment.item(j, "train") for j in range(3)) if i.prompt == messages)
    assert item.answer == "7" and item.row["level"] == "easy"


@pytest.mark.parametrize(
    "line, sentence",
    [
        ('{"prompt": "a", "answer"', "line 2: Expecting"),
        ('["a"]', "line 2: a JSON object is needed, this is a list"),
        ('{"answer": 1}', "line 2: the column 'prompt' is missing; the line has .'answer'."),
        ('{"prompt": "a"}', "line 2: the column 'answer' is missing, and scorer 'exact' needs it"),
        ('{"prompt": " ", "answer": 1}', "line 2: the prompt is empty"),
        ('{"prompt": [], "answer": 1}', "line 2: the prompt must be text or a list"),
        ('{"prompt": [{"role": "user"}], "answer": 1}', "line 2: every message"),
        ('{"prompt": [{"role": "boss", "content": "x"}], "answer": 1}', "line 2: a message's role is 'boss'"),
        ('{"prompt": "a", "answer": [1]}', "line 2: scorer 'exact' needs text or a number"),
        ('{"prompt": "a", "answer": ""}', "line 2: the answer is empty"),
    ],
)
def test_a_bad_line_is_named(write, line, sentence):
    with pytest.raises(ConfigError, match=f"data.jsonl, {sentence}"):
        build(write({"prompt": "a", "answer": "b"}, line, *rows(5)))


def test_bad_files(write, tmp_path):
    with pytest.raises(ConfigError, match="missing.jsonl' cannot be read: No such file"):
        build(str(tmp_path / "missing.jsonl"))
    with pytest.raises(ConfigError, match="the file is empty"):
        build(write("", " "))
    with pytest.raises(ConfigError, match="environment.path must name"):
        build("")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a", "answer": "b"}\n{"prompt": "caf\xe9", "answer": "b"}\n')
    with pytest.raises(ConfigError, match="latin.jsonl, line 2: .*utf-8"):
        build(str(tmp_path / "latin.jsonl"))
    with pytest.raises(ConfigError, match="holds 2 different prompts, and environment.eval_items = 2"):
        build(write(*rows(2)))
    with pytest.raises(ConfigError, match="no meaning"):
        build(write(*rows(5)), args={"a": 1})


def test_numeric_answers_are_checked_at_the_start(write):
    build(write({"prompt": "a", "answer": "1,234.5"}, {"prompt": "b", "answer": -3}), "numeric", eval_items=1)
    with pytest.raises(ConfigError, match="line 1: scorer 'numeric' needs a number as answer; 'four' is none"):
        build(write({"prompt": "a", "answer": "four"}), "numeric")


@pytest.mark.parametrize(
    "scorer, response, answer, score",
    [
        ("exact", " yes\n", "yes", 1),
        ("exact", "yes.", "yes", 0),
        ("exact", "7", 7, 1),
        ("contains", "it is Paris.", "Paris", 1),
        ("contains", "it is paris.", "Paris", 0),
        ("contains", "42", 4, 1),
        ("numeric", "12 + 30 = 42.", 42, 1),
        ("numeric", "42 or 43", 42, 0),
        ("numeric", "1,234.50 dollars", "1234.5", 1),
        ("numeric", "about -3e-2", -0.03, 1),
        ("numeric", "10-3", 3, 1),
        ("numeric", "none", 0, 0),
        ("numeric", "x2-", 2, 1),
        ("numeric", "0.1", "0.10000000001", 1),
        ("numeric", "0.1001", "0.1", 0),
        ("numeric", ".5", 0.5, 1),
    ],
)
def test_built_in_scorers(scorer, response, answer, score):
    assert BUILT_IN[scorer]("prompt", response, answer, {}) == score


def test_numbers_in_text():
    assert numbers_in("a1 b-2 (-3) 4,567 8,9 1.5e3 +6 --7 1.2.3 e5") == [
        1,
        2,
        -3,
        4567,
        8,
        9,
        1500,
        6,
        -7,
        1.2,
        0.3,
        5,
    ]
    assert numbers_in("- + . e ,") == []


def test_a_scorer_of_ones_own(write):
    path = write(*({"prompt": f"p{i}", "limit": 3} for i in range(4)))
    environment = build(path, f"{__file__}:half_when_short")
    item = environment.item(0, "train")
    assert item.answer is None
    assert environment.score(item, "abc") == {"short": 0.5, "answerless": 1.0}
    assert environment.score(item, "abcd")["short"] == 0.0
    with pytest.raises(ConfigError, match="not a function"):
        build(path, f"{__file__}:CONSTANT")
    with pytest.raises(ConfigError, match="scorer = 'exakt' is unknown. It is exact, contains, numeric"):
        build(path, "exakt")
