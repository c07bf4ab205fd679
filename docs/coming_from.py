"""The tables of `docs/coming-from.md`, from the rules that `import-plan` reads settings by."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ratrain.ratrainc.bridge.importing import FRAMEWORKS
from ratrain.ratrainc.bridge.job_plans.importing_jobs import BY_JOBS
from ratrain.ratrainc.bridge.job_plans.job_notes import IGNORED, OPEN, NoteRule
from ratrain.ratrainc.bridge.jobs.formats import format_named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ratrain.ratrainc.bridge.settings import Framework, Rule

_HEAD = """# Coming from another framework

`import-plan` reads the settings of another tool and writes a plan. The tables say which setting becomes which key, which are
left out because they change nothing here, and which are refused. Megatron-LM, DeepSpeed and torchtitan have tables of their
own; the files of axolotl, LLaMA-Factory, TRL, transformers, accelerate, torchtune, nanotron and LLM Foundry stand
[at the end](#files-of-trainers).

<!-- written by docs/generate.py from the rules of the importers -->

    ratrainc import-plan --from megatron pretrain.sh -o P.toml
    ratrainc import-plan --from megatron train.sbatch --set SLURM_NNODES=4 -o P.toml
    ratrainc import-plan --from deepspeed ds_config.json --clusters 16 --seq-len 4096 -o P.toml
    ratrainc import-plan --from torchtitan job.toml --clusters 64 -o P.toml
    ratrainc import-plan train.yaml --devices 8 --steps 2000 --f32-state -o P.toml
    ratrainc export X.rtir --format megatron -o arguments.sh
    ratrainc export X.rtir --format torchtitan -o job.toml

- A setting is carried over into keys of a plan ([keys and options](keys.md)), or named with its value and the reason in the
  plan's head and under `not_carried` of `--json`. First come those without which something else is trained
  (`changes_training`); where the plan is not printed, they are on stderr too, the others by name. What is switched off
  agrees with a plan, and is not named. Names that are not known here are named too. They stop the import where they may
  decide what is trained: all of Megatron-LM's, and in DeepSpeed's and torchtitan's files those of the sections that the
  tables below say.
- What a file leaves out is what the framework takes then. The plan's head has each such default with the place in the
  framework's source, `defaults` of `--json` their values.
- DeepSpeed's file is read by the rules of Hjson, as DeepSpeed reads it. A value `"auto"` is filled in by the program that
  calls DeepSpeed: options say it here. Sizes and types are asked for; other keys are left out of the plan, and named with the
  value that the plan has then.
- torchtitan's older names are read as what they are called today.
- `--machine` (and `--capacity`) name the machine in the plan's file, which other commands then take
  ([planner](planner.md)). No setting says it: without the option a line says that the default one is taken.
- What contradicts itself is refused (RT064) at its place: a batch that the replicas cannot share
  out, a size of the command line beside another of the file.
- A launch script of Megatron-LM is read, not run. What it starts is found as bash finds it: assignments, arrays, functions,
  here-documents, `eval`, `bash -c`, scripts that it writes or sources, `srun`, `torchrun` and their like. Its arguments are
  read as argparse reads them: the last of two values counts, and what Megatron-LM would not take is refused.
- A variable that the script does not set is not set, as in an empty environment; `#SBATCH` lines set Slurm's. `--set
  NAME=VALUE` gives one a value, `--set 1=VALUE` the script an argument. Where a condition is not known both ways are
  followed, and refused by name where a plan would differ.
- A file that starts nothing is a file of arguments: all its lists count.
- Each argument of Megatron-LM is known, with the number of values that it takes: those below, the others with the reason why
  no key of a plan is theirs, and those of public forks, of ModelOpt and of Kitchen. Defaults are those of its commit d98e8a64
  (August 2026); the plan's head names each with the place in its source. Its dropout of 0.1 is named where a file is silent.
- Experts are refused: settings are read as of a dense model. `ratrainc plan` makes plans of models with experts.
- A setting that nothing reads beside the others is named with that reason: a loss scale without f16, parameters of a DeepSpeed
  optimizer without its type.
- Cuts that a file does not say are `cuts = "auto"`.
- Context ranks (`cp`) have an early and a late run of each sequence's tokens, as in Megatron-LM and torchtitan, and share out
  state as replicas do. Ranks that share out heads (Ulysses, Megatron-Core's a2a) do so here (`context_exchange`). Those that pass
  keys around gather them here, and numbers are the same but for rounding. A length that they cannot share is refused at its place.
- Warm-up counts the first step as one. Megatron-LM counts it as none; DeepSpeed's first two steps have its least rate.
- After the warm-up the rates of Megatron-LM and torchtitan are the plan's, step by step. DeepSpeed's WarmupDecayLR is a step
  behind the plan: a step has the rate that the plan has one step before; its WarmupCosineLR is not. Versions of torchtitan with
  `lr_min` come down from a step earlier, over a step more. Other curves than a line and half a cosine are named, and the
  rate stays at lr.
- What is computed again in the backward is said by passes, not by a plan: they are printed for `--passes`.
- Numbers differ as kernels differ: logits are computed by rows here (`head_chunk`).
- `export` writes what the settings can say and names each key that reading them back would give another value. An order of
  actions that has no name there is a table: `export --format torch-csv`. What a schedule computes again in the backward is
  said if it is all layers or nothing, and named otherwise. f16, which torchtitan does not have, is bfloat16 there, and named.
  How long a run is, no plan says: the end of a rate that comes down is written as such, not as the length of the training.
- Megatron-LM's arguments have the model too: its sizes, norms, biases, positions, windows and vocabulary. A part of a model
  that no argument says is named with the reason. torchtitan's models are its code: no setting has their sizes. What to add is
  said at the head of the file, and on stderr.
"""


_TRAINERS = """## Files of trainers

`import-plan` makes a plan of every file that [`fit`](fit.md) reads. Without `--from` the file's content says whose it is.
The plan has the ranks, batch, types and sharded state that `fit` counts, so both answer for the same run.

    ratrainc import-plan train.yaml --devices 8 --steps 2000 --f32-state -o P.toml
    ratrainc import-plan sft.yaml --beside fsdp.yaml -o P.toml

- Options fill in what a file leaves open: `--devices` (which is `--clusters`), `--seq-len`, `--micro-batch-size`,
  `--global-batch`, `--steps` for a rate that comes down, or a warm-up that is a share of all steps, `--lr`, `--weight-decay`, `--max-norm`,
  `--warmup-steps`. Each error names the option that mends it. An option that contradicts the file, or that nothing needs,
  is refused.
- Masters and moments of a plan are f32. A file that keeps them in fewer bits (a bf16 model without masters, AdamW in 8 bits) is
  refused; `--f32-state` makes a plan of it with f32 in their place, and the plan's head says so.
- Refused by name: float8, dropout, of adapters too, optimizers other than AdamW,
  a setting that no reader knows, and the settings below.
- Adapters (LoRA, rsLoRA, QLoRA in nf4) become `[train]` ([adapters](adapters.md)). Targets are names as PEFT has them for the
  model: torchtune's `output_proj` is `o_proj`. A regular expression, or layers chosen by number, is `re:...`. Where the model is
  known, names are checked against it. What `lora_exclude_modules` (axolotl) or `exclude_modules` (LLM Foundry) leaves out is taken
  out of the targets: a name that goes whole is left out, for some of a name's layers the targets are `re:...`. Refused: DoRA, LoftQ, PiSSA and other starts, a rate of its own for one matrix (LoRA+), a base in
  fp4 or in 8 bits, adapters of embedding and head, and Megatron-Bridge's joint layers (`linear_qkv`, `linear_fc1`). What trains are
  adapters: only their masters and moments ask for `--f32-state`.
- LLaMA-Factory's `finetuning_type: freeze` becomes `freeze`, the names of what does not train: the last n layers train, or of a
  negative number the first, or with LLaMA Pro one of each n-th part. As there, `freeze_extra_modules: norm` trains all norms.
  axolotl's `unfrozen_parameters` becomes `freeze` too, unless it trains some rows of a parameter alone. The
  model must be known. Models with experts are refused, since names of experts differ by version.
- `--model` names the model where the file's name of it is not known here: a preset, a name on the Hub, a folder. Names of layers are
  then checked, and made where the file says others. A model that contradicts one that is known by its name is refused.
- A file of Megatron-Bridge changes a recipe, which says most of a run: the recipe must be one that `fit` knows (Llama 3). Its
  launch script is given as FILE, or with `--beside`; `--set` gives variables of it.
- Passes that store on the host (`store=host`, `offload-state`) need a machine file with a host's memory.

| what a file says | keys and passes | how |
|---|---|---|
| devices, tensor, pipeline, context and data-parallel degrees | dp, tp, pp, cp, sequence_sharding, chunks, schedule | unchanged |
| batch of a device, accumulation, length | micro_batch_size, micro_batches, seq_len | unchanged; `--global-batch` where accumulation is open |
| one device, DDP | zero | 0 |
| DeepSpeed's stage | zero, reduce | the stage; gradients are reduced after each micro-batch from 2 on |
| FSDP | zero, reduce | 3, or 2 where gathered weights stay for the backward; after each micro-batch, or after the last one where the framework accumulates whole gradients (transformers' Trainer without `sync_each_batch`) |
| hybrid sharding, hpZ | shard_group, view_group | the replicas that share one copy, context ranks among them |
| mixed precision, types of gradients | view_dtype, grad_dtype, grad_shard_dtype, loss_scale | as the framework holds them; dynamic for f16 unless DeepSpeed's loss scale is fixed |
| AdamW, clipping, seed | lr, betas, eps, weight_decay, clip, max_norm, seed | unchanged; an 8-bit or narrow state only with `--f32-state` |
| rank, alpha, `use_rslora`, ranks and alphas of some layers | method, rank, alpha, rslora, rank_pattern, alpha_pattern | unchanged; the framework's defaults are named |
| targets, target parameters, `layers_to_transform` | targets | names of linear layers, of experts and routers, or `re:`; older names of experts as PEFT takes them |
| `exclude_modules` | targets | without them |
| `freeze_trainable_layers`, `freeze_trainable_modules`, `freeze_extra_modules`, `unfrozen_parameters` | freeze | what they leave out |
| modules_to_save, `additional_target` | modules_to_save | by ends of names after a dot; a tied table stays one, which is named where PEFT would train two |
| a base in 4 bits, nf4 | base | nf4; scales in f32 (no double quantisation), or torchao's, are named |
| LLM Foundry's weight_decay | weight_decay | by lr: its AdamW shrinks weights by weight_decay, whatever lr is |
| constant, cosine, linear; late decay (warmup_stable_decay, WSD, lr_decay_starting_step); warm-up | decay, total_steps, decay_steps, min_lr, warmup_steps | a rate that comes down needs its end; other shapes (1-sqrt, exponential, polynomial) are named, and the rate stays at lr |
| recomputation of layers | passes | recompute{policy=full}, of each N-th one (torchtune) with every=N; with activations on the host store=host |
| offloaded optimizer | passes | offload-state{home=host} |
| eager attention | attention | scores-kept |
| packing | attention_mask | document where a packed sample sees itself alone (axolotl, torchtune, neat_packing, TRL with flash attention, Megatron-Bridge); else causal; padded samples are named |
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *[_section(framework) for framework in FRAMEWORKS.values()], _trainers()])


def _trainers() -> str:
    """The files whose plans are made of their jobs: what becomes which key, and the settings that no field carries."""
    titles = ", ".join(format_named(name).title for name in BY_JOBS)
    refused = _rules(IGNORED, lambda rule: rule.refused)
    trains = _rules({**IGNORED, **OPEN}, lambda rule: rule.trains)
    others = _rules({**IGNORED, **OPEN}, lambda rule: not rule.refused and not rule.trains)
    lists = f"Refused unless they are off:\n\n{refused}\n\nLeft out, and something else is trained:\n\n{trains}\n"
    return f"{_TRAINERS}\nOf {titles}, by names, in which `*` stands for any text:\n\n{lists}\nLeft out:\n\n{others}\n"


def _rules(rules: Mapping[str, NoteRule], wanted: Callable[[NoteRule], bool]) -> str:
    """A list of the wanted rules by reason; a pattern's alternatives are names of their own."""
    reasons: dict[str, list[str]] = {}
    for pattern, rule in rules.items():
        if wanted(rule):
            reasons.setdefault(rule.why, []).extend(f"`{name}`" for name in _names(pattern))
    return "\n".join(f"- {', '.join(names)}: {why}." for why, names in reasons.items())


def _names(pattern: str) -> list[str]:
    """The names of a pattern without its escapes; `*` stands for any text."""
    plain = pattern.replace(r"(\..*)?", "*").replace(r"\w+", "*").replace(".*", "*").replace("\\.", ".")
    return re.split(r"\|(?![^()]*\))", plain)  # at bars outside parentheses


def _section(framework: Framework) -> str:
    carried = {name: rule for name, rule in framework.rules.items() if rule.keys}
    rows = [f"| `{name}` | {rule.keys} | {rule.says} | {_default(rule)} |" for name, rule in carried.items()]
    reasons: dict[str, list[str]] = {}
    for name, rule in framework.rules.items():
        if not rule.keys:
            reasons.setdefault(f"refused: {rule.says}" if rule.refused else rule.says, []).append(f"`{name}`")
    left = [f"- {', '.join(names)}: {why}." for why, names in reasons.items()]
    table = "| setting | keys | how | without it |\n|---|---|---|---|\n" + "\n".join(rows)
    known = "Known, and not carried over:\n\n" + "\n".join(left)
    tables: dict[str, list[str]] = {}
    for name, why in framework.tables.items():
        tables.setdefault(why, []).append(f"`{name}`")
    whole = "".join(f"\n- all of {', '.join(names)}: {why}." for why, names in tables.items())
    strict = ", ".join(f"`{name}`" for name in framework.strict)
    stops = f"\nAn unknown name stops the import in {strict}.\n" if strict else ""
    return f"## {framework.title}\n\n{table}\n\n{known}{whole}\n{stops}"


def _default(rule: Rule) -> str:
    return "" if rule.default is None else f"`{rule.default}`"
