"""What each option of each command changes; the last part of `docs/keys.md`.

`tests/ratrainc/commands/test_options.py` calls every command as its entry says, without and with each option, and looks for a difference in what is
printed and written, or, for options that may not change what is computed, in what is called. An option without an entry fails it.
"""

from __future__ import annotations

from attrs import field, frozen

SETTINGS, REQUEST = (
    "ratrain.ratrainc.running.training:run_training",
    "ratrain.ratrainc.planner.search.plan_request:PlanRequest",
)


@frozen
class Option:
    """What an option changes, how it is given, and beside what."""

    changes: str
    words: str
    beside: str | None = None
    """the command's words where they are not the usual ones"""
    reaches: str | None = None
    """what is called with it, where nothing that is printed or written may show it, as it changes the pace, the order or a refusal"""
    idle: tuple[str, ...] = ()
    """the command's words with which it would change nothing: it is refused there"""


@frozen
class Command:
    """A command as it is usually called, and its options."""

    words: str
    options: dict[str, Option] = field(factory=dict)
    wall: bool = False
    """whether it prints seconds of this machine"""


_TRACKERS = "ratrain.ratrainc.running.training:check_trackers"
_EMPTY = "placed.rtir --passes ''"
_PAIRS = "x.rtx --steps 2 --log l.jsonl --data pairs.jsonl --train-on completion"
_CHATS = "x.rtx --steps 2 --log l.jsonl --data chats.jsonl --train-on answers --chat-template chatml"
_TUNE = "--model w --data chats.jsonl -o ft --chat-template chatml"
_TUNE_PAIRS = "--model w --data pairs.jsonl -o ft --seq-len 64 --steps 2"
_GENERATION = "ratrain.ratrainc.running.generation:generate"
_WATCH = "ratrain.ratrainc.watch.watching:watch"
_JSON = Option("one JSON object on stdout", "--json")
_SEARCH = "--model m.json --clusters 2 --global-batch 4 --seq-len 8"
_JOBS = "processes of the search"
_PROCESSES = Option("processes side by side", "--jobs 77", reaches="ratrain.ratrain_ir.process_pool:processes")
_AUTO = "--model m.json --plan auto --clusters 2 --global-batch 4 --strategies zero3,ratrain"
_QUICK = "--model m.json --plan auto --strategies full-save --seq-len 8 --seconds 0 --jobs 1"
_CALLER = "--from deepspeed auto.json --clusters 4 --seq-len 8"
_NO_CALLER = ("--from torchtitan job.toml",)
_TRAINER = "trl.yaml --clusters 4"
_TRL, _NO_FILE = "trl.yaml --memory 10GB", "--model m.json --memory 10GB"
_SIZES, _BF16 = "--micro-batch-size 1 --global-batch 8", "--dtype bf16"
_FIT = "ratrain.ratrainc.calibration.calibration_report:calibrate_rows"
_ROWS = "--rows rows.csv --fit launch"
_TIMED = "ratrain.ratrainc.calibration.from_device:machine_of_device"
_TIMED_PLAN = "--device cpu --model m2.json --plan p.toml"
_NO_DEVICE = (_ROWS, "--profile prof.json")
_NO_ROWS = ("--profile prof.json", "--device cpu")

OPTIONS = {
    "quickstart": Command(
        "--steps 1",
        {
            "--steps": Option("how long it trains", "--steps 2", "", SETTINGS),
            "--keep": Option("keeps schedule, program, log and picture", "--keep kept"),
        },
        wall=True,
    ),
    "examples": Command("examples", {"--json": _JSON}),
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
            "--jobs": _PROCESSES,
            "-v": Option("says which passes were inserted", "-v"),
            "--json": _JSON,
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
            "--jobs": _PROCESSES,
            "-v": Option("says which passes were inserted", "-v"),
            "--machine": Option("sizes, times and capacity", "--machine slow.toml"),
        },
    ),
    "diff": Command("x.rtir other.rtir", {"--json": _JSON}),
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
            "--jobs": _PROCESSES,
            "--json": _JSON,
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
            "--json": _JSON,
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
            "--json": _JSON,
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
            "--clusters": Option(
                "the ranks, where the file does not say", "--clusters 8", "--from deepspeed ds.json --seq-len 8"
            ),
            "--pp": Option("the stages, where a ds_config does not say", "--pp 2", idle=_NO_CALLER),
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
            "--json": _JSON,
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
    "explain": Command(
        "x.rtir --no-levers",
        {
            "--time": Option("time in place of bytes", "--time", "x.rtir"),
            "--cold": Option(
                "the first step in place of a steady one", "--cold", "x.rtir --time", idle=("x.rtir --no-levers",)
            ),
            "--stage": Option("the stage that is told of", "--stage 1"),
            "--levers": Option("whether changes are tried", "--levers", idle=("x.rtir --time",)),
            "--seconds": Option(
                "how long",
                "--seconds 0",
                "x.rtir",
                "ratrain.ratrainc.report.byte_report:pricing_of",
                ("x.rtir --time", "x.rtir --no-levers"),
            ),
            "--jobs": _PROCESSES,
            "--machine": Option("times", "--machine slow.toml"),
            "--json": _JSON,
        },
    ),
    "simulate": Command(
        "x.rtx",
        {
            "--machine": Option("times", "--machine slow.toml", idle=("x.rtx --times 1,1,1,0",)),
            "--rendezvous": Option(
                "sends wait for their receives",
                "--rendezvous",
                None,
                "ratrain.api:simulate",
                ("x.rtx --one-core", "x.rtx --cores 2"),
            ),
            "--sharing": Option(
                "what overlaps shares DDR and link",
                "--no-sharing",
                "x.rtx --json",
                idle=("x.rtx --one-core", "x.rtx --cores 2", "x.rtx --times 1,1,1,0"),
            ),
            "--times": Option(
                "what ops take, in place of a machine's times; adds the bubble",
                "--times 1,1,1,0",
                idle=("x.rtx --one-core", "x.rtx --cores 2"),
            ),
            "--one-core": Option(
                "one engine at a time, of all ranks",
                "--one-core",
                idle=("x.rtx --cores 2", "x.rtx --trace t.json", "x.rtx --times 1,1,1,0"),
            ),
            "--cores": Option(
                "cores that all ranks share", "--cores 2", idle=("x.rtx --trace t.json", "x.rtx --times 1,1,1,0")
            ),
            "--trace": Option("a timeline", "--trace t.json"),
            "--json": _JSON,
        },
    ),
    "report": Command(
        "x.rtx -o r.html",
        {
            "-o": Option("the page", "-o other.html", "x.rtx"),
            "--against": Option("both on one page", "--against other.rtir", idle=("x.rtx -o r.svg",)),
            "--machine": Option("times", "--machine slow.toml"),
            "--rendezvous": Option("sends wait for their receives", "--rendezvous"),
            "--sharing": Option(
                "what overlaps shares DDR and link", "--no-sharing", idle=("x.rtx -o r.svg --times 1,1,1,0",)
            ),
            "--times": Option(
                "of a picture, what ops take in place of a machine's times",
                "--times 1,1,1,0",
                "x.rtx -o r.svg",
                idle=("x.rtx -o r.html",),
            ),
            "--json": _JSON,
        },
    ),
    "plan": Command(
        f"{_SEARCH} --quick",
        {
            "--model": Option(
                "what is planned for", "--model m2.json", "--clusters 2 --global-batch 4 --seq-len 8 --quick"
            ),
            "--clusters": Option(
                "ranks there are", "--clusters 4", "--model m.json --global-batch 4 --seq-len 8 --quick"
            ),
            "--global-batch": Option(
                "sequences of a step",
                "--global-batch 8",
                "--model m.json --clusters 2 --seq-len 8 --quick",
                idle=("--model m.json --clusters 2 --seq-len 8 --smallest",),
            ),
            "--seq-len": Option(
                "tokens of a sequence", "--seq-len 16", "--model m.json --clusters 2 --global-batch 4 --quick"
            ),
            "--strategy": Option("the passes that plans are judged by", "--strategy zb-h1"),
            "--zero": Option("levels to choose from", "--zero 0", idle=(f"{_SEARCH} --quick --strategy zero3",)),
            "--tp": Option("numbers of tensor-parallel ranks to choose from", "--tp 2"),
            "--cp": Option("numbers of context ranks to choose from", "--cp 2"),
            "--dtype": Option("the type of views and gradients", "--dtype bf16", f"{_SEARCH} --quick -o best.toml"),
            "--like": Option("types, chunks and the optimizer", "--like p2.toml", f"{_SEARCH} --quick -o best.toml"),
            "--schedules": Option("schedules to choose from", "--schedules zb-h1"),
            "--objective": Option(
                "what is best",
                "--objective clusters",
                idle=("--model m.json --clusters 2 --smallest", f"{_SEARCH} --pareto clusters"),
            ),
            "--keep": Option(
                "how many plans",
                "--keep 2",
                f"{_SEARCH} --quick -o best.toml",
                idle=(
                    "--model m.json --clusters 2 --smallest",
                    f"{_SEARCH} --pareto clusters",
                    f"{_SEARCH} --what-if link=1GB/s",
                ),
            ),
            "--explain-rejected": Option(
                "what makes each rejected plan slower",
                "--explain-rejected",
                idle=("--model m.json --clusters 2 --smallest", f"{_SEARCH} --pareto clusters"),
            ),
            "--pareto": Option(
                "a front in place of a plan",
                "--pareto clusters",
                idle=(
                    "--model m.json --clusters 2 --smallest",
                    f"{_SEARCH} --exhaustive",
                    f"{_SEARCH} --what-if link=1GB/s",
                ),
            ),
            "--plot": Option(
                "draws the front",
                "--plot front.svg",
                f"{_SEARCH} --quick --pareto clusters",
                idle=(f"{_SEARCH} --quick",),
            ),
            "--attention": Option(
                "whether attention holds its scores, in all plans",
                "--attention scores-kept",
                f"{_SEARCH} --quick -o best.toml",
            ),
            "--attention-mask": Option(
                "whether attention stays inside documents, in all plans",
                "--attention-mask document",
                f"{_SEARCH} --quick -o best.toml",
            ),
            "--logits": Option(
                "whether the head holds all its logits, in all plans",
                "--logits whole",
                f"{_SEARCH} --quick -o best.toml",
            ),
            "--quick": Option(
                "closed forms in place of a search", "--quick", f"{_SEARCH} --jobs 1", idle=(f"{_SEARCH} --exhaustive",)
            ),
            "--smallest": Option(
                "the fewest clusters in place of the fastest plan",
                "--smallest",
                "--model m.json --clusters 2 --seq-len 8",
            ),
            "--exhaustive": Option(
                "searches until nothing is left to gain", "--exhaustive", _SEARCH, REQUEST, (f"{_SEARCH} --quick",)
            ),
            "--seconds": Option(
                "time for the search",
                "--seconds 3",
                _SEARCH,
                REQUEST,
                (f"{_SEARCH} --quick", f"{_SEARCH} --exhaustive", "--model m.json --clusters 2 --smallest"),
            ),
            "--jobs": Option(
                _JOBS, "--jobs 3", _SEARCH, REQUEST, (f"{_SEARCH} --quick", "--model m.json --clusters 2 --smallest")
            ),
            "--tokens": Option(
                "the time of a whole training", "--tokens 1e9", idle=("--model m.json --clusters 2 --smallest",)
            ),
            "--robust": Option(
                "how plans bear disturbance",
                "--robust",
                _SEARCH,
                REQUEST,
                (f"{_SEARCH} --quick", "--model m.json --clusters 2 --smallest"),
            ),
            "--robust-links": Option(
                "says what other links do to the plan",
                "--robust-links",
                idle=(f"{_SEARCH} --quick", "--model m.json --clusters 2 --smallest"),
            ),
            "--what-if": Option(
                "plans again for another machine",
                "--what-if link=1GB/s",
                idle=("--model m.json --clusters 2 --smallest",),
            ),
            "-o": Option("the plan that is written", "-o best.toml"),
            "--machine": Option("times and capacity", "--machine slow.toml"),
            "--capacity": Option("bytes of DDR, in place of the machine's", "--capacity 4MiB"),
            "--json": _JSON,
        },
        wall=True,
    ),
    "scale": Command(
        "--model m.json --clusters 2 --plan p.toml --sequences-per-cluster 4",
        {
            "--model": Option("what is run", "--model m2.json", "--clusters 2 --plan p.toml"),
            "--clusters": Option("the points", "--clusters 2,4", "--model m.json --plan p.toml"),
            "--sequences-per-cluster": Option(
                "sequences of a step", "--sequences-per-cluster 8", "--model m.json --clusters 2 --plan p.toml"
            ),
            "--seq-len": Option(
                "tokens of a sequence, where there is no plan that says it",
                "--seq-len 16",
                "--model m.json --clusters 2",
                REQUEST,
                ("--model m.json --clusters 2 --plan p.toml",),
            ),
            "--plan": Option(
                "keeps its stages in place of planning anew",
                "--plan p2.toml",
                "--model m.json --clusters 2 --plan p.toml",
            ),
            "--strategy": Option(
                "the pipeline, by name", "--strategy baseline-1f1b", "--model m.json --clusters 2 --plan p.toml --json"
            ),
            "--zero": Option(
                "levels to choose from",
                "--zero 3",
                "--model m.json --clusters 2",
                REQUEST,
                ("--model m.json --clusters 2 --plan p.toml", "--model m.json --clusters 2 --strategy zero3"),
            ),
            "--tp": Option(
                "numbers of tensor-parallel ranks to choose from",
                "--tp 2",
                "--model m.json --clusters 2",
                REQUEST,
                ("--model m.json --clusters 2 --plan p.toml",),
            ),
            "--cp": Option(
                "numbers of context ranks to choose from",
                "--cp 2",
                "--model m.json --clusters 2",
                REQUEST,
                ("--model m.json --clusters 2 --plan p.toml",),
            ),
            "--dtype": Option(
                "the type of views and gradients",
                "--dtype f32",
                "--model m.json --clusters 2",
                REQUEST,
                ("--model m.json --clusters 2 --plan p.toml",),
            ),
            "--like": Option(
                "types, chunks and the optimizer",
                "--like p2.toml",
                "--model m.json --clusters 2",
                REQUEST,
                ("--model m.json --clusters 2 --plan p.toml",),
            ),
            "--exhaustive": Option(
                "searches until nothing is left to gain",
                "--exhaustive",
                "--model m.json --clusters 2",
                REQUEST,
                ("--model m.json --clusters 2 --plan p.toml",),
            ),
            "--seconds": Option(
                "time for each search",
                "--seconds 3",
                "--model m.json --clusters 2",
                REQUEST,
                ("--model m.json --clusters 2 --plan p.toml", "--model m.json --clusters 2 --exhaustive"),
            ),
            "--jobs": Option(
                _JOBS,
                "--jobs 3",
                "--model m.json --clusters 2",
                REQUEST,
                ("--model m.json --clusters 2 --plan p.toml",),
            ),
            "--plot": Option("a picture", "--plot c.gif"),
            "--machine": Option("times and capacity", "--machine slow.toml"),
            "--capacity": Option("bytes of DDR, in place of the machine's", "--capacity 100KB"),
            "--json": _JSON,
        },
    ),
    "calibrate": Command(
        "--profile prof.json",
        {
            "--rows": Option("what is fitted to", "--rows missing.csv", "--fit launch"),
            "--fit": Option(
                "the constants", "--fit nosuch", "--rows rows.csv", idle=("--profile prof.json", "--device cpu")
            ),
            "--profile": Option("op times of this machine in place of rows", "--profile prof.json", ""),
            "--device": Option("what is timed, in place of rows", "--device cuda:3", "--device cpu", _TIMED),
            "--model": Option("whose kernels are timed", "--model m.json", _TIMED_PLAN, _TIMED, _NO_DEVICE),
            "--plan": Option("and under which plan", "--plan p2.toml", _TIMED_PLAN, _TIMED, _NO_DEVICE),
            "--kernels": Option("the kernels", "--kernels torch", "--device cpu", _TIMED, _NO_DEVICE),
            "--dtype": Option("the types of small programs", "--dtype f32", "--device cpu", _TIMED, _NO_DEVICE),
            "--seconds": Option("how long kernels are timed", "--seconds 1", "--device cpu", _TIMED, _NO_DEVICE),
            "--links": Option("the machine whose links it has", "--links mt3000", "--device cpu", _TIMED, _NO_DEVICE),
            "--name": Option(
                "the name of the machine",
                "--name mine",
                None,
                "ratrain.ratrainc.calibration.from_profile:machine_from_profiles",
                (_ROWS,),
            ),
            "-o": Option("the machine file that is written", "-o missing/b.toml"),
            "--hold-out": Option("rows that are only predicted", "--hold-out 2", _ROWS, _FIT, _NO_ROWS),
            "--strategy": Option("how the rows ran", "--strategy baseline-1f1b", _ROWS, _FIT, _NO_ROWS),
            "--machine": Option("where the fit starts", "--machine slow.toml", _ROWS, _FIT, _NO_ROWS),
            "--json": _JSON,
        },
        wall=True,
    ),
    "validate": Command(
        "v.csv --jobs 1",
        {
            "--machine": Option("the machine of all rows, in place of theirs", "--machine slow.toml"),
            "--markdown": Option("a page in place of tables", "--markdown", idle=("v.csv --json",)),
            "-o": Option(
                "the page that is written, in place of stdout",
                "-o b.md",
                "v.csv --markdown --jobs 1",
                idle=("v.csv", "v.csv --json"),
            ),
            "--whole": Option("every micro-batch of long steps, which are folded otherwise", "--whole"),
            "--results": Option("the file that has each row's result as it is found", "--results rows.jsonl"),
            "--jobs": Option(
                "processes that compile and simulate",
                "--jobs 3",
                "v.csv",
                "ratrain.ratrainc.validation.outcome:validate",
            ),
            "--json": _JSON,
        },
    ),
    "compare": Command(
        "--model m.json --plan p.toml --strategies zero3,ratrain",
        {
            "--model": Option("what is run", "--model m2.json", "--plan p.toml --strategies zero3,ratrain"),
            "--plan": Option(
                "the plan, or the best for each", "--plan p2.toml", "--model m.json --strategies zero3,ratrain"
            ),
            "--clusters": Option(
                "ranks there are", "--clusters 2", f"{_QUICK} --global-batch 4", idle=("--model m.json --plan p.toml",)
            ),
            "--global-batch": Option(
                "sequences of a step",
                "--global-batch 4",
                f"{_QUICK} --clusters 2",
                idle=("--model m.json --plan p.toml",),
            ),
            "--seq-len": Option(
                "tokens of a sequence", "--seq-len 16", _AUTO, REQUEST, ("--model m.json --plan p.toml",)
            ),
            "--seconds": Option(
                "time for each search", "--seconds 3", _AUTO, REQUEST, ("--model m.json --plan p.toml",)
            ),
            "--jobs": Option(_JOBS, "--jobs 3", _AUTO, REQUEST, ("--model m.json --plan p.toml",)),
            "--strategies": Option(
                "the rows, the first is the yardstick", "--strategies ratrain,full-save", "--model m.json --plan p.toml"
            ),
            "--machine": Option("times and capacity", "--machine slow.toml"),
            "--capacity": Option("bytes of DDR, in place of the machine's", "--capacity 10KB"),
            "--json": _JSON,
        },
    ),
    "generate": Command(
        "ckpt --prompt words --tokens 6",
        {
            "--prompt": Option("what the text begins with", "--prompt letters"),
            "--prompt-tokens": Option("the same as numbers", "--prompt-tokens 1,2", "ckpt --tokens 6 --eos none"),
            "--chat": Option("what a user says, in place of a prompt", "--chat words", "ckpt --chat-template chatml"),
            "--chat-template": Option(
                "the template of a chat",
                "--chat-template chatml",
                "ckpt --chat words --tokens 6",
                idle=("ckpt --prompt words",),
            ),
            "--init": Option("the weights that adapters belong to", "--init w", "tuned --prompt words --tokens 6"),
            "--tokens": Option("how long it gets", "--tokens 9"),
            "--temperature": Option("draws tokens", "--temperature 5"),
            "--top-p": Option(
                "of the likeliest only",
                "--top-p 0.01",
                "ckpt --prompt words --temperature 5",
                idle=("ckpt --prompt words",),
            ),
            "--seed": Option(
                "which draws", "--seed 4", "ckpt --prompt words --temperature 5", idle=("ckpt --prompt words",)
            ),
            "--tokenizer": Option("the tokens of the text", "--tokenizer missing.json"),
            "--eos": Option("the token that ends a text", "--eos 999"),
            "--dtype": Option("the type of weights and activations", "--dtype f32", None, _GENERATION),
            "--kernels": Option("the kernels, to the last bits", "--kernels reference", None, _GENERATION),
            "--threads": Option("threads of a kernel", "--threads 3", None, _GENERATION),
            "--json": _JSON,
        },
    ),
    "run": Command(
        "x.rtx --data book.txt --steps 2 --threads 1 --log l.jsonl",
        {
            "--data": Option("what it trains on", "--data other.txt"),
            "--text-key": Option(
                "the field of a JSONL line that is its text",
                "--text-key body",
                "x.rtx --steps 2 --log l.jsonl --data d.jsonl",
                idle=("x.rtx --data pairs.jsonl --train-on completion",),
            ),
            "--train-on": Option(
                "which tokens are in the loss",
                "--train-on completion",
                "x.rtx --steps 2 --log l.jsonl --data pairs.jsonl",
            ),
            "--prompt-key": Option("the field that is a prompt", "--prompt-key text", _PAIRS, idle=("x.rtx",)),
            "--completion-key": Option(
                "the field that is its completion", "--completion-key text", _PAIRS, idle=("x.rtx",)
            ),
            "--chat-key": Option(
                "the field that is a chat",
                "--chat-key talk",
                _CHATS,
                idle=("x.rtx --data pairs.jsonl --train-on completion",),
            ),
            "--chat-template": Option(
                "the template that makes a text of it", "--chat-template t.jinja", _CHATS, idle=("x.rtx",)
            ),
            "--pack": Option(
                "documents whole in sequences, or cut",
                "--pack whole",
                "x.rtx --steps 2 --log l.jsonl --data pairs.jsonl --text-key prompt",
                idle=("x.rtx --order documents",),
            ),
            "--eos": Option("the token at the end of documents", "--eos 7"),
            "--data-dtype": Option(
                "the type of a token file's elements",
                "--data-dtype uint32",
                "x.rtx --steps 2 --log l.jsonl --data t.bin",
            ),
            "--tokenizer": Option("the tokens of a text", "--tokenizer missing.json"),
            "--steps": Option("how long it trains", "--steps 3", "x.rtx --log l.jsonl"),
            "--lr": Option("the learning rate, in place of the plan's, as in the next ones", "--lr 0.01"),
            "--betas": Option("the memory of Adam's moments", "--betas 0.5 0.6"),
            "--eps": Option("the least divisor of an update", "--eps 0.01"),
            "--weight-decay": Option("how fast weights shrink", "--weight-decay 0.9"),
            "--warmup-steps": Option("steps until the learning rate is reached", "--warmup-steps 9"),
            "--total-steps": Option("when it has come down to `--min-lr`", "--total-steps 2"),
            "--min-lr": Option(
                "the learning rate from then on", "--min-lr 1e-4", "x.rtx --steps 3 --log l.jsonl --total-steps 2"
            ),
            "--decay": Option(
                "the curve along which it comes down", "--decay linear", "x.rtx --steps 3 --log l.jsonl --total-steps 3"
            ),
            "--decay-steps": Option(
                "the last steps, in which it does", "--decay-steps 1", "x.rtx --steps 3 --log l.jsonl --total-steps 3"
            ),
            "--max-norm": Option(
                "the largest norm; refused where the plan does not clip",
                "--max-norm 0.01",
                "clip.rtx --steps 2 --log l.jsonl",
            ),
            "--engine": Option(
                "all ranks in a process, or each in its own", "--engine mpi", "x.rtx --steps 2 --rank-order dp-first"
            ),
            "--rank-order": Option("which rank a process is, of many", "--rank-order dp-first", idle=("x.rtx",)),
            "--reduction": Option("the order of sums over processes", "--reduction fast", idle=("x.rtx",)),
            "--device": Option(
                "what executes it, and whose memory the arenas are in",
                "--device cuda",
                None,
                SETTINGS,
                ("x.rtx --engine mpi", "x.rtx --threads 2", "x.rtx --poison"),
            ),
            "--graph": Option(
                "a step of a device is recorded once, and repeated",
                "--graph",
                "x.rtx --steps 2 --device cuda",
                SETTINGS,
                (
                    "x.rtx",
                    "x.rtx --kernels torch-device",
                    "x.rtx --engine mpi",
                    "x.rtx --device cuda --interleave 3",
                    "x.rtx --device cuda --profile p.json",
                    "x.rtx --device cuda --check-memory",
                    "x.rtx --device cuda --threads 2",
                ),
            ),
            "--kernels": Option(
                "the kernels, to the last bits; auto chooses them", "--kernels reference", None, SETTINGS
            ),
            "--interleave": Option(
                "another legal order, with the same losses",
                "--interleave 3",
                None,
                SETTINGS,
                ("x.rtx --threads 2", "x.rtx --engine mpi"),
            ),
            "--threads": Option("engines side by side, and threads of a kernel", "--threads 2", "x.rtx", SETTINGS),
            "--check-memory": Option(
                "stops at an access outside of the plan's lives", "--check-memory", None, SETTINGS
            ),
            "--poison": Option("fills freed bytes with NaNs", "--poison", None, SETTINGS),
            "--init": Option("the weights it starts from", "--init w"),
            "--init-adapter": Option(
                "the adapters it starts from",
                "--init-adapter adapters",
                "lora.rtx --steps 1 --threads 1 --log l.jsonl --data book.txt --init w",
                idle=("x.rtx",),
            ),
            "--save": Option("a checkpoint", "--save saved"),
            "--save-every": Option(
                "a series of them", "--save-every 1", "x.rtx --steps 2 --log l.jsonl --save saved", idle=("x.rtx",)
            ),
            "--save-best": Option(
                "the state of the lowest held-out loss",
                "--save-best best",
                "x.rtx --steps 2 --eval-every 1",
                idle=("x.rtx", "x.rtx --save best --eval-every 1", "x.rtx --eval-every 1 --engine mpi"),
            ),
            "--keep-last": Option(
                "how many of these stay",
                "--keep-last 1",
                "x.rtx --steps 3 --save saved --save-every 1",
                idle=("x.rtx", "x.rtx --save saved"),
            ),
            "--resume": Option(
                "goes on from a checkpoint",
                "--resume ckpt",
                "x.rtx --steps 2 --threads 1 --log l.jsonl --data book.txt",
            ),
            "--new-data": Option(
                "goes on with other data than so far",
                "--new-data",
                "x.rtx --steps 2 --threads 1 --log l.jsonl --data other.txt --resume ckpt",
                idle=("x.rtx",),
            ),
            "--scratch": Option(
                "where the files are in which tensors are stored",
                "--scratch w",
                "filed.rtx --steps 1 --threads 1",
                idle=("x.rtx",),
            ),
            "--ram": Option("the most that a process may hold in memory", "--ram 20GiB", None, SETTINGS),
            "--run-dir": Option("where ranks say where they are", "--run-dir where"),
            "--hang-timeout": Option("how long no progress is borne", "--hang-timeout 3", None, SETTINGS),
            "--log": Option("a line a step", "--log m.jsonl"),
            "--log-to": Option(
                "the figures of the log in TensorBoard or Weights & Biases too",
                "--log-to wandb:tiny",
                reaches=_TRACKERS,
            ),
            "--eval-every": Option("evaluates held-out data", "--eval-every 1"),
            "--eval-data": Option(
                "which",
                "--eval-data other.txt",
                "x.rtx --data book.txt --steps 2 --log l.jsonl --eval-every 1",
                idle=("x.rtx",),
            ),
            "--eval-fraction": Option(
                "or what part of the data",
                "--eval-fraction 0.3",
                "x.rtx --data book.txt --steps 2 --log l.jsonl --eval-every 1",
                idle=("x.rtx", "x.rtx --eval-every 1 --eval-data other.txt"),
            ),
            "--eval-batches": Option(
                "how much of it",
                "--eval-batches 1",
                "x.rtx --data book.txt --eval-fraction 0.5 --steps 2 --log l.jsonl --eval-every 1",
                idle=("x.rtx",),
            ),
            "--patience": Option(
                "ends a run whose held-out loss does not fall",
                "--patience 1",
                "x.rtx --data book.txt --steps 6 --log l.jsonl --eval-every 1 --lr 0.9",
                idle=("x.rtx",),
            ),
            "--live": Option("a dashboard, on a terminal", "--live", None, SETTINGS),
            "--profile": Option("the wall time of every op", "--profile prof.json"),
            "--plot": Option("a picture of the losses", "--plot loss.svg"),
            "--seed": Option(
                "initial weights and the order of the data", "--seed 5", idle=("x.rtx --init w --order sequential",)
            ),
            "--order": Option("the order of the data", "--order sequential"),
            "--machine": Option(
                "what a .rtir is emitted for",
                "--machine slow.toml",
                "x.rtir --steps 1",
                "ratrain.ratrainc.compiling.proving:sound_program",
            ),
            "--json": _JSON,
        },
        wall=True,
    ),
    "watch": Command(
        "log.jsonl",
        {
            "-o": Option("the page", "-o other.html"),
            "--once": Option("the page is written once, also while a run goes on", "--once", None, _WATCH),
            "--every": Option(
                "how often it is written while a run goes on", "--every 9", None, _WATCH, ("log.jsonl --once",)
            ),
            "--json": _JSON,
        },
    ),
    "finetune": Command(
        "--model w --data chats.jsonl -o ft --chat-template chatml --seq-len 64 --steps 2",
        {
            "--model": Option("the model", "--model missing", "--data chats.jsonl -o ft --chat-template chatml"),
            "--data": Option("what it is trained on", "--data d.jsonl"),
            "-o": Option("the folder", "-o other", "--model w --data d.jsonl --seq-len 64 --steps 2"),
            "--lora": Option("the rank of adapters", "--lora 3", idle=(f"{_TUNE} --full",)),
            "--full": Option("the whole model trains", "--full", idle=(f"{_TUNE} --full --merge",)),
            "--alpha": Option("the scale of adapters", "--alpha 3", idle=(f"{_TUNE} --full",)),
            "--targets": Option("which layers get one", "--targets q_proj", idle=(f"{_TUNE} --full",)),
            "--base": Option("how frozen matrices are stored", "--base int8-block", idle=(f"{_TUNE} --full",)),
            "--dtype": Option("the type of weights and activations", "--dtype f16"),
            "--ram": Option("the memory that the plan is made for", "--ram 1MiB"),
            "--device": Option("what trains", "--device cuda:7"),
            "--seq-len": Option("tokens of a sequence", "--seq-len 32", _TUNE),
            "--batch": Option("sequences a step", "--batch 2"),
            "--epochs": Option("passes over the data", "--epochs 1", _TUNE, idle=(f"{_TUNE} --steps 1",)),
            "--steps": Option("steps, in their place", "--steps 3", _TUNE),
            "--lr": Option("the learning rate", "--lr 0.01"),
            "--schedule": Option("how it comes down", "--schedule linear"),
            "--decay-steps": Option(
                "in how many last steps", "--decay-steps 1", idle=(f"{_TUNE} --schedule constant",)
            ),
            "--warmup-steps": Option("steps until it is reached", "--warmup-steps 2"),
            "--eval-data": Option("held-out data", "--eval-data pairs.jsonl"),
            "--eval-fraction": Option(
                "or the part of the data",
                "--eval-fraction 0.4",
                "--model w --data d.jsonl -o ft --seq-len 64 --steps 2",
                idle=(f"{_TUNE} --eval-data pairs.jsonl",),
            ),
            "--eval-every": Option("how often it is evaluated", "--eval-every 1"),
            "--patience": Option(
                "ends a run whose held-out loss does not fall",
                "--patience 1",
                f"{_TUNE} --seq-len 64 --steps 9 --eval-every 1 --lr 3 --full",
            ),
            "--text-key": Option(
                "the field that is a text", "--text-key body", "--model w --data d.jsonl -o ft --seq-len 64 --steps 2"
            ),
            "--prompt-key": Option("the field that is a prompt", "--prompt-key text", _TUNE_PAIRS),
            "--completion-key": Option("the field that is its completion", "--completion-key text", _TUNE_PAIRS),
            "--chat-key": Option("the field that is a chat", "--chat-key talk"),
            "--chat-template": Option(
                "the template that makes a text of it",
                "--chat-template t.jinja",
                "--model w --data chats.jsonl -o ft --seq-len 64 --steps 2",
            ),
            "--tokenizer": Option("the tokens of a text", "--tokenizer missing.json"),
            "--seed": Option("new adapters and the order of the data", "--seed 5"),
            "--merge": Option("a model, in place of adapters", "--merge"),
            "--resume": Option("goes on with the folder's run", "--resume"),
            "--log-to": Option(
                "the figures of the log in TensorBoard or Weights & Biases too",
                "--log-to wandb:tiny",
                reaches=_TRACKERS,
            ),
            "--json": _JSON,
        },
        wall=True,
    ),
    "launch": Command(
        "-n 4 --mpirun ./mpirun x.rtx",
        {
            "-n": Option(
                "processes, which are as many as the program has ranks without it", "-n 4", "--mpirun ./mpirun x.rtx"
            ),
            "--mpirun": Option(
                "the launcher", "--mpirun ./missing", "-n 4 x.rtx", "ratrain.ratrainc.running.supervisor:mpi_command"
            ),
            "--engine": Option(
                "mpirun and MPI, or torchrun and torch.distributed",
                "--engine torch",
                "-n 4 x.rtx",
                "ratrain.ratrainc.running.launching:start_command",
            ),
        },
    ),
    "postmortem": Command("where", {"--json": _JSON}),
    "export-weights": Command(
        "ckpt -o out",
        {
            "-o": Option("the directory", "-o other", "ckpt"),
            "--max-shard-size": Option("how many files the weights are", "--max-shard-size 4KiB"),
            "--dtype": Option("the type of the weights", "--dtype bf16"),
            "--init": Option("the weights that adapters are merged into", "--init w", "tuned -o out"),
            "--adapter": Option("the adapters, and no model", "--adapter", "tuned -o out"),
            "--json": _JSON,
        },
    ),
    "model": Command(
        "m.json",
        {"--seq-len": Option("arithmetic of a token, and what layers keep", "--seq-len 8"), "--json": _JSON},
    ),
    "disasm": Command(
        "x.rtx",
        {
            "--stage": Option("one stage alone", "--stage 1", idle=("x.rtx --routines", "tiles.rtx --tiles")),
            "--engine": Option("one engine alone", "--engine send", idle=("x.rtx --routines", "tiles.rtx --tiles")),
            "--routines": Option("the routines in place of the streams", "--routines", idle=("tiles.rtx --tiles",)),
            "--tiles": Option("the tile schedules in place of the streams", "--tiles", "tiles.rtx"),
            "--core": Option(
                "the core that is followed", "--core 23", "tiles.rtx --tiles", idle=("x.rtx", "x.rtx --routines")
            ),
            "--limit": Option(
                "events of each schedule", "--limit 1", "tiles.rtx --tiles", idle=("x.rtx", "x.rtx --routines")
            ),
        },
    ),
    "doctor": Command(
        "",
        {
            "--model": Option("says what a run of it needs", "--model m.json", "--plan p.toml", idle=("",)),
            "--plan": Option("says what a run under it needs", "--plan p.toml", "--model m.json", idle=("", "x.rtx")),
            "--machine": Option(
                "what the program is emitted for", "--machine slow.toml", "x.rtir", "ratrain.api:load", ("",)
            ),
            "--json": _JSON,
        },
        wall=True,
    ),
    "precompile": Command(
        "",
        {
            "--dtype": Option(
                "the types that loops are compiled for",
                "--dtype f32",
                None,
                "ratrain.ratrainc.running.precompiling:precompile",
            ),
            "--json": _JSON,
        },
        wall=True,
    ),
    "alloc": Command(
        "b.csv --capacity 1000",
        {
            "--capacity": Option("the bytes there are", "--capacity 10", "b.csv"),
            "-o": Option("the addresses that are written", "-o b2.csv"),
            "--seconds": Option(
                "time for the search", "--seconds 1", None, "ratrain.ratrainc.memory.buffer_placing:allocate"
            ),
            "--json": _JSON,
        },
        wall=True,
    ),
    "machines": Command("cpu", {"--json": _JSON}),
    "strategies": Command("", {"--json": _JSON}),
    "passes": Command("", {"--json": _JSON}),
    "completion": Command("bash"),
}


def text() -> str:
    """The options as a part of the page."""
    parts = []
    for name, command in OPTIONS.items():
        if command.options:
            rows = "\n".join(_row(flag, option) for flag, option in command.options.items())
            parts.append(f"## ratrainc {name}\n\n| option | changes | refused beside |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(flag: str, option: Option) -> str:
    idle = ", ".join(f"`{words or 'nothing'}`" for words in option.idle)
    return f"| `{flag}` | {option.changes} | {idle} |"
