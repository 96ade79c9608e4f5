"""Chat templates with the structure of known models', a tokenizer for them, and conversations."""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|eot|>"]
SPECIAL += ["[INST]", "[/INST]"]
WORDS = "the a of model answers question 日本語 Größe \U0001f600 1,024 x=y;\n \n\n {{ }} <think>"
TEXT = [f"{word} and {other}" for word in WORDS.split(" ") for other in WORDS.split(" ")]

# ChatML: an optional system message, and a line end behind the end of a turn.
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {{- BEGIN message.content + '<|im_end|>' END }}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# Llama 3: beginning-of-text once, contents without the space around them.
LLAMA_3 = """\
{%- for message in messages %}
    {%- if loop.first %}{{- bos_token }}{%- endif %}
    {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {{- BEGIN message['content'] | trim + '<|eot|>' END }}
    {%- else %}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|/header|>\\n\\n' }}{%- endif %}
"""
# Mistral: the system message joins the last question, and roles must alternate.
MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST]' }}
        {%- if loop.last and system is defined %}{{- system + '\\n\\n' }}{%- endif %}
        {{- message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- BEGIN message.content + eos_token END }}
    {%- else %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""
# Qwen3: tools, and reasoning only behind the last question. With blocks, it is kept everywhere.
QWEN_3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if WITH_BLOCKS or loop.index0 > ns.last %}
            {%- set content = '<think>\\n' + reasoning + '\\n</think>\\n\\n' + content %}
        {%- endif %}
        {{- BEGIN content END }}
        {%- for call in message.tool_calls or [] %}
            {{- BEGIN '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' END }}
        {%- endfor %}
        {{- BEGIN '<|im_end|>\\n' END }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
TEMPLATES = {"ChatML": CHATML, "Llama 3": LLAMA_3, "Mistral": MISTRAL, "Qwen3": QWEN_3}


def template(name: str, blocks: bool) -> str:
    """Return a template, with or without the blocks {% generation %}."""
    source = TEMPLATES[name].replace("WITH_BLOCKS", str(blocks).lower())
    if not blocks:
        return source.replace("BEGIN ", "").replace(" END", "")
    source = source.replace("{{- BEGIN ", "{%- generation %}{{- ")
    return source.replace(" END }}", " }}{%- endgeneration %}")


def write_tokenizer(folder: Path, chat_template: str | None, /, **settings) -> Path:
    """Write a small byte-level tokenizer.json and its files to the new `folder`. Return it."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    config |= {"eos_token": "</s>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder


def random_messages(generator: random.Random, system: bool, turns: int) -> list[dict[str, str]]:
    """Return a conversation of `turns` questions and answers of random words."""

    def text() -> str:
        words = generator.choices(WORDS.split(" "), k=generator.randrange(1, 12))
        return generator.choice(["", " ", "\n"]) + " ".join(words) + generator.choice(["", "\n"])

    roles = ["user", "assistant"] * turns
    if system:
        roles.insert(0, "system")
    messages = [{"role": role, "content": text()} for role in roles]
    if generator.random() < 0.1:
        messages[-1]["content"] = ""
    return messages
