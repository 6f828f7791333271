"""Text to token ids and back: the policy's own tokenizer, or the built-in character tokenizer.

Training speaks token ids; text is made of them only for scorers and for the eye.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchspec.data.config import EnvironmentConfig
from torchspec.errors import ConfigError, RunError

if TYPE_CHECKING:
    from torchspec.data.environments import Item

PAD, BOS, EOS, UNK = "<|pad|>", "<|bos|>", "<|eos|>", "<|unk|>"
ROLES = ("system", "user", "assistant")
ROLE_TOKENS = tuple(f"<|{role}|>" for role in ROLES)
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))

# <|bos|><|user|>question<|assistant|>answer<|eos|>: one token a role, so that prompts of a tiny policy stay
# short.
CHAR_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('a role must be system, user or assistant, not ' ~ message['role']) }}"
    "{% endif %}"
    "{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def load_tokenizer(config: EnvironmentConfig, policy_path: str) -> Any:
    """The tokenizer of a run: ``config.tokenizer`` ("char" or a folder), else the one in the policy's folder.

    Returns a transformers fast tokenizer with an end token.

    Raises:
        ConfigError: there is none, the folder cannot be read, or it declares no end token.
    """
    if config.tokenizer == "char":
        return char_tokenizer()
    folder = config.tokenizer or policy_path
    if not folder:
        raise ConfigError(
            "a policy built from scratch has no tokenizer: set environment.tokenizer to 'char' (the built-in "
            "character tokenizer) or to a tokenizer's folder."
        )
    setting = "environment.tokenizer" if config.tokenizer else "policy.path"
    if not Path(folder).is_dir():
        raise ConfigError(f"{setting} = '{folder}' is no folder; a Hugging Face folder with a tokenizer is needed.")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds here, for missing and for broken files
        raise ConfigError(f"{setting} = '{folder}': its tokenizer cannot be loaded: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{setting} = '{folder}': its tokenizer declares no eos_token, which ends every trained "
            "response; add it to tokenizer_config.json."
        )
    return tokenizer


def char_tokenizer() -> Any:
    """One token per printable ASCII character and the new line, 103 in all, as a PreTrainedTokenizerFast.

    Ids 0..6 are pad, bos, eos, unk and the three roles. Anything outside the alphabet becomes unk, which
    ``encode_prompt`` refuses. ``save_pretrained`` and AutoTokenizer round-trip it, chat template included.
    """
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, UNK, *ROLE_TOKENS, *ALPHABET])}
    core = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=list(ROLE_TOKENS),
        clean_up_tokenization_spaces=False,
        chat_template=CHAR_TEMPLATE,
    )


def encode_prompt(tokenizer: Any, item: Item, system_prompt: str = "") -> list[int]:
    """Token ids of an item's prompt, up to where the response begins.

    With a chat template: rendered with add_generation_prompt; text is one user message, and ``system_prompt``
    goes first unless the item's own messages begin with a system message. Without a template: the system
    prompt and the messages' contents joined by blank lines, with the special tokens that the tokenizer itself
    adds (a bos, for most).

    Raises:
        RunError: the prompt is empty, its messages do not suit the template, or it holds text that the
            tokenizer cannot represent: the unknown token, or (with the character tokenizer) the name of a
            special token.
    """
    messages = [{"role": "user", "content": item.prompt}] if isinstance(item.prompt, str) else list(item.prompt)
    if system_prompt and not (messages and messages[0]["role"] == "system"):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if not any(message["content"].strip() for message in messages):
        raise RunError("the environment gave an empty prompt.")
    _check_no_special_names(tokenizer, messages)
    if tokenizer.chat_template is None:
        ids = tokenizer.encode("\n\n".join(message["content"] for message in messages))
        if ids[-1:] == [tokenizer.eos_token_id]:  # some tokenizers close what they encode
            ids = ids[:-1]
    else:
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # Jinja's own errors, and those that templates raise themselves
            raise RunError(f"the chat template refuses the prompt {_short(item.key())}: {error}") from error
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
        raise RunError(_unknown(tokenizer, messages))
    return ids


def encode_response(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a reference answer, closed by the end token that the policy must learn to give."""
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def decode_response(tokenizer: Any, token_ids: list[int]) -> str:
    """Text of a response, without special tokens."""
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def stop_token_ids(tokenizer: Any, policy_path: str = "") -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's end token and those of the policy's generation_config.json.

    Raises:
        ConfigError: generation_config.json is there but cannot be read.
    """
    stops = {tokenizer.eos_token_id}
    file = Path(policy_path) / "generation_config.json"
    if policy_path and file.is_file():
        try:
            ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}.") from error
        stops |= set(ends) if isinstance(ends, list) else {ends} - {None}
    return tuple(sorted(stops))


def _is_char(tokenizer: Any) -> bool:
    return tokenizer.chat_template == CHAR_TEMPLATE


def _check_no_special_names(tokenizer: Any, messages: list[dict[str, str]]) -> None:
    """A prompt that spells a special token would get that token; in this alphabet it is a mistake."""
    if not _is_char(tokenizer):
        return
    for message in messages:
        for token in (PAD, BOS, EOS, UNK, *ROLE_TOKENS):
            if token in message["content"]:
                raise RunError(
                    f"the prompt {_short(message['content'])} contains '{token}', a special token of the "
                    "character tokenizer."
                )


def _unknown(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    text = "".join(message["content"] for message in messages)
    if not _is_char(tokenizer):
        return f"the prompt {_short(text)} holds text that the tokenizer does not know."
    strange = sorted(set(text) - set(ALPHABET))
    return (
        f"the prompt {_short(text)} holds characters outside the character tokenizer's alphabet (printable "
        f"ASCII and the new line): {', '.join(repr(c) for c in strange[:8])}."
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
