"""The character tokenizer, prompts through chat templates, stop tokens."""

from __future__ import annotations

import json
import random

import pytest

from torchspec.data.config import EnvironmentConfig
from torchspec.data.environments import Item
from torchspec.data.tokenizer import (
    ALPHABET,
    char_tokenizer,
    decode_response,
    encode_prompt,
    encode_response,
    load_tokenizer,
    stop_token_ids,
)
from torchspec.errors import ConfigError, RunError

# Written out by hand: pad bos eos unk system user assistant = 0..6, new line = 7, space = 8, then ASCII
# order.
BOS, EOS, SYSTEM, USER, ASSISTANT = 1, 2, 4, 5, 6


def char_id(character):
    return 7 if character == "\n" else ord(character) - 32 + 8


@pytest.fixture(scope="module")
def tokenizer():
    return char_tokenizer()


def test_prompt_is_one_token_a_character_and_one_a_role(tokenizer):
    assert encode_prompt(tokenizer, Item("A b\n~")) == [BOS, USER, 41, 8, 74, 7, 102, ASSISTANT]
    assert encode_prompt(tokenizer, Item("A"), "be") == [BOS, SYSTEM, 74, 77, USER, 41, ASSISTANT]
    assert len(tokenizer) == 103


def test_round_trip_of_any_text_of_the_alphabet(tokenizer):
    rng = random.Random()
    for text in [
        ALPHABET,
        " a ,b . 's  n't\n\n x ",
        *("".join(rng.choices(ALPHABET, k=60)) for _ in range(20)),
    ]:
        ids = encode_response(tokenizer, text)
        assert ids == [*map(char_id, text), EOS]
        assert decode_response(tokenizer, ids) == text


def test_messages_and_turns(tokenizer):
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "v"},
    ]
    s, u, a, v = map(char_id, "suav")
    expected = [BOS, SYSTEM, s, USER, u, ASSISTANT, a, EOS, USER, v, ASSISTANT]
    assert encode_prompt(tokenizer, Item(turns)) == expected
    assert encode_prompt(tokenizer, Item(turns), "other") == expected  # the item's own system message stands
    assert encode_prompt(tokenizer, Item(turns[1:]), "s") == expected
    with pytest.raises(RunError, match="not tool"):
        encode_prompt(tokenizer, Item([{"role": "tool", "content": "x"}]))


def test_saved_and_loaded_again_it_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    prompt = Item("Spell: caf ~\n")
    for model_type in ("qwen3", "llama"):  # AutoTokenizer looks at the model's config too
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        again = load_tokenizer(EnvironmentConfig(), str(tmp_path))
        assert encode_prompt(again, prompt, "s") == encode_prompt(tokenizer, prompt, "s")
        assert encode_response(again, ALPHABET) == encode_response(tokenizer, ALPHABET)
        assert (len(again), again.eos_token_id, again.pad_token_id) == (103, EOS, 0)
        with pytest.raises(RunError, match="outside the character tokenizer's alphabet"):
            encode_prompt(again, Item("caf\u00e9"))


@pytest.mark.parametrize(
    "prompt, sentence",
    [
        ("caf\u00e9 \u4e16", r"'caf\u00e9 \u4e16' holds characters outside .*: '\u00e9', '\u4e16'"),
        ("a\tb", r"'\\t'"),
        ("say <|eos|>", "contains '<|eos|>'".replace("|", r"\|")),
        ("", "empty prompt"),
        (" \n", "empty prompt"),
    ],
)
def test_prompts_that_cannot_be_represented_are_refused(tokenizer, prompt, sentence):
    with pytest.raises(RunError, match=sentence):
        encode_prompt(tokenizer, Item(prompt))


def test_without_a_chat_template_the_contents_are_joined(tokenizer):
    plain = char_tokenizer()
    plain.chat_template = None
    assert encode_prompt(plain, Item("A"), "b") == [char_id(c) for c in "b\n\nA"]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="set environment.tokenizer to 'char'"):
        load_tokenizer(EnvironmentConfig(), "")
    with pytest.raises(ConfigError, match="policy.path = '.*missing' is no folder"):
        load_tokenizer(EnvironmentConfig(), str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="environment.tokenizer = .*cannot be loaded"):
        load_tokenizer(EnvironmentConfig(tokenizer=str(tmp_path)), "")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(EnvironmentConfig(), str(tmp_path))


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    endless = char_tokenizer()
    endless.eos_token = None
    endless.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no eos_token"):
        load_tokenizer(EnvironmentConfig(), str(tmp_path))


@pytest.mark.parametrize("ends, expected", [(None, (2,)), (7, (2, 7)), ([9, 7, 2], (2, 7, 9))])
def test_stop_tokens_are_the_tokenizers_and_the_models(tokenizer, tmp_path, ends, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert stop_token_ids(tokenizer, str(tmp_path)) == expected
    assert stop_token_ids(tokenizer, "") == (2,)


def test_a_broken_generation_config_is_named(tokenizer, tmp_path):
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match="generation_config.json cannot be read"):
        stop_token_ids(tokenizer, str(tmp_path))
