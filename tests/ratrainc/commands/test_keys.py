"""Every key of plans, models and machines does what `docs/keys.py` says of it: changed, it shows there, or it is refused."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest

from ratrain import api
from ratrain.ratrain_ir.config.families import FAMILIES, FAMILY
from ratrain.ratrain_ir.config.hf_keys import keys_of
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_files import parse_config
from ratrain.ratrain_ir.config.plan import KEYS as KEYS_OF_PLANS
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_text import plan_from_fields
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.targets.machine.constants import ALL_UNITS, WORDS, is_whole
from ratrain.targets.machine.link_groups import GROUP_UNITS
from ratrain.targets.machine.machine import _CONSTANT_KEYS, Machine, load_machine, parse_machine
from ratrain.targets.simulator.figures import one_core_step_seconds
from tests.end_to_end.tiny_runs import losses, state, train

DOCS = Path(__file__).resolve().parents[3] / "docs"
KEYS = runpy.run_path(str(DOCS / "keys.py"))
TABLES = ("PLAN", "MODEL", "GPT2", "OTHERS", "MACHINE", "PLAN_TRIALS")
PLAN, MODEL, GPT2, OTHERS, MACHINE, TRIALS = (KEYS[name] for name in TABLES)
SCHEDULE, TIMES, NUMBERS, REFUSED, STORED, OFFLOADED = (
    KEYS[name] for name in ("SCHEDULE", "TIMES", "NUMBERS", "REFUSED", "STORED", "OFFLOADED")
)

Values = Mapping[str, Any]
A_PLAN: Values = {
    "parallel.pp": 2,
    "parallel.dp": 2,
    "parallel.cuts": [1],
    "batch.micro_batch_size": 1,
    "batch.micro_batches": 4,
    "batch.seq_len": 6,
    "batch.head_chunk": 2,
}
A_CONFIG: Values = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 8,
    "rms_norm_eps": 1e-5,
}
A_GPT2: Values = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 8,
    "n_layer": 3,
    "n_head": 2,
    "n_positions": 9,
}
A_NEOX: Values = {
    "model_type": "gpt_neox",
    "vocab_size": 64,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "rotary_pct": 0.5,
}
BASES = {"llama": A_CONFIG, "gpt2": A_GPT2, "gpt_neox": A_NEOX}


def toml(values: Values) -> str:
    """A plan of `section.key` = value, None being left out."""
    sections: dict[str, list[str]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        if value is not None:
            sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
    return "".join(f"[{section}]\n" + "\n".join(lines) + "\n" for section, lines in sections.items())


def config(changes: Values, family: str = "llama") -> ModelConfig:
    data = {key: value for key, value in {**BASES[family], **changes}.items() if value is not None}
    return parse_config(data, name="m", file="config.json")


def plan(changes: Values, model: ModelConfig) -> Plan:
    return parse_plan(toml({**A_PLAN, **changes}), file="plan.toml", model=model)


GROUPS = "".join(
    f'[[link_group]]\nname = "{name}"\n{clusters}'
    + "".join(
        f'[link_group.{key}]\nvalue = {value}\nunit = "{GROUP_UNITS[key]}"\ncertainty = "assumed"\nsource = "test"\n'
        for key, value in (("bandwidth", bandwidth), ("latency", 0))
    )
    for name, clusters, bandwidth in (
        (
            "chip",
            '[link_group.clusters]\nvalue = 2\nunit = "clusters"\ncertainty = "assumed"\nsource = "test"\n',
            15e9,
        ),
        ("system", "", 1e6),
    )
)


def machine_text(changes: Values) -> str:
    """A file on the MT-3000 with constants, words and groups changed."""
    lines = [f'{key} = "{changes.get(key, usual)}"' for key, usual in (("base", "mt3000"), ("name", "mine"))]
    lines += [f'{key} = "{changes[key]}"' for key in ("cost", "update_engine", "target") if key in changes]
    if "collectives" in changes:
        lines.append(f"collectives = {json.dumps(changes['collectives'])}")
    if changes.get("op") is not None:
        entries = ['[[op]]\nkey = "scale_update"\nsize = 4\nseconds = 1e-3'] if changes["op"] else []
        lines += entries
    for key, value in changes.items():
        if key in ALL_UNITS:
            number = int(value) if is_whole(key) else float(value)
            lines.append(
                f'[{key}]\nvalue = {number}\nunit = "{ALL_UNITS[key]}"\ncertainty = "assumed"\nsource = "test"'
            )
    return "\n".join(lines) + "\n" + (GROUPS if "link_group" in changes else "")


def machine(changes: Values) -> Machine:
    return parse_machine(machine_text(changes), file="mine.toml")


@cache
def shown(seen: str, model: ModelConfig, of: Plan, on: str) -> object:
    """What is looked at: ops, tensors and addresses; simulated times; or what some steps train. `on` is a machine's text."""
    machine = parse_machine(on, file="mine.toml")
    stored, _, home = seen.rpartition(" ")
    elsewhere = {STORED: f"recompute{{policy=none store={home}}}", OFFLOADED: f"offload-state{{home={home}}}"}
    passes = f"place-1f1b,{elsewhere[stored]},allocate-ddr" if stored in elsewhere else None
    module = api.compile(model, of, machine=machine, passes=passes)
    if seen == SCHEDULE:
        headers = ("  model {", "  plan {")
        return [line for line in print_module(module).splitlines() if not line.startswith(headers)]
    program = api.emit(module, machine=machine)
    if seen == TIMES or stored in elsewhere:
        return api.simulate(program, machine=machine).to_json()
    if seen == "simulate --cores 2":
        return api.simulate_on_cores(program, 2, machine=machine).to_json()
    if seen == "simulate --one-core":
        return one_core_step_seconds(program, machine)
    assert seen == NUMBERS
    run = train(program, 4, kernels="reference")
    return losses(run), {name: array.tobytes() for name, array in state(run).items()}


@pytest.mark.parametrize("name", PLAN)
@pytest.mark.sampled(7)
def test_a_key_of_a_plan_changes_what_it_says(name: str) -> None:
    key, model = PLAN[name], config({"num_hidden_layers": 4, **PLAN[name].model})  # for two stages of two chunks
    on = machine_text({"link_group": True} if name == "parallel.mapping" else {})
    before, after = (plan({**key.given, **with_it}, model) for with_it in ({}, {name: key.value}))
    assert before != after
    assert shown(key.seen, model, before, on) != shown(key.seen, model, after, on)


def test_every_key_of_a_plan_has_its_entry() -> None:
    known = set(KEYS_OF_PLANS.labels.values())
    assert set(PLAN) == known == set(TRIALS)
    assert {name.partition(".")[2] for name in known} == set(
        plan_from_fields(plan({}, config({})).to_fields()).to_fields()
    ) | {
        "mapping",
        "attention",
        "attention_mask",
        "logits",
        "chunks",
        "layout",
        "slices",
        "tp",
        "cp",
        "context_layout",
        "context_exchange",
        "context_groups",
        "ep",
        "sequence_sharding",
        "zero_blocks",
        "shard_group",
        "view_group",
        "gather_quantised",
        "reduce_quantised",
        "accumulate",
        "balance_loss",
        "z_loss",
        "dispatch",
        "capacity_factor",
        "bias_update",
        "method",
        "rank",
        "alpha",
        "rslora",
        "targets",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "freeze",
        "base",
        "decay",
        "decay_steps",
    }


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"optimizer.max_norm": 1.0}, "optimizer.max_norm"),
        ({"optimizer.min_lr": 1e-5}, "optimizer.min_lr"),
        ({"optimizer.decay": "linear"}, "optimizer.decay"),
        ({"optimizer.decay_steps": 2}, "optimizer.decay_steps"),
        ({"batch.head_chunk": 7}, "batch.head_chunk"),
        ({"batch.mlp_chunk": 7}, "batch.mlp_chunk"),
        ({"compute.logits": "whole"}, "batch.head_chunk"),
        ({"compute.logits": "whole", "batch.head_chunk": 256}, "batch.head_chunk"),
        ({"state.reduce": "each-micro-batch"}, "state.reduce"),
        ({"state.loss_scale": 2.0, "state.view_dtype": "f32"}, "state.loss_scale"),
        ({"state.loss_scale": 2.0, "state.view_dtype": "bf16"}, "state.loss_scale"),
    ],
    ids=str,
)
def test_a_key_of_a_plan_that_would_change_nothing_is_refused(changes: Values, key: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        plan(changes, config({}))
    (item,) = caught.value.diagnostics
    lines = toml({**A_PLAN, **changes}).split("\n")
    assert item.location is not None
    assert lines[item.location.line - 1].startswith(f"{key.partition('.')[2]} ="), item.render()
    assert item.help


def test_a_mapping_needs_a_machine_of_its_groups() -> None:
    model = config({})
    mapped = plan({"parallel.mapping": "chip 2x1"}, model)
    with pytest.raises(DiagnosticError, match="maps its ranks"):
        shown(TIMES, model, mapped, machine_text({"clusters_per_chip": 1}))


@pytest.mark.parametrize(
    ("family", "name"), [*(("llama", name) for name in (*MODEL, *OTHERS)), *(("gpt2", name) for name in GPT2)]
)
@pytest.mark.sampled(3)
def test_a_key_of_a_model_changes_what_it_says(family: str, name: str) -> None:
    key = {"llama": {**MODEL, **OTHERS}, "gpt2": GPT2}[family][name]
    before = config(key.given, family)
    if key.seen == REFUSED:
        with pytest.raises(DiagnosticError, match=name.removesuffix("s")):
            config({**key.given, name: key.value}, family)
        return
    after = config({**key.given, name: key.value}, family)
    of = {"parallel.pp": 1, "parallel.cuts": "auto", "parallel.dp": 1, "optimizer.lr": 0.0}
    if key.seen == NUMBERS:
        of["batch.micro_batches"] = 1
    on = machine_text({})
    assert shown(key.seen, before, plan(of, before), on) != shown(key.seen, after, plan(of, after), on)


def test_every_key_of_a_model_has_its_entry() -> None:
    assert set(MODEL) == keys_of("llama").read
    assert set(GPT2) == keys_of("gpt2").read - keys_of("llama").read
    every = {key for family in FAMILIES for key in keys_of(family).read}
    assert every == {*MODEL, *GPT2, *OTHERS}


def test_every_field_of_a_model_follows_from_keys() -> None:
    """Held by a key as it is, chosen or implied by families; no family rotates neighbours yet."""
    by_key = {name for family in FAMILIES for name in keys_of(family).renamed}
    chosen = {name for family in FAMILY.values() for name in (*family.free, *family.implied)}
    always = {"name", "family", "rope_theta", "inert", "training", "layer_numbers", "expert_ranks"}
    assert {item.name for item in attrs.fields(ModelConfig)} == by_key | chosen | always | {"rope_interleaved"}


@pytest.mark.parametrize("family", BASES)
def test_keys_that_are_not_read_change_nothing(family: str) -> None:
    assert config(dict.fromkeys(keys_of(family).harmless, 3), family) == config({}, family)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in BASES for name in keys_of(family).neutral])
def test_a_key_that_must_be_switched_off_is_refused_otherwise(family: str, name: str) -> None:
    allowed, _ = keys_of(family).neutral[name]
    data = {**BASES[family], name: allowed[-1]}
    assert parse_config(data, name="m", file="config.json") == config({}, family)
    with pytest.raises(DiagnosticError, match=name):
        config({name: 17}, family)


@pytest.mark.parametrize("name", [name for name in MACHINE if name not in ("op", "link_group")])
@pytest.mark.sampled(5)
def test_a_key_of_a_machine_changes_what_it_says(name: str) -> None:
    key, model = MACHINE[name], config({})
    large = key.given.get("large")
    if large:
        model = config({"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "head_dim": 64})
    of = plan({"batch.micro_batch_size": 1} | ({"batch.seq_len": 128, "batch.head_chunk": 64} if large else {}), model)
    given = {k: v for k, v in key.given.items() if k != "large"}
    usual = given if key.taken is None else dict(key.taken)
    results = []
    for changes in (usual, {**given, name: key.value}):
        try:
            results.append(shown(key.seen, model, of, machine_text(changes)))
        except DiagnosticError as error:
            results.append(str(error))
    assert not isinstance(results[0], str), results[0]
    assert results[0] != results[1]


def test_groups_and_tables_of_a_machine_change_times() -> None:
    model = config({})
    of = plan({}, model)
    uniform = shown(TIMES, model, of, machine_text({}))
    assert shown(TIMES, model, of, machine_text({"link_group": True})) != uniform
    assert shown(TIMES, model, of, machine_text({"cost": "table", "op": True})) != uniform
    for changes in ({"op": True}, {"cost": "table"}):
        with pytest.raises(DiagnosticError, match="table"):
            machine(changes)


def test_every_key_of_a_machine_has_its_entry() -> None:
    assert set(MACHINE) == set(ALL_UNITS) | {*WORDS}
    assert set(KEYS["GROUP"]) == {"name", *GROUP_UNITS}
    assert set(KEYS["CONSTANT"]) == set(_CONSTANT_KEYS)
    assert {"engine_gap", "head_efficiency"} <= set(MACHINE), load_machine(None).name


@pytest.mark.parametrize("name", ["chip_bandwidth", "chip_latency", "chip_uplink"])
def test_links_of_a_chip_need_clusters_that_share_it(name: str) -> None:
    with pytest.raises(DiagnosticError, match=name):
        machine({name: 1e-3, "clusters_per_chip": 1})


@pytest.mark.parametrize("key", [key for key in GROUP_UNITS if key != "clusters"])
def test_a_key_of_a_group_changes_times(key: str) -> None:
    model = config({})
    of = plan({}, model)
    text = machine_text({"link_group": True})
    entry = f'[link_group.{key}]\nvalue = {"1e3" if key != "latency" else "1e-2"}\nunit = "{GROUP_UNITS[key]}"\ncertainty = "assumed"\nsource = "test"\n'
    chip, _, system = text.partition('[[link_group]]\nname = "system"\n')
    start = chip.find(f"[link_group.{key}]")
    chip = (chip if start < 0 else chip[:start] + chip[start:].split("\n", 5)[5]) + entry
    changed = f'{chip}[[link_group]]\nname = "system"\n{system}'
    assert shown(TIMES, model, of, changed) != shown(TIMES, model, of, machine_text({"link_group": True}))
