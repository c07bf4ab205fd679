"""Proofs that schedules and programs are sound, with a cache.

A proof counts again for the same bytes if the proof cache has it (`ratrain.ratrain_ir.support.proof_cache`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import field, frozen

from ratrain.ratrain_ir.module import Level, Module, TargetInfo
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, misuse
from ratrain.ratrain_ir.support.files import read_bytes
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.ratrain_ir.support.proof_cache import prove
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.compiling.opening import check_carried_by, machine_for, program_in, schedule_in
from ratrain.ratrainc.console.parts import Part, Shown
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.machine.record import compiled_for, machine_digest
from ratrain.targets.program.program import Program

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine


_BYTES = 2 << 20
"""Largest schedule text that is read and proved without compiled loops.

That takes half a second, less than compiling the loops if they are not cached.
"""
ALLOWANCE = Allowance(_BYTES)


@frozen(repr=False)
class Proof(Shown):
    """The statement that a schedule or a program is sound, with its size."""

    words: str
    target: TargetInfo | None = field(eq=False)
    """machine that it was sized for; None if it names none"""

    def parts(self) -> Iterator[Part]:
        """Yield a sentence."""
        yield f"sound ({self.words})"


def verify(what: Module | Program | str, *, machine: str | Machine | None = None) -> Proof:
    """Prove that a module, a program or the file of one is sound.

    A module is proved for the machine it was sized for, or for the one given. Raises `DiagnosticError` with all that is
    wrong.
    """
    is_program = what.endswith(".rtx") if isinstance(what, str) else isinstance(what, Program)
    if isinstance(what, str) and not is_program:
        proved = proved_schedule(what, machine=machine)
        return Proof(
            f"level {proved.level.value}, {number_of(proved.stages, 'stage')}, {number_of(proved.ops, 'op')}",
            proved.target,
        )
    if isinstance(what, Module):
        from ratrain.ratrainc.compiling.soundness import check

        check(what, machine=machine)
    else:
        if machine is not None:
            _refuse_another(program_in(read_bytes(what, "program"), what) if isinstance(what, str) else what)
        what = sound_program(what, machine=machine, anew=True)
        count = sum(stage.instructions for stage in what.stages)
        words = (
            f"{number_of(len(what.stages), 'stage')}, {number_of(count, 'instruction')}, "
            f"{number_of(len(what.routines), 'routine')}"
        )
        return Proof(words, what.info)
    ops = sum(len(stage.ops) for stage in what.stages)
    return Proof(
        f"level {what.level.value}, {number_of(len(what.stages), 'stage')}, {number_of(ops, 'op')}", what.target
    )


@frozen
class SoundSchedule:
    """A summary of a schedule that was proved sound."""

    level: Level
    stages: int
    ops: int
    target: TargetInfo | None


def proved_schedule(path: str, *, machine: str | Machine | None = None) -> SoundSchedule:
    """Prove the schedule in a `.rtir` now, for the machine it was sized for or for the given one.

    A large one is proved without making its ops. Raises `DiagnosticError` with all errors.
    """
    data = read_bytes(path, "schedule")
    # The fast proof works on numbers in columns, without objects of ops. It gives no errors: whatever it does not
    # accept is parsed and proved again by the rules on ops.
    proved = proved_by_numbers(data, path, machine)
    if proved is None:
        module = _sound_module(data, path, machine, anew=True)
        ops = sum(len(stage.ops) for stage in module.stages)
        return SoundSchedule(module.level, len(module.stages), ops, module.target)
    from ratrain.ratrainc.compiling.soundness import check_pipeline

    module, ops = proved
    # Only the pipeline is left to check. What is cached stands for the whole proof: kind and content are the same as in
    # `_sound_module`.
    prove(lambda: check_pipeline(module), "schedule", _machine_part(module, machine), data, anew=True)
    return SoundSchedule(module.level, len(module.stages), ops, module.target)


def sound_schedule(path: str, *, machine: str | Machine | None = None, anew: bool = False) -> Module:
    """Load the module of a `.rtir`, proved for the machine it was sized for or for the given one.

    With `anew`, a cached proof does not count. Raises `DiagnosticError` with all errors.
    """
    return _sound_module(read_bytes(path, "schedule"), path, machine, anew=anew)


def _sound_module(data: bytes, path: str, machine: str | Machine | None, *, anew: bool) -> Module:
    module = schedule_in(data, path)

    def proof() -> None:
        from ratrain.ratrainc.compiling.soundness import check

        check(module, machine=machine)

    # The key must have all that the proof depends on: the bytes, and the machine if they name one.
    prove(proof, "schedule", _machine_part(module, machine), data, anew=anew)
    return module


def _machine_part(module: Module, machine: str | Machine | None) -> bytes:
    """Return the part of a cached proof's key that stands for the machine."""
    return b"" if module.target is None else machine_digest(machine_for(module, machine)).encode()


def proved_by_numbers(data: bytes, path: str, machine: str | Machine | None) -> tuple[Module, int] | None:
    """Prove a large text by its columns; return its module with empty stages, and its number of ops.

    Return None if the text is small, unusual or wrong, so that the parser and the rules on ops must judge it.
    """
    # The columns need compiled loops. For small texts their compilation would take longer than the proof.
    if ALLOWANCE.take(len(data)):
        return None
    from lark.exceptions import UnexpectedInput

    from ratrain.ratrain_ir.text.quick_syntax import UnusualTextError
    from ratrain.ratrain_ir.text.text_numbers import numbered_text
    from ratrain.ratrain_ir.verifier import is_provable, prove_text
    from ratrain.ratrainc.compiling.soundness import on_machine

    try:
        with paused_gc():
            text = numbered_text(data, path)
            if not is_provable(text.module):
                return None
            check_carried_by(text.module, path)
            there, target = on_machine(text.module, machine)
            ops = prove_text(there, text, target)
    # An error found here has no place in the text: the parser and the rules on ops report it.
    except (UnusualTextError, UnexpectedInput, DiagnosticError):
        return None
    return None if ops is None else (text.module, ops)


def sound_program(given: Program | str, *, machine: str | Machine | None = None, anew: bool = False) -> Program:
    """Prove a program, given as an object, a `.rtx` or a `.rtir`, which is proved and emitted first for `machine`.

    With `anew`, a cached proof does not count. Raises `DiagnosticError` with all errors.
    """
    if isinstance(machine, str):
        machine = load_machine(machine)
    if not isinstance(given, str):
        _check_program(given, _in_place_of_its_own(given, machine))
        return given
    if given.endswith(".rtir"):
        from ratrain.ratrainc.compiling.building import emit

        return sound_program(emit(sound_schedule(given, machine=machine, anew=anew), machine=machine))
    data = read_bytes(given, "program")
    program = program_in(data, given)
    there = _in_place_of_its_own(program, machine)
    # The bytes name the program's own machine. Only a machine that stands in for it needs a place in the key.
    content = (data,) if there is None else (data, machine_digest(there).encode())
    prove(lambda: _check_program(program, there), "program", *content, anew=anew)
    return program


def _check_program(program: Program, machine: Machine | None) -> None:
    from ratrain.targets.verifier.program_verifier import check_program

    check_program(program, machine) if machine is not None else check_program(program)


def _knows_its_own(program: Program) -> bool:
    """Tell whether the machine that a program was compiled for is known here."""
    try:
        compiled_for(program.info)
    except DiagnosticError:
        return False
    return True


def _in_place_of_its_own(program: Program, machine: Machine | None) -> Machine | None:
    """Return the given machine if the program's own is not known here, else None.

    A program is proved for no other machine than its own.
    """
    return None if machine is None or _knows_its_own(program) else machine


def _refuse_another(program: Program) -> None:
    if _knows_its_own(program):
        misuse("a program holds what its machine's routines need: it is proved for no other machine, so leave it out")
