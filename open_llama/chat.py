"""Conversations: read their forms, render them by a chat template, and find the answers.

A chat template is a Jinja program that comes with a tokenizer. It is rendered in Jinja's sandbox,
with the filters and functions that transformers gives it, so that text and tokens are the same.

The loss counts the assistant's answers, each with the special token that ends its turn. If the
template has blocks {% generation %}, these are the answers. Otherwise an answer is what its message
adds to the messages before it, rendered with add_generation_prompt. A conversation for which these
rules give no clear answer is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.data import corpus
from common.errors import DataError, Interrupted, first_line, listed
from open_llama.tokenizer import (
    CHAT_TEMPLATE,
    CONFIG,
    as_tokenizer_json,
    named_token,
    token_settings,
    tokenizer_file,
)

Messages = list[dict[str, Any]]

ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant"}  # ShareGPT's
# Put around what a block {% generation %} renders. Unicode reserves both for use inside a program.
BEGIN = "\ufdd0"
END = "\ufdd1"
GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


class Rendered(str):
    """The text of a conversation."""

    answers: Sequence[tuple[int, int]] = ()  # [begin, end) of each, in characters


class Generation(Extension):
    """The block {% generation %}."""

    tags = {"generation"}  # noqa: RUF012 (as in jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer."""

    sources: dict[str, str]  # name -> template: "default", and in some folders "tool_use"
    tokens: dict[str, str]  # such as bos_token -> <s>
    special: re.Pattern[str]  # the tokenizer's special tokens

    def source(self, tools: Any) -> str:
        return self.sources.get("tool_use" if tools else "default") or self.sources["default"]

    def render(self, messages: Messages, tools: Any = None, prompt: bool = False) -> str:
        """Return the text, with BEGIN and END. `prompt`: add the beginning of an answer.

        Raises DataError if the template refuses the messages.
        """
        given = {"messages": messages, "tools": tools, "documents": None} | self.tokens
        try:
            template = _compiled(self.source(tools))
            return template.render(given, add_generation_prompt=prompt)
        except Interrupted:
            raise
        except Exception as error:  # a template may do anything
            why = "the chat template refuses these messages, or fails on them"
            raise _refusal(f"chat template: {first_line(error)}", why) from error

    def rendered(self, record: dict[str, Any]) -> Rendered:
        """Return the conversation in `record`. Raises DataError, which does not name its place."""
        messages, tools = conversation(record)
        _require_text(messages, self.special)
        text = self.render(messages, tools)
        _require_whole(text, messages, tools)
        if GENERATION.search(self.source(tools)):
            return self._by_blocks(text)
        answers = [
            self._answer(text, messages, number, tools)
            for number, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        return _with_answers(text, answers)

    def end_of_turn(self) -> str:
        """Return the special token that ends an answer. Raises DataError."""
        record = {"prompt": "a", "completion": "b"}
        text = self.rendered(record)
        return self.special.findall(text, *text.answers[-1])[-1]

    def _by_blocks(self, text: str) -> Rendered:
        """Return `text` without BEGIN and END, and what is between them as answers."""
        # Adjacent blocks are one answer.
        parts = re.split(f"[{BEGIN}{END}]", text.replace(END + BEGIN, ""))
        ends = [*accumulate(map(len, parts))]
        for answer in parts[1::2]:
            self._end(answer)
        return _with_answers("".join(parts), [*zip(ends[::2], ends[1::2], strict=False)])

    def _answer(self, text: str, messages: Messages, number: int, tools: Any) -> tuple[int, int]:
        """Return [begin, end) of the answer `messages[number]` in `text`. Raises DataError."""
        before = self.render(messages[:number], tools, prompt=True)
        answered = self.render(messages[: number + 1], tools)
        if not (answered.startswith(before) and text.startswith(answered)):
            raise DataError(
                f"message {number + 1}: the chat template rewrites the messages up to it",
                "it renders them in another way before an answer, or if more follow, so the model"
                " would train on text that it never sees",
                "use a template with {% generation %} around the answers, or conversations that"
                " end with their only answer",
            )
        return len(before), len(before) + self._end(answered[len(before) :])

    def _end(self, answer: str) -> int:
        """Return the end of the special token that ends an answer. Raises DataError without one."""
        ends = [match.end() for match in self.special.finditer(answer)]
        if ends and not answer[ends[-1] :].strip():
            return ends[-1]
        raise DataError(
            f"no special token ends the answer {answer[-40:]!r}",
            "the model would not learn to stop",
            "use a template that ends each answer with a special token, inside {% generation %}"
            " if it has such blocks",
        )


def _with_answers(text: str, answers: Sequence[tuple[int, int]]) -> Rendered:
    rendered = Rendered(text)
    rendered.answers = answers
    return rendered


@lru_cache(1)  # of a worker process
def load_template(path: Path) -> ChatTemplate:
    """Return the chat template of the tokenizer at `path`, a file or a folder. Raises DataError."""
    path = tokenizer_file(path)
    if path.suffix != ".json":
        why = "SentencePiece reads the special tokens of a chat template as text"
        raise DataError(f"{path}: no tokenizer.json", why, as_tokenizer_json(path))
    settings = token_settings(path)
    sources = _sources(path.with_name(CHAT_TEMPLATE), settings.get("chat_template"))
    for source in sources.values():
        try:
            _compiled(source)
        except TemplateError as error:
            what = f"{path.parent}: the chat template is not valid: {first_line(error)}"
            raise DataError(what, "it is damaged", "fetch the tokenizer again") from error
    tokens = {key: named_token(settings, key) for key in settings if key.endswith("_token")}
    added = corpus.load_tokenizer_json(path).get_added_tokens_decoder().values()
    special = sorted((each.content for each in added if each.special), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, special)) or "(?!)")
    return ChatTemplate(sources, {key: token for key, token in tokens.items() if token}, pattern)


def render_record(record: dict[str, Any], tokenizer: Path) -> str:
    """Return the conversation in `record`, rendered by the template of `tokenizer`."""
    return load_template(tokenizer).rendered(record)


def mask_of(text: Rendered, offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return 1 for each token with a character in an answer, else 0.

    `offsets`: [begin, end) of each token in `text`, in characters.
    """
    marks = bytearray(len(text))
    for begin, end in text.answers:
        marks[begin:end] = b"\1" * (end - begin)
    return [int(marks.find(1, begin, end) >= 0) for begin, end in offsets]


def conversation(record: dict[str, Any]) -> tuple[Messages, Any]:
    """Return the messages of a record, and its tools or None. Raises DataError.

    A record has messages (role, content), conversations (from, value), instruction, input and
    output, or prompt and completion. Keys of a message whose value is null are left out, as
    transformers does.
    """
    question = answer = None
    entries = record.get("messages") or record.get("conversations")
    if "instruction" in record and "output" in record and not record.get("history"):
        question = record["instruction"]
        answer = record["output"]
        if record.get("input"):
            question = f"{question}\n\n{record['input']}"
    elif "prompt" in record and "completion" in record:
        question = record["prompt"]
        answer = record["completion"]
    elif not entries:
        raise _refusal(
            f"no conversation: it has {listed(record, 8) or 'no key'}",
            "it needs messages, conversations, instruction and output, or prompt and completion",
        )
    asked = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    entries = entries or asked
    if record.get("system"):
        entries = [{"role": "system", "content": record["system"]}, *entries]
    tools = record.get("tools") or None
    for name, value in (("messages", entries), ("tools", tools or [])):
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise _refusal(f"{name} are not a list of objects", "a template takes no others")
    messages = []
    for number, entry in enumerate(entries, start=1):
        message = {key: value for key, value in entry.items() if value is not None}
        for key, other in (("role", "from"), ("content", "value")):
            if key not in message and other in message:
                message[key] = message.pop(other)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            why = f"the roles are {', '.join(ROLES)}"
            raise _refusal(f"message {number}: unknown role {role!r}", why)
        messages.append(message | {"role": ROLES[role]})
    return messages, tools


def _require_text(messages: Messages, special: re.Pattern[str]) -> None:
    """Raise DataError unless each message has text, or calls tools, and spells no special token."""
    for number, message in enumerate(messages, start=1):
        calls = message["role"] == "assistant" and message.get("tool_calls")
        content = message.get("content", "" if calls else None)
        if not isinstance(content, str):
            kind = "missing" if content is None else f"{type(content).__name__}, not text"
            raise _refusal(f"message {number}: content is {kind}", "a message is one text")
        if found := special.search(content) or re.search(f"[{BEGIN}{END}]", content):
            what = f"message {number} spells the special token {found[0]!r}"
            raise _refusal(what, "it would be that token, such as the end of a turn, and not text")


def _require_whole(text: str, messages: Messages, tools: Any) -> None:
    """Raise DataError if `text` lacks a message that is not an answer, or the name of a tool.

    Templates leave out, without a word, roles and tools that they do not know. From answers they
    may leave out the reasoning.
    """
    for number, message in enumerate(messages, start=1):
        content = message.get("content", "").strip()
        escaped = json.dumps(content, ensure_ascii=False)[1:-1]  # some do this to a tool's result
        if message["role"] != "assistant" and content not in text and escaped not in text:
            what = f"the chat template leaves out or changes message {number}"
            raise _refusal(what, f"it does not know the role {message['role']} at this place")
    for call in chain(tools or (), *(message.get("tool_calls") or () for message in messages)):
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in text:
            what = f"the chat template leaves out the tool {name!r}"
            raise _refusal(what, "it does not know tools, or the tool has another form")


def _refusal(what: str, why: str) -> DataError:
    return DataError(what, why, "repair the conversation, or leave it out")


def _sources(path: Path, stored: Any) -> dict[str, str]:
    """Return the templates by name: the file `path`, or else what tokenizer_config.json stores.

    Raises DataError if there is none.
    """
    if path.is_file():
        why = "a chat template is text in UTF-8"
        with corpus.damage_named(lambda error: f"{path}: {error}", why, "fetch it again"):
            stored = path.read_text(encoding="utf-8")
    if isinstance(stored, str):
        stored = [{"name": "default", "template": stored}]
    sources: dict[str, str] = {}
    for each in stored if isinstance(stored, list) else ():  # several: of older transformers
        if isinstance(each, dict) and isinstance(each.get("template"), str):
            sources[str(each.get("name"))] = each["template"]
    if "default" not in sources:
        raise DataError(
            f"{path.parent}: no chat template",
            f"neither {CHAT_TEMPLATE} nor chat_template in {CONFIG} is there",
            "name the folder of a model for chat",
        )
    return sources


@lru_cache(2)
def _compiled(source: str) -> Any:
    """Return a jinja2.Template with what transformers gives it. Raises TemplateError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # escapes no HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
