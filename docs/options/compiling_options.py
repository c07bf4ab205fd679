"""Options of the commands that make, check and translate schedules and plans."""

from __future__ import annotations

from option import JSON, PROCESSES, SETTINGS, Command, Option

_EMPTY = "placed.rtir --passes ''"
_CALLER = "--from deepspeed auto.json --clusters 4 --seq-len 8"
_NO_CALLER = ("--from torchtitan job.toml",)
_TRAINER = "trl.yaml --clusters 4"
_TRL, _NO_FILE = "trl.yaml --memory 10GB", "--model m.json --memory 10GB"
_SIZES, _BF16 = "--micro-batch-size 1 --global-batch 8", "--dtype bf16"

COMPILING = {
    "quickstart": Command(
        "--steps 1",
        {
            "--steps": Option("how long it trains", "--steps 2", "", SETTINGS),
            "--keep": Option("keeps schedule, program, log and picture", "--keep kept"),
        },
        wall=True,
    ),
    "examples": Command("examples", {"--json": JSON}),
    "compile": Command(
        "--model m.json --plan p.toml -o out.rtir",
        {
            "--model": Option("what is compiled", "--model m2.json", "--plan p.toml -o out.rtir", idle=("x.rtir",)),
            "--plan": Option(
                "how it is cut and replicated", "--plan p2.toml", "--model m.json -o out.rtir", idle=("x.rtir",)
            ),
            "--machine": Option("sizes, times and capacity; the name in what is written", "--machine slow.toml"),
            "--capacity": Option("bytes of DDR, in place of the machine's", "--capacity 4MiB", idle=("x.rtir",)),
            "--strategy": Option(
                "the pipeline, by name",
                "--strategy full-save",
                idle=("x.rtir", "--model m.json --plan p.toml --passes place-1f1b"),
            ),
            "--passes": Option("the pipeline", "--passes place-1f1b"),
            "--schedule-file": Option(
                "the order of each stage's work, and the shape of the plan where it leaves it out",
                "--schedule-file s.csv",
                idle=(
                    "x.rtir",
                    "--model m.json --plan p.toml --strategy zb-h1",
                    "--model m.json --plan p.toml --passes place-1f1b",
                ),
            ),
            "--zero-blocks": Option(
                "which blocks keep their views whole, of those that `zero = 3` would gather for each use",
                "--zero-blocks auto",
                "--model m.json --plan z3.toml -o out.rtir",
                idle=("x.rtir",),
            ),
            "-o": Option("the file that is written", "-o b.rtx"),
            "--advice": Option(
                "whether changes are tried where it does not fit",
                "--no-advice",
                "--model m.json --plan p.toml --machine small.toml",
                idle=("x.rtir",),
            ),
            "--suggest": Option(
                "writes the plan that was found to fit",
                "--suggest q.toml",
                "--model m.json --plan p.toml --capacity 2158KiB",
                idle=("x.rtir", "--model m.json --plan p.toml --no-advice"),
            ),
            "--verify-each": Option(
                "verifies after every pass, to name the one that is at fault",
                "--verify-each",
                None,
                "ratrain.ratrainc.compiling.building:_run",
                ("x.rtir",),
            ),
            "--jobs": PROCESSES,
            "-v": Option("says which passes were inserted", "-v"),
            "--json": JSON,
        },
    ),
    "opt": Command(
        "placed.rtir --passes allocate-ddr -o out.rtir",
        {
            "--passes": Option("what is run", "--passes legalise", "placed.rtir -o out.rtir"),
            "-o": Option("the file that is written, in place of stdout", "-o b.rtir"),
            "--print-ir-after": Option(
                "prints the module after a pass",
                "--print-ir-after legalise",
                idle=("placed.rtir --passes lifetime", _EMPTY),
            ),
            "--print-ir-after-change": Option(
                "prints it after every pass that changed it",
                "--print-ir-after-change",
                idle=("placed.rtir --passes lifetime --print-ir-after all", _EMPTY),
            ),
            "--dump-dir": Option("writes it after every pass", "--dump-dir steps", idle=(_EMPTY,)),
            "--list-passes": Option("lists the passes instead", "--list-passes"),
            "--verify-each": Option(
                "verifies after every pass", "--verify-each", None, "ratrain.api:run_passes", (_EMPTY,)
            ),
            "--time-passes": Option("the seconds of each pass", "--time-passes", idle=(_EMPTY,)),
            "--stats": Option("what each pass reports", "--stats", idle=(_EMPTY,)),
            "--jobs": PROCESSES,
            "-v": Option("says which passes were inserted", "-v"),
            "--machine": Option("sizes, times and capacity", "--machine slow.toml"),
        },
    ),
    "diff": Command("x.rtir other.rtir", {"--json": JSON}),
    "verify": Command(
        "x.rtir",
        {
            "--machine": Option(
                "what the workspace of a schedule is held against",
                "--machine slow.toml",
                None,
                "ratrain.ratrainc.compiling.soundness:check",
                ("x.rtx", "placed.rtir"),
            ),
            "--jobs": PROCESSES,
            "--json": JSON,
        },
    ),
    "lint": Command(
        "s.csv",
        {
            "--format": Option("the format that is read: there is one", "--format other"),
            "--forward": Option(
                "seconds of a forward, to time a step", "--forward 2", "s.csv --forward 1 --backward 2"
            ),
            "--backward": Option("seconds of a whole backward", "--backward 3", "s.csv --forward 1 --backward 2"),
            "--weight": Option(
                "how much of it makes the parameters' gradients",
                "--weight 0.5",
                "split.csv --forward 1 --backward 2",
                idle=("s.csv --forward 1 --backward 2",),
            ),
            "--sharded": Option("refuses what is not gathered or reduced", "--sharded"),
            "--forward-only": Option("the first stages that have no backward", "--forward-only 1"),
            "--draw": Option("a picture of a step", "--draw new.svg"),
            "--json": JSON,
        },
    ),
    "export": Command(
        "x.rtir",
        {
            "--format": Option("a table, or the plan as settings of another framework", "--format megatron"),
            "-o": Option("the file that is written, in place of stdout", "-o new.csv"),
            "--lowered": Option(
                "with messages, gathers and reductions", "--lowered", idle=("x.rtir --format megatron",)
            ),
        },
    ),
    "fit": Command(
        "--model m.json --memory 10GB",
        {
            "--beside": Option("a further file of the run", "--beside acc.yaml", _TRL, idle=(_NO_FILE,)),
            "--format": Option("the framework whose settings the file has", "--format axolotl", _TRL, idle=(_NO_FILE,)),
            "--model": Option("the model", "--model m2.json"),
            "--devices": Option("devices, where the file does not say", "--devices 4"),
            "--memory": Option("what a device has", "--memory 2GB"),
            "--machine": Option(
                "what a device has, and the speeds by which ways out are priced", "--machine h100-node"
            ),
            "--seq-len": Option("tokens of a sequence, where the file does not say", "--seq-len 16"),
            "--micro-batch-size": Option(
                "sequences of a micro-batch, where the file does not say", "--micro-batch-size 4"
            ),
            "--set": Option("a variable of a launch script", "--set BATCH=2", "gpt.sh --memory 10GB", idle=(_NO_FILE,)),
            "--snapshot": Option("the allocations of a step, for PyTorch's memory viewer", "--snapshot s.pickle"),
            "--exact": Option("adds a plan of ours, placed", "--exact"),
            "--check": Option("exits with 1 unless it fits for sure", "--check", "--model m.json --memory 1GB"),
            "--json": JSON,
        },
    ),
    "import-plan": Command(
        "--from deepspeed ds.json --clusters 4 --seq-len 8",
        {
            "--from": Option(
                "whose settings are read", "--from torchtitan", "job.toml --clusters 4 --seq-len 8 --from deepspeed"
            ),
            "--beside": Option(
                "a further file of the same run", "--beside acc.yaml", _TRAINER, idle=("--from torchtitan job.toml",)
            ),
            "--model": Option(
                "the model whose layers a file of a trainer names",
                "--model m.json",
                "freeze.yaml --clusters 4",
                idle=("--from torchtitan job.toml",),
            ),
            "--clusters": Option(
                "the ranks, where the file does not say", "--clusters 8", "--from deepspeed ds.json --seq-len 8"
            ),
            "--pp": Option("the stages, where a ds_config does not say", "--pp 2", idle=_NO_CALLER),
            "--machine": Option("the machine that the plan's file names", "--machine h100-node"),
            "--capacity": Option("its DDR, which the plan's file names", "--capacity 1GB"),
            "--seq-len": Option(
                "tokens of a sequence, where the file does not say",
                "--seq-len 16",
                "--from deepspeed ds.json --clusters 4",
            ),
            "--micro-batch-size": Option(
                "sequences of a micro-batch",
                "--micro-batch-size 1",
                f"{_CALLER} --global-batch 8 {_BF16}",
                idle=_NO_CALLER,
            ),
            "--global-batch": Option(
                "sequences of a step", "--global-batch 8", f"{_CALLER} --micro-batch-size 1 {_BF16}", idle=_NO_CALLER
            ),
            "--dtype": Option("the type that blocks compute with", _BF16, f"{_CALLER} {_SIZES}", idle=_NO_CALLER),
            "--lr": Option("the learning rate", "--lr 0.001", f"{_CALLER} {_SIZES} {_BF16}", idle=_NO_CALLER),
            "--weight-decay": Option(
                "how fast weights shrink", "--weight-decay 0.1", f"{_CALLER} {_SIZES} {_BF16}", idle=_NO_CALLER
            ),
            "--max-norm": Option(
                "the largest norm of the gradient", "--max-norm 0.5", f"{_CALLER} {_SIZES} {_BF16}", idle=_NO_CALLER
            ),
            "--warmup-steps": Option(
                "steps of the warm-up", "--warmup-steps 10", f"{_CALLER} {_SIZES} {_BF16}", idle=_NO_CALLER
            ),
            "--steps": Option(
                "the step at which the learning rate has come down",
                "--steps 100",
                f"{_CALLER} {_SIZES} {_BF16}",
                idle=_NO_CALLER,
            ),
            "--f32-state": Option(
                "makes masters and moments f32 where a file keeps them in fewer bits",
                "--f32-state",
                "narrow.yaml --clusters 4",
                idle=("--from torchtitan job.toml",),
            ),
            "--set": Option(
                "a variable of a launch script, as its environment sets it",
                "--set BATCH=2",
                "--from megatron train.sh",
                idle=("--from torchtitan job.toml --clusters 4",),
            ),
            "-o": Option("the file that is written, in place of stdout", "-o new.toml"),
            "--json": JSON,
        },
    ),
    "schedule": Command(
        "--kind 1f1b --stages 2 --micro-batches 4",
        {
            "--kind": Option("the order", "--kind gpipe", "--stages 2 --micro-batches 4"),
            "--stages": Option("the rows", "--stages 3", "--kind 1f1b --micro-batches 4"),
            "--micro-batches": Option("the micro-batches", "--micro-batches 3", "--kind 1f1b --stages 2"),
            "--chunks": Option(
                "the chunks of each stage",
                "--chunks 3",
                "--kind interleaved --stages 2 --micro-batches 4",
            ),
            "--layout": Option(
                "on which stage each chunk is", "--layout vee", "--kind breadth-first --stages 2 --micro-batches 4"
            ),
            "--slices": Option(
                "the slices of each micro-batch",
                "--slices 3",
                "--kind seq1f1b --stages 2 --micro-batches 4 --slices 2",
            ),
            "--draw": Option("a picture of a step", "--draw new.svg"),
            "-o": Option("the file that is written, in place of stdout", "-o b.csv"),
        },
    ),
}
