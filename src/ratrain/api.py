"""The Python API: what the command line does, for notebooks and scripts.

from ratrain import api module = api.compile("llama-2-7b", "plan.toml") program = api.emit(module)
print(api.simulate(program))

Functions return objects that show themselves: `print` says what the command says, a notebook draws it, `to_json()` is
what `--json` prints. What is wrong is a `DiagnosticError`, whose `diagnostics` have a code, a place, a reason and a way
out. Long work takes `progress=`, which is called with a `Progress`. docs/python.md has the function of each command.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError
from ratrain.ratrainc.functions import notebook as _notebook

if TYPE_CHECKING:
    from ratrain.ratrain_ir.process_pool import processes
    from ratrain.ratrainc.compiling.building import (
        compile,  # noqa: A004 - the name the documentation promises
        emit,
        load,
        lowered,
        make_for,
        resolved,
        run_passes,
        save,
    )
    from ratrain.ratrainc.compiling.opening import load_schedule, machine_for, machine_of
    from ratrain.ratrainc.compiling.proving import verify
    from ratrain.ratrainc.compiling.soundness import check
    from ratrain.ratrainc.console.progress import OnProgress, Progress
    from ratrain.ratrainc.functions.checking import (
        diff,
        disassemble,
        disassemble_routines,
        disassemble_tiles,
        export,
        lint,
        schedule,
    )
    from ratrain.ratrainc.functions.fitting import fit
    from ratrain.ratrainc.functions.listing import (
        copy_examples,
        example_path,
        examples,
        machine,
        machines,
        model_facts,
        passes,
        strategies,
    )
    from ratrain.ratrainc.functions.measuring import calibrate_device, calibrate_profile, calibrate_rows, validate
    from ratrain.ratrainc.functions.memory import address_map, alloc, explain
    from ratrain.ratrainc.functions.planning import (
        compare,
        compare_best,
        import_plan,
        pareto,
        plan,
        robust_links,
        scale,
        smallest,
        what_if,
    )
    from ratrain.ratrainc.functions.running import (
        doctor,
        export_weights,
        finetune,
        generate,
        launch,
        postmortem,
        precompile,
        run,
        watch,
    )
    from ratrain.ratrainc.functions.timing import (
        explain_time,
        report,
        report_against,
        simulate,
        simulate_given,
        simulate_on_cores,
    )
    from ratrain.ratrainc.memory.buffer_placing import RefusedPlacingError
    from ratrain.ratrainc.report.table_report import UnsoundTableError
    from ratrain.ratrainc.report.trace import write_trace

_ROOMS = {
    "ratrain.ratrain_ir.process_pool": "processes",
    "ratrain.ratrainc.compiling.building": "compile emit load lowered make_for resolved run_passes save",
    "ratrain.ratrainc.functions.checking": "diff disassemble disassemble_routines disassemble_tiles export lint "
    "schedule",
    "ratrain.ratrainc.functions.fitting": "fit",
    "ratrain.ratrainc.functions.listing": "copy_examples example_path examples machine machines model_facts "
    "passes strategies",
    "ratrain.ratrainc.functions.measuring": "calibrate_device calibrate_profile calibrate_rows validate",
    "ratrain.ratrainc.functions.memory": "address_map alloc explain",
    "ratrain.ratrainc.compiling.opening": "load_schedule machine_for machine_of",
    "ratrain.ratrainc.functions.planning": "compare compare_best import_plan pareto plan robust_links scale "
    "smallest what_if",
    "ratrain.ratrainc.compiling.proving": "verify",
    "ratrain.ratrainc.functions.running": "doctor export_weights finetune generate launch postmortem precompile run "
    "watch",
    "ratrain.ratrainc.compiling.soundness": "check",
    "ratrain.ratrainc.functions.timing": "explain_time report report_against simulate simulate_given simulate_on_cores",
    "ratrain.ratrainc.report.trace": "write_trace",
    "ratrain.ratrainc.memory.buffer_placing": "RefusedPlacingError",
    "ratrain.ratrainc.console.progress": "OnProgress Progress",
    "ratrain.ratrainc.report.table_report": "UnsoundTableError",
}
"""Names by module. A module is imported when one of its names is first used, so a command loads only what it needs."""
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names.split()}

__all__ = [
    "Diagnostic",
    "DiagnosticError",
    "OnProgress",
    "Progress",
    "RefusedPlacingError",
    "UnsoundTableError",
    "address_map",
    "alloc",
    "calibrate_device",
    "calibrate_profile",
    "calibrate_rows",
    "check",
    "compare",
    "compare_best",
    "compile",
    "copy_examples",
    "diff",
    "disassemble",
    "disassemble_routines",
    "disassemble_tiles",
    "doctor",
    "emit",
    "example_path",
    "examples",
    "explain",
    "explain_time",
    "export",
    "export_weights",
    "finetune",
    "fit",
    "generate",
    "import_plan",
    "launch",
    "lint",
    "load",
    "load_schedule",
    "lowered",
    "machine",
    "machine_for",
    "machine_of",
    "machines",
    "make_for",
    "model_facts",
    "pareto",
    "passes",
    "plan",
    "postmortem",
    "precompile",
    "processes",
    "report",
    "report_against",
    "resolved",
    "robust_links",
    "run",
    "run_passes",
    "save",
    "scale",
    "schedule",
    "simulate",
    "simulate_given",
    "simulate_on_cores",
    "smallest",
    "strategies",
    "validate",
    "verify",
    "watch",
    "what_if",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    """Import a function's module on first use; keep the function."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'", name=name, obj=None)
    value = globals()[name] = getattr(import_module(_ROOM_OF[name]), name)
    return value


def __dir__() -> list[str]:
    """List all names, imported or not."""
    return sorted({*globals(), *__all__})


_notebook.let_objects_show_themselves()
