"""A model with a chat template: its prompts, the end of its answers, where the template goes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from chats import template, write_tokenizer
from test_open_run import launch

from common.errors import DataError
from common.model.checkpoint_names import ORDINARY
from common.model.checkpoint_writer import write_checkpoint
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.model.peft_adapter import save_peft_adapter
from common.model.shapes import ModelShape
from open_llama import generate, merge
from open_llama.exported_weights import adapter_sizes
from open_llama.tokenizer import load_tokenizer

SHAPE = ModelShape(1, 32, 48, 2, 1, 512, 10000.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model for ChatML that always ends its turn at once."""
    folder = write_tokenizer(tmp_path_factory.mktemp("chat") / "model", template("ChatML", False))
    model = fused_llama(SHAPE, 64)
    init_weights(model, 1, seed=1, std=0.02, set_weight=copy_weight)
    end = load_tokenizer(folder, control_tokens=True).encode_chat("<|im_end|>")[0]
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.zero_()
        model.embedding.weight.fill_(1.0)
        model.head.output.weight.zero_()
        model.head.output.weight[end] = 1.0
    write_checkpoint(model, folder / "new", layout=ORDINARY)
    for path in (folder / "new").iterdir():
        path.rename(folder / path.name)
    (folder / "new").rmdir()
    return folder


@pytest.fixture
def adapter(model, tmp_path) -> Path:
    """An adapter whose folder has another template."""
    tensors = {name: torch.zeros(size) for name, size in adapter_sizes(SHAPE, 4).items()}
    save_peft_adapter(tmp_path / "adapter", tensors, SHAPE, 4, 8, 0.0, model)
    other = write_tokenizer(tmp_path / "other", template("Llama 3", blocks=True))
    shutil.copytree(other, tmp_path / "adapter", dirs_exist_ok=True)
    return tmp_path / "adapter"


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize(
    ("name", "end"), [("ChatML", "<|im_end|>"), ("Llama 3", "<|eot|>"), ("Mistral", "</s>")]
)
def test_a_prompt_is_that_of_transformers_and_ends_with_the_turn(name, end, blocks, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path / "tokenizer", template(name, blocks))
    tokenizer = load_tokenizer(folder, control_tokens=True)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    questions = ["a question", "the model"]
    prompts, ends = generate.chat_prompts(folder, tokenizer, questions)
    for prompt, question in zip(prompts, questions, strict=True):
        messages = [{"role": "user", "content": question}]
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True)
        assert prompt == list(expected["input_ids"])
    assert ends == [theirs.convert_tokens_to_ids(end)]


def test_an_answer_stops_at_the_end_of_the_turn(model, adapter, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    lengths = []
    original = transformers.GenerationMixin.generate

    def spy(self, ids, **options):
        tokens = original(self, ids, **options)
        lengths.append(tokens.shape[1] - ids.shape[1])
        return tokens

    monkeypatch.setattr(transformers.GenerationMixin, "generate", spy)
    words = [str(model), "--prompt", "a question", "--tokens", "5", "--temperature", "0"]
    for more, generated in (
        (["--chat"], 1),
        ([], 5),
        (["--chat", "--adapter", str(adapter)], 5),  # a turn of its template ends otherwise
    ):
        assert generate.main([*words, *more]) == 0
        assert lengths.pop() == generated
    output = capsys.readouterr().out
    assert output.startswith("--- 'a question'\n\n---"), "the answer alone"


def test_a_folder_without_a_template_is_refused(model, tmp_path, capsys):
    pytest.importorskip("transformers")
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").unlink()
    words = [str(tmp_path / "model"), "--prompt", "x", "--chat"]
    assert generate.main(words) == DataError.exit_code
    assert "no chat template" in capsys.readouterr().err


@pytest.mark.parametrize("of_run", [False, True])
def test_a_merged_model_has_the_template_of_the_adapter(model, adapter, tmp_path, of_run):
    run = adapter.parent
    (run / "config.toml").touch()
    named = run if of_run else adapter
    paths = {"--base": model, "--adapter": named, "--out": tmp_path / "merged"}
    assert merge.main([str(word) for pair in paths.items() for word in pair]) == 0
    for name in ("chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (adapter / name).read_bytes()


CONFIG = """
model = "{model}"
weights = "{model}"
sequence_length = 48
one_document_per_sequence = true
global_batch_size = 4
max_samples = 32
eval_samples = 4
eval_interval_samples = 16
opt_base_learning_rate = 1e-2
schedule = "constant"
opt_learning_rate_warmup_steps = 0
weight_decay = 0.0
gradient_clip_norm = 1.0
lora_rank = 4
"""


@pytest.mark.slow
def test_a_run_on_two_ranks_prints_what_counts_and_saves_the_template(model, tmp_path):
    asked = {"role": "user", "content": "a question"}
    records = [
        {"messages": [asked, {"role": "assistant", "content": f"the answer is {number}"}]}
        for number in range(80)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    given = ["--input", str(tmp_path / "a.jsonl"), "--tokenizer", str(model)]
    given += ["--data-dir", str(tmp_path / "data"), "--validation-fraction", "0.2"]
    done = launch(tmp_path, "open_llama", "prepare", "chat", *given)
    assert done.returncode == 0, done.stderr
    (tmp_path / "my.toml").write_text(CONFIG.format(model=model))
    config = ["--config", str(tmp_path / "my.toml"), "--set", "gpus_per_node=2"]
    done = launch(tmp_path, "open_llama", *config, "--checkpoint", "1")
    assert done.returncode == 0, done.stderr
    assert "answers: " in done.stderr and "padding" in done.stderr
    (run,) = (path.parent for path in tmp_path.glob("results/open_llama/*/config.toml"))
    export = launch(tmp_path, "open_llama", "export", str(run), "--out", str(tmp_path / "out"))
    assert export.returncode == 0, export.stderr
    for folder in (run / "adapter", tmp_path / "out"):
        for name in ("chat_template.jinja", "tokenizer.json"):
            assert (folder / name).read_bytes() == (model / name).read_bytes()
    losses = [
        json.loads(line)["loss"]
        for line in (run / "events.jsonl").open()
        if json.loads(line)["event"] == "eval"
    ]
    data = str(tmp_path / "data/validation")
    words = [str(model), "--adapter", str(run / "adapter"), "--data", data, "--device", "cpu"]
    evaluated = launch(tmp_path, "open_llama", "eval", *words, "--sequences", "4")
    assert evaluated.returncode == 0, evaluated.stderr
    assert f"loss {losses[-1]:.4f}" in evaluated.stdout
