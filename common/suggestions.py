"""Suggest what a word that is not known was meant to be. Standard library only.

All commands ask `unknown` or `nearest`. They know the names that other tools have for our settings,
and otherwise compare spellings.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple

from common.errors import ConfigError, listed
from common.values import plain

# Share of equal letters of a misspelled word: `plna` and `plan` have 0.75. So have A100 and H100,
# which are two names: if the first letters differ, more must be equal.
SIMILAR = 0.75
OTHER_INITIAL = 0.8
MAX_LISTED = 16  # names that an error lists


class Meaning(NamedTuple):
    """Our name for a word, and what differs. The name is "" if there is nothing to set."""

    ours: str
    note: str = ""


# One line for each name of ours: an option, variable, config key, command or value. Behind the
# colon are its names in transformers, axolotl, litgpt, torchtitan, NeMo and the published
# submissions, former names of it, and words that users try. In brackets stands what differs; "-" is
# nothing that can be set. If a word has several meanings, the first one applies that exists where
# it was typed. A word in capitals is also recognized as an environment variable.
TABLE = """
opt_base_learning_rate: lr learning_rate max_lr peak_lr base_lr
global_batch_size: gbs batch batch_size train_batch_size
micro_batch_size: mbs local_batch_size per_device_train_batch_size per_device_batch_size
eval_micro_batch_size: per_device_eval_batch_size val_batch_size
max_samples (steps x global_batch_size): steps max_steps num_steps train_steps training_steps
    iters max_iters
max_samples (epochs x training sequences): epoch epochs max_epochs num_epochs num_train_epochs
max_samples (tokens / tokens of a sequence): max_tokens train_tokens
sequence_length: seq seq_len seq_length max_seq_len max_seq_length max_length block_size
    context_length cutoff_len encoder_seq_length
opt_learning_rate_warmup_steps: warmup warmup_steps lr_warmup_steps num_warmup_steps
    lr_warmup_iters
schedule: lr_scheduler_type lr_decay_style
end_learning_rate_ratio (last / largest rate): min_lr min_lr_ratio min_lr_factor
gradient_clip_norm: clip_grad grad_clip max_norm max_grad_norm
weight_decay: wd
adam_beta_1: beta1
adam_beta_2: beta2
adam_epsilon: eps epsilon
eval_interval_samples (in sequences): eval_steps eval_interval val_interval eval_every
eval_samples (in sequences): limit_val_batches eval_iters max_eval_samples
recompute_layers: gradient_checkpointing activation_checkpointing
linear: precision dtype torch_dtype mixed_precision bf16 fp8 block_format healing
train_data: dataset datasets dataset_path train_file data_path
model: base_model model_name model_name_or_path hf_model
- (the benchmark fixes the model; docs/train_your_own_model.md trains others): model base_model
    model_name model_name_or_path hf_model
weights: checkpoint_dir pretrained load_weights
nodes: nnodes num_nodes
hang_timeout_s: timeout ddp_timeout nccl_timeout
- (it follows from global_batch_size and micro_batch_size): gradient_accumulation
    gradient_accumulation_steps accumulate_grad_batches
- (adapters are on the projections q, k, v and o): lora_target lora_targets lora_target_modules
    target_modules lora_modules
- (AdamW is the only optimizer): optimizer optim optimizer_type
- (data are parallel over all GPUs, optimizer states sharded over a node): tp pp cp
    tensor_parallel tensor_parallel_size pipeline_parallel_size
--print: dry_run show_command
--track wandb: wandb use_wandb report_to logger
--continue: resume_from_checkpoint resume_from restart
--checkpoint (600s for ten minutes): save_steps save_interval save_every ckpt_interval
--version: v
--nodes: hosts hostfile nodelist
--device: accelerator
--system-tuning: tune
--search: tune
DGXNGPU: gpus devices NGPU NGPUS NUM_GPUS N_GPUS NPROC_PER_NODE GPUS_PER_NODE
DGXSYSTEM (<GPU>_<nodes>x<GPUs>): DGXNNODES DGXRUNNODES
DATADIR: DATA_DIR dataset_dir
LOGDIR: out output out_dir output_dir LOG_DIR results RESULTS_DIR
MODEL: weights base_weights MODEL_DIR
- (only a benchmark that fine-tunes reads weights, from MODEL): weights
NEXP: runs NUM_RUNS n_runs repeat
SEED: random_seed
MLPERF_SUBMISSION_ORG: MLPERF_ORG MLPERF_SUBMITTER
MLPERF_SUBMISSION_PLATFORM: MLPERF_PLATFORM MLPERF_SYSTEM
cuda: gpu hip rocm amd nvidia
flash_attention_4: flash fa4
run: train training start pretrain
run (prepare chat reads conversations): sft finetune finetuning
bench: benchmark measure perf
prepare: data download fetch
runs: list ls status series
system-tuning: tuning
setup: install
preflight: doctor
plan: memory estimate
check: validate verify status
fetch: download get
package: submit
report: page
generate: chat inference
"""


def _read() -> list[tuple[Meaning, str]]:
    """Return the meaning and the word of each entry of TABLE."""
    entries = []
    for line in TABLE.replace("\n    ", " ").strip().splitlines():
        head, _, words = line.partition(": ")
        ours, _, note = head.rstrip(")").partition(" (")
        entries += [(Meaning(ours.lstrip("-") and ours, note), word) for word in words.split()]
    return entries


ENTRIES = _read()
BY_WORD: dict[str, list[Meaning]] = {}
for _meaning, _word in ENTRIES:
    BY_WORD.setdefault(plain(_word), []).append(_meaning)
VARIABLES = {  # name of a variable in another tool -> its meaning
    word: meaning
    for meaning, word in ENTRIES
    if word.isupper() and len(word) > 1 and meaning.ours.isupper()
}


def nearest(word: str, known: Iterable[str]) -> Meaning | None:
    """Return the one of the `known` names that `word` means, None if there is none.

    In this order: the name itself in another spelling, our name for another tool's, and the most
    similar name.
    """
    names: dict[str, str] = {}
    for name in known:
        names.setdefault(plain(name), name)
    key = plain(word)
    if key in names:
        return Meaning(names[key])
    for meaning in BY_WORD.get(key, ()):
        option = meaning.ours.partition(" ")[0]
        if plain(option) in names:
            return meaning
        if not meaning.ours and "globalbatchsize" in names:  # keys were asked for
            return meaning
    ratios = {name: difflib.SequenceMatcher(None, name, key).ratio() for name in names}
    best = max(ratios, key=lambda name: ratios[name], default="")  # of equal ones, the first
    least = SIMILAR if best[:1] == key[:1] else OTHER_INITIAL
    return Meaning(names[best]) if best and ratios[best] >= least else None


def unknown(
    what: str, word: str, known: Iterable[str], otherwise: str = "choose one of them"
) -> ConfigError:
    """Return the error `what` about a `word` that is none of the `known` ones.

    It suggests the meaning of the word that `nearest` returns. If there is none, it says
    `otherwise`.
    """
    names = [*known]
    meaning = nearest(word, names)
    do = suggestion(*meaning) if meaning else otherwise
    return ConfigError(what, f"known: {listed(names, MAX_LISTED)}", do)


def suggestion(name: str, note: str = "") -> str:
    """Return the sentence that suggests `name`, which may be "" if the note says it all."""
    if not name:
        return f"leave it out: {note}"
    return f"did you mean {name} ({note})?" if note else f"did you mean {name}?"
