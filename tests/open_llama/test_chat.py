"""Conversations: templates and masks as transformers', the four forms, and what is refused."""

import json
import random
from functools import partial
from pathlib import Path

import pyarrow
import pytest
from chats import TEMPLATES, random_messages, template, write_tokenizer
from pyarrow import parquet

from common.data import corpus
from common.data.text_inputs import documents, sources_of
from common.errors import DataError
from open_llama.chat import conversation, load_template, mask_of, render_record
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


QUESTION = {"role": "user", "content": "a question"}
ANSWER = {"role": "assistant", "content": "the answer"}
ASKED = [QUESTION, ANSWER]
SYSTEM = {"role": "system", "content": "of the model"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A tokenizer for each template without blocks, and with them ("ChatML, blocks")."""
    folder = tmp_path_factory.mktemp("tokenizers")
    found = {}
    for name in TEMPLATES:
        found[name] = write_tokenizer(folder / name, template(name, blocks=False))
        found[f"{name}, blocks"] = write_tokenizer(
            folder / f"{name}, blocks", template(name, blocks=True)
        )
    return found


def read(path: Path, tokenizer: Path) -> list[str]:
    """Return the rendered conversations of a file."""
    key = partial(render_record, tokenizer=tokenizer)
    return [text for source in sources_of(path) for text in documents(source, key)]


FORMS = [
    {"messages": ASKED},
    {"messages": ASKED, "prompt": "another"},  # as in UltraChat
    {"conversations": [{"from": "human", "value": "a question"}, {"from": "gpt", **ANSWER}]},
    {"conversations": [{"from": "human", "value": "a question"}, ANSWER | {"name": None}]},
    {"instruction": "a question", "input": "", "output": "the answer", "text": "both"},
    {"prompt": "a question", "completion": "the answer"},
]


@pytest.mark.parametrize("record", FORMS)
def test_every_form_is_the_same_conversation(record):
    messages, tools = conversation(record)
    assert [{key: each[key] for key in ("role", "content")} for each in messages] == ASKED
    assert tools is None


def test_input_and_system_are_part_of_the_conversation():
    record = {"instruction": "a", "input": "b", "output": "c", "system": "d"}
    contents = [message["content"] for message in conversation(record)[0]]
    assert contents == ["d", "a\n\nb", "c"]


@pytest.mark.parametrize("kind", ["a.jsonl", "a.json", "a.parquet", "mark.json"])
def test_lines_arrays_and_tables_give_the_same_conversations(kind, folders, tmp_path):
    records = [{"messages": [QUESTION, ANSWER | {"name": None}]}, {"messages": [SYSTEM, *ASKED]}]
    path = tmp_path / kind
    if kind.endswith("parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(records * 40), path, row_group_size=7)
    elif kind.endswith("jsonl"):
        path.write_text("".join(json.dumps(record) + "\n" for record in records * 40))
    else:
        path.write_text(json.dumps(records * 40, indent=1), "utf-8-sig" if "mark" in kind else None)
    texts = read(path, folders["ChatML"])
    template_of = load_template(folders["ChatML"])
    assert texts == [template_of.rendered(record) for record in records] * 40


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "rain"}


def as_line(messages: object, **more: object) -> bytes:
    return json.dumps({"messages": messages, **more}).encode()


# A line of a file -> the tokenizer, and the answers with their ends or a word of the refusal.
ODD = {
    "an empty answer": (as_line([QUESTION, ANSWER | {"content": ""}]), "ChatML", ["<|im_end|>"]),
    "a system message only": (as_line([SYSTEM]), "ChatML", []),
    "a question only": (as_line([QUESTION]), "Llama 3", []),
    "two answers in a row": (
        as_line([*ASKED, ANSWER]), "ChatML", ["the answer<|im_end|>"] * 2
    ),
    "two answers in a row, refused": (as_line([*ASKED, ANSWER]), "Mistral", "alternate"),
    "an answer first": (as_line([ANSWER, *ASKED]), "ChatML", ["the answer<|im_end|>"] * 2),
    "an answer first, refused": (as_line([ANSWER, *ASKED]), "Llama 3", "rewrites"),
    "a question last": (as_line([*ASKED, QUESTION]), "Llama 3", ["the answer<|eot|>"]),
    "a system message in between": (
        as_line([*ASKED, SYSTEM, *ASKED]), "ChatML", ["the answer<|im_end|>"] * 2
    ),
    "a system message that is left out": (as_line([SYSTEM, *ASKED]), "Mistral", "message 1"),
    "tools": (
        as_line([QUESTION, CALL, RESULT, ANSWER], tools=[TOOL]),
        "Qwen3, blocks",
        ['weather", "arguments": {}}\n</tool_call><|im_end|>\n', "the answer<|im_end|>\n"],
    ),
    "tools that are left out": (as_line(ASKED, tools=[TOOL]), "ChatML", "tool 'weather'"),
    "a call that is left out": (as_line([QUESTION, CALL]), "Llama 3", "chat template"),
    "tools that are text": (as_line(ASKED, tools="weather"), "Qwen3", "tools are not"),
    "reasoning that is rewritten": (as_line([*ASKED, *ASKED]), "Qwen3", "rewrites"),
    "an unknown role": (as_line([QUESTION | {"role": "asistant"}]), "ChatML", "role 'asistant'"),
    "no role": (as_line([{"content": "a"}]), "ChatML", "role None"),
    "a role that is left out": (
        as_line([QUESTION, SYSTEM | {"role": "developer"}, ANSWER]), "Qwen3", "message 2"
    ),
    "content null": (as_line([QUESTION, ANSWER | {"content": None}]), "ChatML", "missing"),
    "content in parts": (
        as_line([QUESTION | {"content": [{"type": "text", "text": "a"}]}]), "ChatML", "list"
    ),
    "messages null": (as_line(None), "ChatML", "no conversation"),
    "no messages": (as_line([]), "ChatML", "no conversation"),
    "messages as text": (as_line("a"), "ChatML", "not a list"),
    "a message as text": (as_line(["a"]), "ChatML", "not a list of objects"),
    "a number": (b"1", "ChatML", "int, not an object"),
    "another form": (b'{"chosen": "a", "rejected": "b"}', "ChatML", "it has chosen, rejected"),
    "a history": (
        b'{"instruction": "a", "output": "b", "history": [["c", "d"]]}', "ChatML", "no conversation"
    ),
    "an instruction that is a list": (
        b'{"instruction": ["a"], "output": "b"}', "ChatML", "message 1: content is list"
    ),
    "a special token": (
        as_line([QUESTION | {"content": "a<|im_end|>b"}, ANSWER]), "ChatML", "spells"
    ),
    "a character of this program": (
        as_line([QUESTION, ANSWER | {"content": "\ufdd0"}]), "ChatML, blocks", "spells"
    ),
    "half a surrogate pair": (
        b'{"prompt": "\\ud800", "completion": "b"}', "ChatML", "surrogate"
    ),
    "no UTF-8": (b'{"prompt": "\xff", "completion": "b"}', "ChatML", "not JSON"),
    "no JSON": (b'{"prompt": "a"', "ChatML", "not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_an_odd_conversation_is_rendered_or_refused_with_its_line(name, folders, tmp_path):
    line, tokenizer, expected = ODD[name]
    path = tmp_path / "a.jsonl"
    path.write_bytes(as_line([QUESTION]) + b"\n\n" + line + b"\n")
    if isinstance(expected, list):
        _, text = read(path, folders[tokenizer])
        assert len(text.answers) == len(expected)
        for (begin, end), answer in zip(text.answers, expected, strict=True):
            assert text[begin:end].endswith(answer)
        return
    with pytest.raises(DataError) as caught:
        read(path, folders[tokenizer])
    assert f"{path}: line 3: " in caught.value.what
    assert expected in caught.value.what or expected in caught.value.why


def test_a_conversation_of_an_array_or_a_table_is_refused_with_its_place(folders, tmp_path):
    records = [{"messages": ASKED}] * 9 + [{"messages": [QUESTION | {"role": "?"}]}]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet", 4)
    (tmp_path / "a.json").write_text(json.dumps(records))
    for name, place in (("a.parquet", "row 10: "), ("a.json", "element 10: ")):
        with pytest.raises(DataError, match=place):
            read(tmp_path / name, folders["ChatML"])
    (tmp_path / "a.json").write_text("[{]")
    with pytest.raises(DataError, match=r"a.json: no document: not JSON"):
        read(tmp_path / "a.json", folders["ChatML"])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "no special token"),
        ("{% generation %}{{ messages[-1].content }}{% endgeneration %}</s>", "no special token"),
        ("{{ messages[0].content.__class__.__mro__ }}", "chat template"),  # the sandbox
        ("{% for message in messages %}", "not valid"),
        (None, "no chat template"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(source, words, tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", source)
    with pytest.raises(DataError, match=words):
        load_template(folder).rendered({"messages": [ANSWER]})


def test_a_template_is_found_where_transformers_looks_for_it(tmp_path):
    for name, stored in (
        ("text", "{{ 'a</s>' }}"),
        ("named", [{"name": "default", "template": "{{ 'a</s>' }}"}]),
        ("with tools", [{"name": each, "template": f"{{{{ '{each}</s>' }}}}"} for each in
                        ("tool_use", "default")]),
    ):  # fmt: skip
        folder = write_tokenizer(tmp_path / name, None, chat_template=stored)
        found = load_template(folder)
        assert found.render([QUESTION]) == ("default</s>" if "tools" in name else "a</s>")
        if "tools" in name:
            assert found.render([QUESTION], [TOOL]) == "tool_use</s>"
    folder = write_tokenizer(tmp_path / "both", "file</s>", chat_template="entry</s>")
    assert load_template(folder).render([QUESTION]) == "file</s>"


def test_sentencepiece_cannot_read_a_template(tmp_path):
    corpus.train_sentencepiece(["a model of the answer\n"] * 9, 280, tmp_path / "tokenizer.model")
    (tmp_path / "chat_template.jinja").write_text(template("ChatML", False))
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_template(tmp_path)
