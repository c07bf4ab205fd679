"""Numba pipeline for functions that exist only inside others.

Numba compiles each function that a loop calls to optimised machine code of its own, though only the copy inside the
loop is ever run. That took a third of the time of attention's loops. `Inner` lowers a function to LLVM's language, and
leaves the rest to the loop that it is linked into.

A function with fast-math flags is optimised by itself first, as numba does it: where its sums are split over vector
lanes is then settled before it meets its caller, and so are its results.
"""

from __future__ import annotations

from typing import Any

from numba.core import codegen, compiler, compiler_machinery, typed_passes

_register: Any = compiler_machinery.register_pass


class _Library(codegen.JITCodeLibrary):
    """Code that is linked into other code."""

    is_optimised = False
    is_called = False
    """True if loops call its functions rather than inline them."""

    def add_ir_module(self, ir_module: Any) -> None:
        """Add lowered functions, and keep LLVM from inlining them if they are called."""
        for function in ir_module.functions if self.is_called else ():
            if function.blocks and "alwaysinline" not in function.attributes:
                function.attributes.add("noinline")
        super().add_ir_module(ir_module)  # type: ignore[no-untyped-call]

    def _optimize_final_module(self) -> None:
        if self.is_optimised:
            super()._optimize_final_module()  # type: ignore[no-untyped-call]

    def _finalize_final_module(self) -> None:
        """Leave out the making of machine code."""
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._finalized = True


@_register(mutates_CFG=True, analysis_only=False)
class _Lowering(typed_passes.NativeLowering):
    _name = "inner_lowering"

    def run_pass(self, state: Any) -> bool:
        """Lower the function, and let other functions find it without an address."""
        state.flags.no_compile = True
        state.library = _Library(state.targetctx.codegen(), state.func_id.func_qualname)  # type: ignore[no-untyped-call]
        state.library.is_optimised = bool(state.flags.fastmath)
        state.library.is_called = not state.flags.forceinline
        super().run_pass(state)  # type: ignore[no-untyped-call]
        lowered = state["cr"]
        # Numba finds a function by its entry for Python, which must be a built-in one; a call of this one raises.
        entry: Any = {}.pop
        state.targetctx.insert_user_function(entry, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=entry)
        return True


class Inner(compiler.CompilerBase):
    """Pipeline of functions that are called by loops alone: with `forceinline` inlined there, else one copy a loop."""

    def define_pipelines(self) -> list[Any]:
        """Return numba's own pipeline, with its last step replaced."""
        builder: Any = compiler.DefaultPassBuilder
        whole = builder.define_nopython_pipeline(self.state)
        native = typed_passes.NativeLowering
        whole.passes = [(_Lowering if each is native else each, text) for each, text in whole.passes]
        whole.finalize()
        return [whole]
