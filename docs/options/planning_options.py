"""Options of the commands that time schedules, search for plans and compare them."""

from __future__ import annotations

from option import JSON, PROCESSES, Command, Option

_REQUEST = "ratrain.ratrainc.planner.search.plan_request:PlanRequest"
_SEARCH = "--model m.json --clusters 2 --global-batch 4 --seq-len 8"
_JOBS = "processes of the search"
_AUTO = "--model m.json --plan auto --clusters 2 --global-batch 4 --strategies zero3,ratrain"
_QUICK = "--model m.json --plan auto --strategies full-save --seq-len 8 --seconds 0 --jobs 1"
_FIT = "ratrain.ratrainc.calibration.calibration_report:calibrate_rows"
_ROWS = "--rows rows.csv --fit launch"
_TIMED = "ratrain.ratrainc.calibration.from_device:machine_of_device"
_TIMED_PLAN = "--device cpu --model m2.json --plan p.toml"
_NO_DEVICE = (_ROWS, "--profile prof.json")
_NO_ROWS = ("--profile prof.json", "--device cpu")

PLANNING = {
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
            "--jobs": PROCESSES,
            "--machine": Option("times", "--machine slow.toml"),
            "--json": JSON,
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
            "--routing": Option(
                "rows of each expert",
                "--routing one-hot",
                "experts.rtx",
                idle=("experts.rtx --one-core", "experts.rtx --cores 2", "experts.rtx --times 1,1,1,0"),
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
            "--json": JSON,
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
            "--json": JSON,
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
            "--ep": Option(
                "numbers of expert ranks to choose from",
                "--ep 2",
                "--model experts.json --clusters 2 --global-batch 4 --seq-len 8 --quick",
            ),
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
                "searches until nothing is left to gain", "--exhaustive", _SEARCH, _REQUEST, (f"{_SEARCH} --quick",)
            ),
            "--seconds": Option(
                "time for the search",
                "--seconds 3",
                _SEARCH,
                _REQUEST,
                (f"{_SEARCH} --quick", f"{_SEARCH} --exhaustive", "--model m.json --clusters 2 --smallest"),
            ),
            "--jobs": Option(
                _JOBS,
                "--jobs 3",
                _SEARCH,
                _REQUEST,
                (f"{_SEARCH} --pareto memory", "--model m.json --clusters 2 --smallest"),
            ),
            "--tokens": Option(
                "the time of a whole training", "--tokens 1e9", idle=("--model m.json --clusters 2 --smallest",)
            ),
            "--robust": Option(
                "how plans bear disturbance",
                "--robust",
                _SEARCH,
                _REQUEST,
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
            "--json": JSON,
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
                _REQUEST,
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
                _REQUEST,
                ("--model m.json --clusters 2 --plan p.toml", "--model m.json --clusters 2 --strategy zero3"),
            ),
            "--tp": Option(
                "numbers of tensor-parallel ranks to choose from",
                "--tp 2",
                "--model m.json --clusters 2",
                _REQUEST,
                ("--model m.json --clusters 2 --plan p.toml",),
            ),
            "--cp": Option(
                "numbers of context ranks to choose from",
                "--cp 2",
                "--model m.json --clusters 2",
                _REQUEST,
                ("--model m.json --clusters 2 --plan p.toml",),
            ),
            "--ep": Option(
                "numbers of expert ranks to choose from",
                "--ep 2",
                "--model experts.json --clusters 2",
                _REQUEST,
                ("--model m.json --clusters 2 --plan p.toml",),
            ),
            "--dtype": Option(
                "the type of views and gradients",
                "--dtype f32",
                "--model m.json --clusters 2",
                _REQUEST,
                ("--model m.json --clusters 2 --plan p.toml",),
            ),
            "--like": Option(
                "types, chunks and the optimizer",
                "--like p2.toml",
                "--model m.json --clusters 2",
                _REQUEST,
                ("--model m.json --clusters 2 --plan p.toml",),
            ),
            "--exhaustive": Option(
                "searches until nothing is left to gain",
                "--exhaustive",
                "--model m.json --clusters 2",
                _REQUEST,
                ("--model m.json --clusters 2 --plan p.toml",),
            ),
            "--seconds": Option(
                "time for each search",
                "--seconds 3",
                "--model m.json --clusters 2",
                _REQUEST,
                ("--model m.json --clusters 2 --plan p.toml", "--model m.json --clusters 2 --exhaustive"),
            ),
            "--jobs": Option(
                _JOBS,
                "--jobs 3",
                "--model m.json --clusters 2",
                _REQUEST,
                ("--model m.json --clusters 2 --plan p.toml",),
            ),
            "--plot": Option("a picture", "--plot c.gif"),
            "--machine": Option("times and capacity", "--machine slow.toml"),
            "--capacity": Option("bytes of DDR, in place of the machine's", "--capacity 100KB"),
            "--json": JSON,
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
            "--json": JSON,
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
            "--json": JSON,
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
                "tokens of a sequence", "--seq-len 16", _AUTO, _REQUEST, ("--model m.json --plan p.toml",)
            ),
            "--like": Option(
                "types, chunks, the optimizer and what trains",
                "--like p2.toml",
                f"{_QUICK} --clusters 2 --global-batch 4",
                idle=("--model m.json --plan p.toml",),
            ),
            "--seconds": Option(
                "time for each search", "--seconds 3", _AUTO, _REQUEST, ("--model m.json --plan p.toml",)
            ),
            "--jobs": Option(_JOBS, "--jobs 3", _AUTO, _REQUEST, ("--model m.json --plan p.toml",)),
            "--results": Option(
                "the file that has each strategy's result as it is found",
                "--results rows.jsonl",
                idle=("--model m.json --clusters 2 --global-batch 4",),
            ),
            "--strategies": Option(
                "the rows, the first is the yardstick", "--strategies ratrain,full-save", "--model m.json --plan p.toml"
            ),
            "--machine": Option("times and capacity", "--machine slow.toml"),
            "--capacity": Option("bytes of DDR, in place of the machine's", "--capacity 10KB"),
            "--json": JSON,
        },
    ),
}
