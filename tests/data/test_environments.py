"""Items follow from (seed, split, index); the splits share no prompt; what a config names is what one
gets."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from torchspec.data.config import EnvironmentConfig
from torchspec.data.environments import REDRAWS, Environment, Item, build_environment, stable_seed
from torchspec.errors import ConfigError


class Small(Environment):
    """Prompts 0..size-1."""

    def __init__(self, size: int = 1000):
        self.size = size

    def make(self, rng):
        number = rng.randrange(self.size)
        return Item(prompt=str(number), answer=str(number + 1))

    def score(self, item, response):
        return float(response == item.answer)


class NotOne:
    pass


def build(seed=0, **fields):
    return build_environment(EnvironmentConfig(**fields), seed)


HERE = f"{__file__}:Small"
GENERATED = [
    dict(name=HERE, args={"size": 5000}),
    dict(name="reasoning_gym:spell_backward", args={"min_word_len": 4, "max_word_len": 5}),
    dict(
        name="reasoning_gym:chain_sum",
        args={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    ),
]


@pytest.mark.parametrize("fields", GENERATED)
def test_items_follow_from_seed_split_and_index(fields):
    one, two, other = build(3, **fields), build(3, **fields), build(4, **fields)
    indices = [0, 1, 255, 256, 257, 100_000, 3]
    in_order = {i: one.item(i, "train") for i in sorted(indices)}
    assert all(two.item(i, "train") == in_order[i] for i in indices)  # another order, another instance
    assert [one.item(i, "eval") for i in range(5)] == [two.item(i, "eval") for i in range(5)]
    assert [other.item(i, "train") for i in range(9)] != [one.item(i, "train") for i in range(9)]
    assert [other.item(i, "eval") for i in range(9)] != [one.item(i, "eval") for i in range(9)]


def test_items_do_not_depend_on_the_process():
    code = (
        "from torchspec.data.config import EnvironmentConfig as C\n"
        "from torchspec.data.environments import build_environment as b\n"
        "e = b(C(name='reasoning_gym:spell_backward'), 7)\n"
        "print([e.item(i, s).prompt for i in range(3) for s in ('train', 'eval')])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": h, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for h in ("1", "2")
    }
    environment = build(7, name="reasoning_gym:spell_backward")
    assert outputs == {str([environment.item(i, s).prompt for i in range(3) for s in ("train", "eval")]) + "\n"}


@pytest.mark.parametrize(
    "fields",
    [
        dict(name=HERE, args={"size": 40}),
        dict(
            name="reasoning_gym:chain_sum",
            args={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        ),
    ],
)
def test_no_eval_prompt_is_ever_trained_on(fields):
    environment = build(1, eval_items=20, **fields)
    held_out = [environment.item(i, "eval").key() for i in range(20)]
    assert len(set(held_out)) == 20
    drawn = [environment.draw("train", i).key() for i in range(300)]
    assert set(drawn) & set(held_out)  # without the redraw there would be collisions: the check below has teeth
    assert not {environment.item(i, "train").key() for i in range(300)} & set(held_out)


def test_a_task_too_small_for_two_splits_is_refused():
    with pytest.raises(ConfigError, match="eval_items = 12 .* gave only 10"):
        build(name=HERE, args={"size": 10}, eval_items=12)
    environment = build(name=HERE, args={"size": 10}, eval_items=10)
    with pytest.raises(ConfigError, match=f"{REDRAWS} draws for training item 0 .*too few"):
        environment.item(0, "train")


def test_wrong_splits_and_indices():
    environment = build(name=HERE, eval_items=4)
    with pytest.raises(IndexError, match="eval_items = 4"):
        environment.item(4, "eval")
    with pytest.raises(ValueError, match="'test'"):
        environment.item(0, "test")


def test_no_held_out_items_at_all():
    assert build(name=HERE, eval_items=0).item(0, "train").prompt


@pytest.mark.parametrize(
    "fields, sentence",
    [
        (dict(name="spell_backward"), "'spell_backward' is unknown"),
        (dict(name="reasoning_gym:spell_backwards"), "Did you mean 'spell_backward'"),
        (dict(name="reasoning_gym:qqqqqq"), "There are: ab, "),
        (
            dict(name="reasoning_gym:chain_sum", args={"max_term": 3}),
            "no such setting. Did you mean 'max_terms'",
        ),
        (dict(name="reasoning_gym:chain_sum", args={"seed": 3}), "args.seed cannot be set"),
        (
            dict(name="reasoning_gym:chain_sum", args={"min_terms": 4, "max_terms": 2}),
            "refuses environment.args",
        ),
        (
            dict(name="reasoning_gym:spell_backward", args={"min_word_len": 30, "max_word_len": 40}),
            "refuses environment.args",
        ),
        (
            dict(name="reasoning_gym:word_sorting", args={"transformation": "upper"}),
            "must be one of .*'uppercase'",
        ),
        (dict(name=f"{__file__}:NotOne"), "subclass of"),
        (dict(name=HERE, args={"sice": 3}), "does not suit .*sice"),
        (dict(name=HERE, path="x.jsonl"), "only with environment.name = 'jsonl'"),
        (dict(name=HERE, scorer_timeout_s=0.0), "scorer_timeout_s = 0.0 must be above 0"),
        (dict(name=HERE, max_failed_share=1.5), "max_failed_share = 1.5"),
        (dict(name=HERE, eval_items=-1), "eval_items = -1"),
    ],
)
def test_wrong_settings_are_refused_in_a_sentence(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build(**fields)


def test_enum_settings_are_given_by_value():
    args = {"transformation": "uppercase", "min_words": 3, "max_words": 3}
    item = build(name="reasoning_gym:word_sorting", args=args).item(0, "train")
    assert item.answer == item.answer.upper()


def test_reasoning_gym_scores_with_its_own_scorer():
    environment = build(name="reasoning_gym:spell_backward", args={"min_word_len": 10, "max_word_len": 10})
    item = environment.item(0, "train")
    assert environment.score(item, f" {item.answer}\n") == 1.0
    wrong = item.answer[:5] + "?????"
    assert environment.score(item, wrong) == pytest.approx(0.5)
    assert environment.item(0, "eval") and environment.score(item, wrong) == pytest.approx(0.5)


@pytest.mark.parametrize("task", ["acre", "list_functions"])  # these make all items of a data set at construction
def test_tasks_of_fixed_size_are_endless_too(task):
    environment = build(name=f"reasoning_gym:{task}", eval_items=2)
    items = [environment.item(i, "train") for i in (0, 300, 70_000)]
    assert len({item.key() for item in items}) == 3
    assert environment.item(300, "train") == items[1]


def test_a_task_without_reference_answers_says_so():
    assert build(name="reasoning_gym:propositional_logic", eval_items=1).item(0, "train").answer is None


def test_drawing_leaves_the_global_generators_alone():
    import numpy

    environment = build(name="reasoning_gym:spell_backward")
    random.seed(5), numpy.random.seed(5)
    expected = random.random(), numpy.random.rand()
    random.seed(5), numpy.random.seed(5)
    environment.item(12_345, "train")
    assert (random.random(), numpy.random.rand()) == expected


def test_stable_seed_is_stable_and_separates_its_parts():
    assert stable_seed(1, "a", 2) == 3052309780763929022  # other values would change the prompts of every saved run
    assert stable_seed(1, 12) != stable_seed(11, 2)
    assert 0 <= stable_seed("x") < 2**62


@pytest.mark.parametrize(
    "response, answer",
    [
        (" nus \n", "nus"),
        ("<think>a</think><answer> nus\n</answer>.", "nus"),
        ("<answer>a</answer> <answer>b</answer>", "b"),
        ("<answer>nus", "<answer>nus"),
        ("nus</answer>", "nus</answer>"),
        ("", ""),
    ],
)
def test_the_final_answer_of_a_response(response, answer):
    from torchspec.data.reasoning_gym import final_answer

    assert final_answer(response) == answer


def test_several_questions_in_a_prompt():
    fields = dict(name="reasoning_gym:spell_backward", args={"min_word_len": 4, "max_word_len": 4})
    one, three = build(**fields), build(questions_per_prompt=3, **fields)
    item = three.item(5, "train")
    parts = [one.draw("train", 15 + i) for i in range(3)]
    assert item.prompt == "\n".join(part.prompt for part in parts)
    assert item.answer == "\n".join(part.answer for part in parts)
    first, second, third = item.answer.split("\n")
    assert three.score(item, f" {item.answer} \n") == 1.0
    assert three.score(item, first) == pytest.approx(1 / 3)
    assert three.score(item, f"{first}\n??{second[2:]}\n{third}") == pytest.approx(2.5 / 3)
    assert three.score(item, f"{item.answer}\n{third}") == pytest.approx(3 / 4)
    assert three.score(item, "") == 0.0


@pytest.mark.parametrize(
    "fields, sentence",
    [
        (dict(name=HERE, questions_per_prompt=2), "questions_per_prompt = 2 has a meaning only with"),
        (
            dict(name="reasoning_gym:chain_sum", questions_per_prompt=0),
            "questions_per_prompt = 0 must be 1 or more",
        ),
        (dict(name="reasoning_gym:rotate_matrix", questions_per_prompt=2), "wants answers of one line each"),
        (
            dict(name="reasoning_gym:propositional_logic", questions_per_prompt=2),
            "'propositional_logic' has None",
        ),
    ],
)
def test_questions_that_cannot_be_put_together_are_refused(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build(**fields)


def test_importing_the_room_loads_nothing_heavy():
    code = (
        "import sys\n"
        "from torchspec.data import environments, jsonl, packing, reasoning_gym, scorers, scoring, tokenizer\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'reasoning_gym', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "[]\n"
