"""Conversations: templates and masks as transformers', the four forms, and what is refused."""

import random
from pathlib import Path

import pytest
from chats import TEMPLATES, random_messages, template, write_tokenizer

from common.errors import DataError
from open_llama.chat import load_template, mask_of
from open_llama.tokenizer import load_tokenizer

CONVERSATIONS = 200


def encoded(folder: Path, record: dict) -> tuple[list[int], list[int]]:
    """Return the ids and the mask of a conversation."""
    text = load_template(folder).rendered(record)
    ids, offsets = load_tokenizer(folder, control_tokens=True).encode_chat(text)
    return ids, mask_of(text, offsets)


def expected(tokenizer, messages: list[dict], blocks: bool) -> tuple[list[int], list[int]] | None:
    """Return what transformers gives, None if the template rewrites the messages of a prefix."""
    if blocks:
        found = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        return found["input_ids"], found["assistant_masks"]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    encoding = tokenizer(text, add_special_tokens=False)
    mask = [0] * len(encoding["input_ids"])
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = (
            tokenizer.apply_chat_template(messages[:end], tokenize=False, add_generation_prompt=add)
            for end, add in ((number, True), (number + 1, False))
        )
        if not (text.startswith(after) and after.startswith(before)):
            return None
        last = encoding.char_to_token(len(after.rstrip()) - 1)
        for token in range(encoding.char_to_token(len(before)), last + 1):
            mask[token] = 1
    return encoding["input_ids"], mask


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "prefixes"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_masks_are_those_of_transformers(name, blocks, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path / "tokenizer", template(name, blocks))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    generator = random.Random(0)
    refused = 0
    for number in range(CONVERSATIONS):
        # Mistral's template leaves out a system message if an answer is the last message.
        system = number % 3 == 0 and name != "Mistral"
        messages = random_messages(generator, system, 1 + number % 2 * number % 5)
        answer = expected(tokenizer, messages, blocks)
        if answer is None:
            refused += 1
            with pytest.raises(DataError, match="rewrites"):
                encoded(folder, {"messages": messages})
            continue
        ids, mask = encoded(folder, {"messages": messages})
        assert (ids, mask) == answer
        assert 0 < sum(mask) < len(mask)
    if name == "Qwen3" and not blocks:
        assert 0 < refused < CONVERSATIONS / 2, "several answers, of which the last has reasoning"
    else:
        assert not refused
