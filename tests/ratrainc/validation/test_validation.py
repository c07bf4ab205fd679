"""Tables of published measurements: what is read, what is refused, and what errors are."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratrain import api
from ratrain.ratrain_ir.config.plan import KEYS
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Location
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.validation.outcome import validate
from ratrain.ratrainc.validation.validation_rows import OWN_COLUMNS, read_validation_table
from ratrain.targets.machine.machine import load_machine
from tests.ratrainc.validation.small_tables import CONFIG, PLAN, table, validated

if TYPE_CHECKING:
    from ratrain.targets.simulator.figures import Figures


def figures(folder: Path, text: str = PLAN, passes: str = "ratrain", machine: str | None = None) -> Figures:
    """What the simulator says of a plan by itself."""
    (folder / "other.toml").write_text(text)
    module = api.compile(
        str(folder / "m.json"), str(folder / "other.toml"), machine=machine, passes=strategy(passes).passes
    )
    return api.simulate(api.emit(module, machine=machine), machine=machine)


def problems(folder: Path, *lines: str) -> list[tuple[str, int, int, str]]:
    """Code, line, column and message of all that is wrong with a table."""
    with pytest.raises(DiagnosticError) as raised:
        read_validation_table(table(folder, *lines))
    found = []
    for each in raised.value.diagnostics:
        assert each.location is not None
        found.append((each.code, each.location.line, each.location.column, each.message))
    return found


# -- what rows mean -------------------------------------------------------------------------------------------------------


def test_a_row_is_what_its_plan_and_the_keys_laid_over_it_say(folder: Path) -> None:
    head = "id,class,split,model,machine,plan,micro_batches,dp,zero,strategy,step_seconds"
    rows = (
        "a,step-time,fit,m.json,,p.toml,,,,,1",
        "b,step-time,held-out,m.json,slow.toml,p.toml,6,2,0,full-save,2",
        'c,step-time,held-out,m.json,mt3000,p.toml,,,,"place-gpipe,allocate-ddr",2',
    )
    found = read_validation_table(table(folder, "# About it.", head, *rows))
    assert found.comments == ("About it.",)
    a, b, c = (row.task for row in found.rows)
    assert a is not None
    assert b is not None
    assert c is not None
    assert (a.plan.pp, a.plan.dp, a.plan.micro_batches, a.plan.zero, a.plan.seq_len) == (2, 1, 4, 0, 16)
    assert a.pipeline == strategy("ratrain").passes
    assert (b.plan.dp, b.plan.micro_batches, b.plan.zero) == (2, 6, 0)
    assert (b.machine.name, b.machine["ddr_bandwidth"]) == ("slow", 1e9)
    assert b.pipeline == strategy("full-save").passes
    assert c.pipeline == "place-gpipe,allocate-ddr"
    assert [row.line.number for row in found.rows] == [3, 4, 5]


def test_a_row_needs_no_plan_file_and_derives_what_it_does_not_say_from_what_it_says(folder: Path) -> None:
    head = "id,class,split,model,pp,dp,cuts,schedule,micro_batch_size,micro_batches,seq_len,lr,view_dtype,loss_scale,step_seconds"
    found = read_validation_table(
        table(
            folder,
            head,
            'a,step-time,fit,m.json,2,4,"[3]",gpipe,2,3,8,1e-3,f16,dynamic,1',
            "b,step-time,fit,m.json,2,4,auto,,2,3,8,,f32,1.0,1",
        )
    )
    one, other = (row.task for row in found.rows)
    assert one is not None
    assert other is not None
    assert (one.plan.cuts, one.plan.schedule, one.plan.zero, one.plan.optimizer.lr) == ((3,), "gpipe", 1, 1e-3)
    assert one.plan.loss_scale is None
    assert (len(other.plan.cuts), other.plan.grad_dtype, other.plan.loss_scale) == (1, "f32", 1.0)


def test_a_machine_that_is_given_takes_the_place_of_the_rows_own(folder: Path) -> None:
    path = table(folder, "id,class,split,model,machine,plan,step_seconds", "a,step-time,fit,m.json,mt3000,p.toml,1")
    row = read_validation_table(path, load_machine(str(folder / "slow.toml"))).rows[0]
    assert row.task is not None
    assert row.task.machine.name == "slow"


def test_columns_of_a_table_and_keys_of_a_plan_have_different_names() -> None:
    assert not {*OWN_COLUMNS} & {*KEYS.keys}


# -- errors ---------------------------------------------------------------------------------------------------------------


def test_errors_are_those_of_the_simulation_by_class_and_split(folder: Path) -> None:
    step, tokens = figures(folder).step_seconds, 4 * 16
    peak = max(stage.peak_bytes for stage in figures(folder, passes="full-save").stages)
    found = validated(
        folder,
        "id,class,split,model,plan,strategy,step_seconds,tokens_per_second,peak_bytes",
        f"a,step-time,fit,m.json,p.toml,,{step / 1.25!r},,",
        f"b,step-time,held-out,m.json,p.toml,,{step / 1.5!r},,",
        f"c,step-time,held-out,m.json,p.toml,,,{2 * tokens / step!r},",
        f"d,memory,held-out,m.json,p.toml,full-save,,,{4 * peak}",
    )
    assert [each.error for each in found.outcomes] == pytest.approx([0.25, 0.5, -0.5, -0.75])
    errors = found.errors("step-time")
    assert (errors["fit"].count, errors["fit"].mean) == (1, pytest.approx(0.25))
    assert (errors["held-out"].count, errors["held-out"].mean, errors["held-out"].largest) == (
        2,
        pytest.approx(0.5),
        pytest.approx(0.5),
    )
    assert found.errors("memory")["held-out"].mean == pytest.approx(0.75)
    assert found.errors("bubble") == {}
    assert found.classes() == ["step-time", "memory"]


def test_bubbles_of_given_times_are_exact_whatever_fits(folder: Path) -> None:
    """The model's state alone is larger than the mt3000 there; its times, and bytes, are not asked for."""
    big = CONFIG | {"vocab_size": 400_000, "hidden_size": 8192}
    (folder / "big.json").write_text(json.dumps(big))
    found = validated(
        folder,
        "id,class,split,model,strategy,pp,dp,micro_batch_size,micro_batches,seq_len,schedule,bubble_fraction,times",
        f'a,bubble,held-out,big.json,full-save,4,1,1,8,8,1f1b,{3 / 11!r},"1,2,1,0"',
        f'b,bubble,held-out,big.json,full-save,4,1,1,8,8,gpipe,{3 / 11 + 0.1!r},"1,2,1,0"',
        f'c,bubble,held-out,m.json,zb-h1,4,1,1,8,8,zb-h1,{6 / 38!r},"1,2,1,0"',
        'd,bubble,held-out,m.json,zb-h1,1,1,1,8,8,zb-h1,0,"1,2,1,0"',
    )
    assert [each.error for each in found.outcomes] == pytest.approx([0, -0.1, 0, 0], abs=1e-12)
    assert found.errors("bubble")["held-out"].largest == pytest.approx(0.1)
    assert found.fits().to_json() == {"right_fits": 0, "right_refusals": 0, "false_alarms": 0, "misses": 0}


def test_bubbles_without_times_are_those_of_the_machine(folder: Path) -> None:
    found = validated(
        folder, "id,class,split,model,plan,bubble_fraction", "a,bubble,held-out,m.json,p.toml,0.25"
    ).outcomes[0]
    assert found.simulated == figures(folder).bubble_fraction


def test_rows_of_a_group_are_compared_with_its_first(folder: Path) -> None:
    """Measured: half the rate of a rank on twice as many; constants that slow all of them down change nothing of that."""
    one = figures(folder).step_seconds
    two = figures(folder, PLAN.replace("dp = 1", "dp = 2")).step_seconds
    head = "id,class,split,model,plan,dp,step_seconds,group,needs"
    found = validated(
        folder,
        head,
        "z,scaling,fit,m.json,p.toml,8,1,g,something",
        "a,scaling,fit,m.json,p.toml,1,10,g,",
        "b,scaling,held-out,m.json,p.toml,2,20,g,",
        "c,scaling,held-out,m.json,p.toml,2,20,other,",
        "d,scaling,held-out,m.json,p.toml,2,20,,",
        "e,step-time,held-out,m.json,p.toml,2,20,g,",
    )
    ratios = [each.ratios for each in found.outcomes]
    assert [ratio is not None for ratio in ratios] == [False, False, True, False, False, False]
    assert ratios[2] == pytest.approx((0.5, one / two))
    assert found.ratio_errors("scaling")["held-out"].count == 1
    assert found.outcomes[2].ratio_error == pytest.approx(one / two / 0.5 - 1)
    assert found.ratio_errors("step-time") == {}


def test_rates_are_compared_as_times_are(folder: Path) -> None:
    head = "id,class,split,model,plan,dp,step_seconds,tokens_per_second,group"
    found = validated(
        folder,
        head,
        "a,zero3-micro-batch,fit,m.json,p.toml,1,10,,g",
        "b,zero3-micro-batch,held-out,m.json,p.toml,2,20,,g",
        "c,zero3-micro-batch,fit,m.json,p.toml,1,,6.4,h",
        "d,zero3-micro-batch,held-out,m.json,p.toml,2,,6.4,h",
    ).outcomes
    assert found[3].ratios == pytest.approx(found[1].ratios)


def test_what_fits_is_told_right_or_wrong(folder: Path) -> None:
    found = validated(
        folder,
        "id,class,split,model,plan,strategy,capacity,step_seconds,fits",
        "a,out-of-memory,held-out,m.json,p.toml,full-save,,,yes",
        "b,out-of-memory,held-out,m.json,p.toml,full-save,1KiB,,no",
        "c,out-of-memory,held-out,m.json,p.toml,full-save,1KiB,,yes",
        "d,out-of-memory,held-out,m.json,p.toml,full-save,,,no",
        "e,step-time,held-out,m.json,p.toml,full-save,1KiB,1,",
    )
    verdicts = ["right", "right", "false alarm", "miss", "false alarm"]
    assert [each.verdict for each in found.outcomes] == verdicts
    edges = {"right_fits": 1, "right_refusals": 1, "false_alarms": 1, "misses": 1}
    assert found.fits("out-of-memory").to_json() == edges
    assert found.fits("memory").to_json() == dict.fromkeys(edges, 0)
    assert found.fits().to_json() == edges | {"false_alarms": 2}
    assert found.outcomes[4].error is None
    assert found.errors("step-time") == {}
    evaluation = found.outcomes[4].evaluation
    assert evaluation is not None
    assert evaluation.refusal


def test_rows_that_need_what_is_not_built_are_left_out_and_counted(folder: Path) -> None:
    found = validated(
        folder,
        "id,class,split,model,pp,schedule,step_seconds,needs",
        "a,step-time,held-out,not-there.json,4,zb-v,1,schedule",
        "b,step-time,held-out,not-there.json,4,zb-v,1,schedule",
        "c,step-time,held-out,m.json,4,1f1b,1,tp",
    )
    assert found.needs() == {"schedule": 2, "tp": 1}
    assert found.classes() == []


def test_a_peak_of_a_rank_has_the_overheads_of_its_machine(folder: Path) -> None:
    constant = '[{}]\nvalue = {}\nunit = "bytes"\ncertainty = "assumed"\nsource = "test"\n'
    text = 'base = "mt3000"\nname = "taken"\n' + constant.format("runtime_overhead", 1000)
    (folder / "taken.toml").write_text(text + constant.format("transport_overhead_per_group", 10))
    head = "id,class,split,model,machine,plan,dp,strategy,peak_bytes,peak_of"
    plain, tensors, rank, alone = validated(
        folder,
        head,
        "a,memory,held-out,m.json,taken.toml,p.toml,2,full-save,1MB,",
        "b,memory,held-out,m.json,taken.toml,p.toml,2,full-save,1MB,tensors",
        "c,memory,held-out,m.json,taken.toml,p.toml,2,full-save,1MB,rank",
        "d,memory,held-out,m.json,,p.toml,2,full-save,1MB,rank",
    ).outcomes
    assert plain.simulated == tensors.simulated == alone.simulated
    assert plain.simulated is not None
    assert rank.simulated is not None
    assert rank.simulated - plain.simulated - 1000 in (10, 20, 30, 40)
    assert rank.error == pytest.approx(rank.simulated / 1e6 - 1)


# -- folded steps ---------------------------------------------------------------------------------------------------------

LONG_HEAD = (
    "id,class,split,model,plan,pp,dp,zero,reduce,micro_batches,strategy,step_seconds,peak_bytes,fits,bubble_fraction"
)


def long_row(kind: str, pp: int, *, zero: int = 0, reduce: str = "last", passes: str = "baseline-1f1b") -> str:
    """A row of a step long enough to be folded."""
    measured = {"step-time": "1,,,", "memory": ",1GB,,", "out-of-memory": ",,yes,", "bubble": ",,,0.1"}[kind]
    return f'{kind}-{pp},{kind},held-out,m.json,p.toml,{pp},2,{zero},{reduce},37,"{passes}",{measured}'


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.full), 4])
@pytest.mark.parametrize(
    "passes", ["ratrain", "baseline-1f1b", "full-save", "bucket-grad-sync{unit=block},insert-prefetch,allocate-ddr"]
)
@pytest.mark.sampled(4)
def test_a_folded_row_says_what_the_whole_step_does(folder: Path, pp: int, passes: str) -> None:
    kinds = ("step-time", "memory", "out-of-memory") if passes != "ratrain" else ("step-time",)
    rows = [long_row(kind, pp, passes=passes) for kind in kinds]
    found = read_validation_table(table(folder, LONG_HEAD, *rows))
    folded, whole = validate([found]).outcomes, validate([found], whole=True).outcomes
    for one, other in zip(folded, whole, strict=True):
        assert one.evaluation is not None
        assert other.evaluation is not None
        assert one.evaluation.estimated
        assert not other.evaluation.estimated
        assert one.fits == other.fits
    assert folded[0].simulated == pytest.approx(whole[0].simulated, rel=0.005)
    for one, other in zip(folded[1:2], whole[1:2], strict=True):
        assert one.simulated == other.simulated


def test_rows_that_a_folded_step_would_say_wrong_are_simulated_whole(folder: Path) -> None:
    waiting = "bucket-grad-sync{unit=block blocking=true},insert-prefetch,allocate-ddr"
    rows = (
        long_row("bubble", 2),
        long_row("step-time", 1, zero=3, passes="zero3-blocking"),
        long_row("memory", 2, zero=2, reduce="each-micro-batch", passes="ratrain"),
        long_row("out-of-memory", 1, passes=waiting),
        long_row("memory", 1, passes="ratrain"),
        long_row("step-time", 2, passes=waiting),
    )
    found = validated(folder, LONG_HEAD, *rows).outcomes
    assert [each.to_json()["folded"] for each in found] == [False, False, False, False, False, True]


@pytest.mark.full
def test_output_marks_folded_rows_and_says_what_the_mark_means(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(folder, LONG_HEAD, long_row("step-time", 1), long_row("out-of-memory", 1))
    assert main(["validate", path, "--markdown"]) == 0
    folded = capsys.readouterr().out
    assert "| ~fits |" in folded
    assert "~: folded, 2 rows" in folded
    assert main(["validate", path, "--markdown", "--whole"]) == 0
    assert "~" not in capsys.readouterr().out


def test_a_page_names_the_tables_that_it_does_not_count(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(folder, LONG_HEAD, long_row("step-time", 2))
    assert main(["validate", path, "--markdown"]) == 0
    assert "did not name" not in capsys.readouterr().out
    table(folder, "not,read", name="left-out.csv")
    assert main(["validate", path, "--markdown"]) == 0
    assert "not counted here: left-out." in " ".join(capsys.readouterr().out.split())


# -- what is refused ------------------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_with_a_table_is_said_at_line_and_column(folder: Path) -> None:
    lines = (
        "# a comment",
        "id,class,split,model,machine,capacity,strategy,plan,dp,micro_batches,step_seconds,peak_bytes",
        "a,step-time,held-out,m.json,nowhere,1XB,full-saved,p.toml,1,4,1,",
        "a,steptime,both,n.json,,,,p.toml,1,4,-1,",
        "b,memory,fit,m.json,,,,p.toml,many,0,1.5,",
        "c,step-time,fit,,,,,p.toml,1,4,,",
        ",step-time,fit,m.json,,,nopass{},nope.toml,1,4,1,",
        "d,step-time,fit",
    )
    expected = [
        ("RT005", 3, "1XB", "capacity is bytes"),
        ("RT004", 3, "nowhere", "'nowhere' is neither a machine"),
        ("RT004", 3, "full-saved", "'full-saved' is not a strategy"),
        ("RT006", 4, "a", "'a' is given twice"),
        ("RT005", 4, "steptime", "got 'steptime'"),
        ("RT005", 4, "both", "fit or held-out"),
        ("RT002", 4, "n.json", "there is no file"),
        ("RT005", 5, "1.5", "got step_seconds"),
        ("RT063", 5, "many", "'parallel.dp' is \"many\""),
        ("RT063", 5, "0", "'batch.micro_batches' is 0"),
        ("RT005", 6, "step-time", "got nothing"),
        ("RT005", 6, ",,,,p.toml", "needs a model"),
        ("RT005", 7, ",step-time", "needs an id"),
        ("RT004", 7, "nopass", "'nopass' is not a pass"),
        ("RT002", 7, "nope.toml", "cannot be read"),
        ("RT002", 8, "d", "expected 12 fields"),
    ]
    found = problems(folder, *lines)
    for code, line, cell, words in expected:
        column = 1 + lines[line - 1].index(cell)
        assert any(each[:3] == (code, line, column) and words in each[3] for each in found), (words, found)
    assert len(found) == len(expected)


@pytest.mark.parametrize(
    ("lines", "code", "words"),
    [
        (["# only a comment"], "RT002", "empty"),
        (["id,class,split,model,stages", "a,step-time,fit,m.json,2"], "RT004", "no column 'stages'"),
        (["id,class,split,model,pp,pp", "a,step-time,fit,m.json,2,2"], "RT006", "given twice"),
        (["id,class,model", "a,step-time,m.json"], "RT002", "no column 'split'"),
        (["id,class,split,model,step_seconds"], "RT002", "no rows"),
        (["id,class,split,model,plan,fits", "a,out-of-memory,fit,m.json,p.toml,perhaps"], "RT005", "yes or no"),
        (["id,class,split,model,plan,bubble_fraction", "a,bubble,fit,m.json,p.toml,1"], "RT005", "below 1"),
        (
            ["id,class,split,model,plan,step_seconds,fits", "a,step-time,fit,m.json,p.toml,1,yes"],
            "RT005",
            "no other measure",
        ),
        (
            ["id,class,split,model,plan,step_seconds,times", 'a,step-time,fit,m.json,p.toml,1,"1,1,1,0"'],
            "RT005",
            "class 'bubble'",
        ),
        (
            ["id,class,split,model,plan,bubble_fraction,times", 'a,bubble,fit,m.json,p.toml,0.1,"1,1,0"'],
            "RT005",
            "four numbers",
        ),
        (
            [
                "id,class,split,model,machine,plan,bubble_fraction,times",
                'a,bubble,fit,m.json,mt3000,p.toml,0.1,"1,1,1,0"',
            ],
            "RT005",
            "changes nothing",
        ),
        (
            ["id,class,split,model,plan,strategy,zero,dp,step_seconds", "a,step-time,fit,m.json,p.toml,zero3,2,2,1"],
            "RT064",
            "ZeRO 3",
        ),
        (
            ["id,class,split,model,plan,strategy,schedule,step_seconds", "a,step-time,fit,m.json,p.toml,zb-h1,1f1b,1"],
            "RT064",
            "places zb-h1",
        ),
        (["id,class,split,model,plan,peak_bytes,peak_of", "a,memory,fit,m.json,p.toml,1GB,all"], "RT005", "rank"),
        (
            ["id,class,split,model,plan,step_seconds,peak_of", "a,step-time,fit,m.json,p.toml,1,rank"],
            "RT005",
            "changes nothing",
        ),
        (["id,class,split,model,step_seconds", "a,step-time,fit,m.json,1"], "RT063", "'parallel.pp' is missing"),
        (["id,class,split,model,plan,pp,step_seconds", "a,step-time,fit,m.json,p.toml,9,1"], "RT064", "9 layers"),
    ],
)
def test_rows_that_cannot_be_meant_are_refused(folder: Path, lines: list[str], code: str, words: str) -> None:
    found = problems(folder, *lines)
    assert any(each[0] == code and words in each[3] for each in found), found


def test_what_is_wrong_with_a_file_is_said_once_whoever_names_it(folder: Path) -> None:
    (folder / "bad.toml").write_text('base = "mt3000"\nname = "bad"\nnosuch = 1\n')
    head = "id,class,split,model,machine,plan,step_seconds"
    found = problems(folder, head, *(f"{name},step-time,fit,m.json,bad.toml,p.toml,1" for name in "abc"))
    assert [each[0] for each in found] == ["RT065"]


def test_rows_that_cannot_be_compiled_are_all_named(folder: Path) -> None:
    path = table(
        folder,
        "id,class,split,model,strategy,plan,mapping,step_seconds",
        "a,step-time,fit,m.json,place-1f1b,p.toml,,1",
        "b,step-time,fit,m.json,,p.toml,,1",
        "c,step-time,fit,m.json,,p.toml,node 1x1,1",
    )
    for jobs in (1, 2):
        with pytest.raises(DiagnosticError) as raised:
            validate([read_validation_table(path)], jobs)
        found = raised.value.diagnostics
        assert [each.location.line for each in found if each.location] == [2, 4]
        assert "row 'a'" in found[0].message


def test_diagnostics_come_from_workers_as_they_were_raised() -> None:
    error = DiagnosticError([Diagnostic("RT005", "too much", Location("t.csv", 3, 4))])
    again = pickle.loads(pickle.dumps(error))
    assert again.diagnostics == error.diagnostics
    assert str(again) == str(error)
