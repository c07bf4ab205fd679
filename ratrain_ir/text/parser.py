"""Parser of `.rtir` text into a `Module`: resolves names, reads types and fields, and collects every error of the file.

A text is read by the fast reader first (`quick_syntax`). If that fails for any reason, the grammar reads it again from
the start, and reports all errors with their places.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from attrs import define, evolve, field
from lark.exceptions import UnexpectedInput

from ratrain.ratrain_ir.config.model_fields import model_from_fields
from ratrain.ratrain_ir.config.plan_text import plan_from_fields
from ratrain.ratrain_ir.config.types import STORES, Dtype, Home, StateKind, TensorType, tensor_type
from ratrain.ratrain_ir.module import Level, Module, SourceText, Stage, TargetInfo
from ratrain.ratrain_ir.ops.base import Op
from ratrain.ratrain_ir.ops.kinds import OP_CLASSES, RENAMED, read_fields
from ratrain.ratrain_ir.ops.op_fields import FieldError
from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors
from ratrain.ratrain_ir.support.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Location,
    Note,
    fail,
    nearest,
)
from ratrain.ratrain_ir.text.quick_syntax import UnusualTextError, quick_records
from ratrain.ratrain_ir.text.syntax import (
    DeclarationRecord,
    HeaderRecord,
    ModuleRecord,
    OpRecord,
    ends_early,
    explain,
    parse_records,
)

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan

T = TypeVar("T")

FORMAT_VERSION = 2
_BEFORE_RENAMING = "1"
"""Version with the names of `RENAMED`; it is read too."""
_MAX_TENSOR_BYTES = 1 << 50
_MAX_DIGITS = 18
_MAX_SYNTAX_ERRORS = 20
_MORE = Note("the search for errors ends here: more may follow")
_REPARSED_LINES = 20_000
_REPARSED_CHARACTERS = 2 << 20
_MAX_HEAD = 1 << 19
"""Most characters before the first stage; the largest possible plan, with a cut for each stage, has fewer."""
_MAX_NESTING = 16
_NESTED = re.compile(rf"\[(?:[ \t\r]*\[){{{_MAX_NESTING}}}")
_STATE_KINDS = {kind.value: kind for kind in StateKind}
_STORES = {home.value: home for home in STORES}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_QUOTED = re.compile(r'"[^"]*"')
_MICRO_BATCH = re.compile(r"m[0-9]{1,9}")
_TYPE = re.compile(r"([a-z]+[0-9]+)\[([0-9, ]*)\]")

Groups = dict[str, Tensors]
Call = tuple[Callable[..., Op], dict[str, Any]]
"""The class of an op, and its fields by name."""


def parse_module(text: str, *, file: str = "<text>") -> Module:
    """Parse the text of a module; `file` is its name in diagnostics.

    Raises `DiagnosticError` with every error found in it.
    """
    source = SourceText(file, tuple(text.split("\n")))
    _check_extent(source)
    return quick_module(source) or grammar_module(source)


def _check_extent(source: SourceText) -> None:
    """Refuse, with RT001, a text whose head the grammar would read for minutes and that no schedule has.

    The grammar takes microseconds for each word, so the head (everything before the first stage) has at most
    `_MAX_HEAD` characters, and lists in it stand at most `_MAX_NESTING` deep in each other. Stages have no limits: the
    quick reader reads them.
    """
    size = 0
    for number, line in enumerate(source.lines, 1):
        if line.lstrip().startswith("stage "):
            return
        size += len(line) + 1
        if size > _MAX_HEAD:
            text = f"more than {_MAX_HEAD} characters stand before the first stage: this is no schedule"
            _fail_at(source, number, 1, text)
        if nested := _NESTED.search(line):
            _fail_at(source, number, nested.start() + 1, f"lists stand more than {_MAX_NESTING} deep in each other")


def _fail_at(source: SourceText, line: int, column: int, message: str) -> NoReturn:
    fail("RT001", message, Location(source.file, line, column), source=source.line(line))


def quick_module(source: SourceText) -> Module | None:
    """Parse a text in the layout of the printer, without the grammar's diagnostics.

    Return None if the layout is another one, or anything is wrong; `grammar_module` then reads it or explains.
    """
    try:
        return _Builder(quick_records(source.lines), source).build()
    except (UnusualTextError, UnexpectedInput, DiagnosticError):
        return None


def grammar_module(source: SourceText) -> Module:
    """Parse a text in any layout by the grammar alone.

    Raises `DiagnosticError` with every error found in it.
    """
    return _Builder(_records(source), source).build()


def _records(source: SourceText) -> ModuleRecord:
    """Parse a text into records; raise `DiagnosticError` with all syntax errors.

    After each error its line is blanked and the text parsed again, so that one run shows them all.
    """
    errors: list[Diagnostic] = []
    lines = list(source.lines)
    while True:
        try:
            record = parse_records("\n".join(lines))
        except UnexpectedInput as error:
            if ends_early(error) and (missing := _open_brackets(source.lines)):
                last = max((number for number, line in enumerate(source.lines, 1) if line.strip()), default=1)
                # a line that is cut short is the same fault
                errors = [each for each in errors if each.location is None or each.location.line < last]
                raise DiagnosticError([*errors, _cut_short(source, last, missing)]) from None
            problem = explain(error, source.file, source.lines)
            at = problem.location.line - 1 if problem.location else 0
            # The line is blank already: the error is a consequence of an earlier one (a missing bracket, say), so stop
            # here.
            repeated = not lines[at].strip() or not 0 < at < len(lines)
            if not repeated:
                errors.append(problem)
            elif not errors:
                raise DiagnosticError([problem]) from None
            if repeated or len(errors) >= _MAX_SYNTAX_ERRORS or _is_long(lines):
                if not repeated:
                    errors[-1] = evolve(errors[-1], notes=[*errors[-1].notes, _MORE])
                raise DiagnosticError(errors) from None
            lines[at] = ""
            continue
        if errors:
            raise DiagnosticError(errors)
        return record


def _open_brackets(lines: tuple[str, ...]) -> int:
    """Return the number of '{' that no '}' closes, without those in quotes and in the text of a machine."""
    written = "\n".join(_QUOTED.sub("", line) for line in lines if not line.lstrip().startswith("|"))
    return max(0, written.count("{") - written.count("}"))


def _cut_short(source: SourceText, last: int, missing: int) -> Diagnostic:
    """Return the error of a text whose last brackets are missing; `last` is the last line that is not blank."""
    line = source.line(last) or ""
    return Diagnostic(
        "RT001",
        f"the text ends early: {missing} '}}' {'is' if missing == 1 else 'are'} missing",
        Location(source.file, last, len(line.rstrip()) + 1),
        source=line,
        help="it may have been cut short: copy or write it again; or close what is open with '}'",
    )


def _is_long(lines: list[str]) -> bool:
    """Tell whether a text is so long that parsing it again for each error would take long."""
    return len(lines) > _REPARSED_LINES or sum(map(len, lines)) > _REPARSED_CHARACTERS


class Statements:
    """Reader of single statements, for a module whose head is read in advance and whose stages are not."""

    def __init__(self, source: SourceText) -> None:
        """Read the head. Raises `DiagnosticError`, or Lark's `UnexpectedInput`, if anything in it is wrong."""
        _check_extent(source)
        self._builder = _Builder(parse_records("\n".join(source.lines)), source)
        self.module = self._builder.build()

    def tensor(self, stage: Stage, record: DeclarationRecord) -> Tensor | None:
        """Return the tensor that a declaration adds to a stage without one of this name; None if it is wrong."""
        self._builder.declare(stage, record)
        return stage.tensors.get(record.name)

    def call(self, record: OpRecord) -> tuple[Call, int | None] | None:
        """Return (class, fields except the micro-batch) and the micro-batch of an op; None if it is wrong."""
        return self._builder.called(record)


@define
class _Builder:
    """Builder of a module from records; reports errors and goes on."""

    record: ModuleRecord
    source: SourceText
    diagnostics: Diagnostics = field(factory=Diagnostics)
    types: dict[str, TensorType | None] = field(factory=dict)
    calls: dict[tuple[str, ...], Call] = field(factory=dict)
    """Class and fields, without the micro-batch, by keyword and words, where `m0` stands for any micro-batch."""
    declared: dict[tuple[str, str, str | None], tuple[StateKind, TensorType, Home]] = field(factory=dict)
    """Results of correct declarations by (kind, type, home), the texts of a declaration."""

    def build(self) -> Module:
        """Build the module. Raises `DiagnosticError` with all errors of the records."""
        record = self.record
        known = (_BEFORE_RENAMING, str(FORMAT_VERSION))
        if record.version not in known:
            text = f"this is .rtir version {record.version}; this compiler reads versions {' and '.join(known)}"
            self.error("RT003", text, 1)
            self.diagnostics.check()
        level = self.level()
        headers = self.headers()
        model = self.described(model_from_fields, "model", headers)
        plan = None if model is None else self.described(plan_from_fields, "plan", headers, model=model)
        target = self.target(headers)
        pipeline = self.pipeline()
        stages = self.stages(plan)
        self.diagnostics.check()
        assert level is not None
        assert model is not None
        assert plan is not None
        return Module(record.name, level, model, plan, stages, target, pipeline, self.source)

    def error(self, code: str, message: str, line: int, word: str | None = None, **more: Any) -> None:
        location = self.source.locate(line, word)
        self.diagnostics.error(code, message, location, source=self.source.line(line), **more)

    def level(self) -> Level | None:
        names = [level.value for level in Level]
        if self.record.level in names:
            return Level(self.record.level)
        text = f"'{self.record.level}' is not a level; the levels are {', '.join(names)}"
        self.error("RT004", text, self.record.line, self.record.level)
        return None

    def headers(self) -> dict[str, HeaderRecord]:
        headers: dict[str, HeaderRecord] = {}
        for header in self.record.headers:
            if header.name in headers:
                self.error("RT006", f"'{header.name}' is given twice", header.line, header.name)
            elif header.name not in ("model", "plan", "target"):
                text = (
                    f"'{header.name}' is not a section; the sections are model, plan, target, machine, "
                    "pipeline and stage"
                )
                self.error("RT004", text, header.line, header.name)
            for key in header.duplicates:
                self.error("RT006", f"'{key}' is given twice in '{header.name}'", header.line, key)
            headers[header.name] = header
        return headers

    def described(
        self, read: Callable[..., T], name: str, headers: dict[str, HeaderRecord], **context: Any
    ) -> T | None:
        header = headers.get(name)
        if header is None:
            self.error("RT001", f"the module has no '{name} {{ ... }}'", self.record.line, "module")
            return None
        try:
            return read(header.values, **context)
        except DiagnosticError as problem:
            for item in problem.diagnostics:
                self.error(item.code, item.message, header.line, name, help=item.help)
            return None

    def target(self, headers: dict[str, HeaderRecord]) -> TargetInfo | None:
        header, machine = headers.get("target"), self.machine()
        if header is None:
            if machine:
                line = self.record.machines[0].line
                self.error("RT005", "a machine is given, but no 'target' that is for it", line, "machine")
            return None
        name, capacity, digest = (header.values.get(key) for key in ("name", "capacity", "digest"))
        stores = {home: header.values[word] for word, home in _STORES.items() if word in header.values}
        extra = set(header.values) - {"name", "capacity", "digest", *_STORES}
        extra |= {home.value for home, nbytes in stores.items() if type(nbytes) is not int or nbytes <= 0}
        known = digest is None or (isinstance(digest, str) and _DIGEST.fullmatch(digest))
        if not isinstance(name, str) or type(capacity) is not int or capacity <= 0 or not known or extra:
            text = (
                'a target is { name = "...", capacity = BYTES, host = BYTES, file = BYTES, digest = "64 '
                'hexadecimal digits" }'
            )
            self.error("RT005", text, header.line, "target")
            return None
        if machine and digest is None:
            self.error("RT005", "a machine is given, so 'target' must have its digest", header.line, "target")
        return TargetInfo(name, capacity, digest or "", machine, tuple(stores.items()), header.line)

    def pipeline(self) -> str:
        """Return the pass pipeline that made the module; empty if none is given."""
        for again in self.record.pipelines[1:]:
            self.error("RT006", "'pipeline' is given twice", again.line, "pipeline")
        for pipeline in self.record.pipelines:
            if not pipeline.text.isprintable():
                text = f"the pipeline has characters that cannot be shown: {pipeline.text[:60]!a}"
                self.error("RT005", text, pipeline.line, "pipeline")
        return self.record.pipelines[0].text if self.record.pipelines else ""

    def machine(self) -> str:
        """Return the text of the machine; empty if there is none."""
        for again in self.record.machines[1:]:
            self.error("RT006", "'machine' is given twice", again.line, "machine")
        for empty in self.record.machines:
            if not empty.lines:
                self.error("RT005", "the machine has no lines", empty.line, "machine")
        return "\n".join(self.record.machines[0].lines) if self.record.machines else ""

    def stages(self, plan: Plan | None) -> list[Stage]:
        stages: list[Stage] = []
        for record in self.record.stages:
            if record.index != str(len(stages)):
                text = f"expected stage @{len(stages)} here, got @{record.index}: stages are numbered from 0 in order"
                self.error("RT005", text, record.line, f"@{record.index}")
            stage = Stage(len(stages), line=record.line)
            statements = record.statements
            for declaration in statements:
                if isinstance(declaration, DeclarationRecord):
                    self.declare(stage, declaration)
            groups = {f"{prefix}.*": tensors for prefix, tensors in tensors_by_prefix(stage).items()}
            ops = (self.op(stage, groups, s) for s in statements if isinstance(s, OpRecord))
            stage.ops = [op for op in ops if op is not None]
            stages.append(stage)
        if plan is not None and len(stages) != plan.pp:
            line = self.record.line
            self.error("RT005", f"the plan has {plan.pp} stages, the module {len(stages)}", line, "module")
        return stages

    def renamed(self, word: str) -> str:
        """Return today's name of a keyword or a state kind of this version."""
        return RENAMED.get(word, word) if self.record.version == _BEFORE_RENAMING else word

    def declare(self, stage: Stage, record: DeclarationRecord) -> None:
        # Fast path: thousands of declarations share kind, type and home, which then need no second check.
        form = record.kind, record.type, record.home
        known, offset = self.declared.get(form), None if record.offset is None else int(record.offset, 16)
        if (
            known is not None
            and (offset is None or offset <= _MAX_TENSOR_BYTES)
            and record.name not in stage.tensors
            and not record.name.endswith(".*")
        ):
            kind, type_, home = known
            tensor = Tensor(record.name, kind, type_, record.carried, offset, record.line, home)
            stage.tensors[record.name] = tensor
            return
        self.declare_anew(stage, record)

    def declare_anew(self, stage: Stage, record: DeclarationRecord) -> None:
        kind = _STATE_KINDS.get(self.renamed(record.kind))
        if kind is None:
            text = f"'{record.kind}' is not a state kind; the kinds are {', '.join(_STATE_KINDS)}"
            self.error("RT004", text, record.line, record.kind, help=nearest(record.kind, _STATE_KINDS, RENAMED))
            return
        if record.name.endswith(".*"):
            self.error("RT005", "'.*' names several tensors; a declaration names one", record.line, "%" + record.name)
            return
        type_ = self.type(record)
        if type_ is None:
            return
        earlier = stage.tensors.get(record.name)
        if earlier is not None:
            note = Note(f"%{record.name} is first declared here", self.source.locate(earlier.line))
            text = f"%{record.name} is declared twice in stage @{stage.index}"
            self.error("RT006", text, record.line, "%" + record.name, notes=[note])
            return
        offset = None if record.offset is None else int(record.offset, 16)
        if offset is not None and offset > _MAX_TENSOR_BYTES:
            self.error("RT051", f"offset {record.offset} is beyond any arena", record.line, record.offset)
            return
        home = self.home(record)
        if home is not None:
            self.declared[record.kind, record.type, record.home] = kind, type_, home
            stage.add(Tensor(record.name, kind, type_, record.carried, offset, record.line, home))

    def home(self, record: DeclarationRecord) -> Home | None:
        """Return the memory that a declaration names; DDR if it names none, None if it is unknown."""
        if record.home is None:
            return Home.DDR
        if record.home in _STORES:
            return _STORES[record.home]
        text = f"'{record.home}' is not a memory; the memories other than DDR are {', '.join(_STORES)}"
        self.error("RT004", text, record.line, record.home, help=nearest(record.home, _STORES))
        return None

    def type(self, record: DeclarationRecord) -> TensorType | None:
        if record.type not in self.types:
            self.types[record.type] = self.read_type(record)
        return self.types[record.type]

    def read_type(self, record: DeclarationRecord) -> TensorType | None:
        match = _TYPE.fullmatch(record.type)
        dtypes = [dtype.value for dtype in Dtype]
        if match is None or match[1] not in dtypes:
            text = f"'{record.type}' is not a type; element types are {', '.join(dtypes)}"
            self.error("RT005", text, record.line, record.type)
            return None
        parts = [part.strip() for part in match[2].split(",")]
        if not all(part.isdigit() and len(part) <= _MAX_DIGITS and int(part) > 0 for part in parts):
            text = f"the shape of '{record.type}' must be positive numbers separated by ','"
            self.error("RT005", text, record.line, record.type)
            return None
        type_ = tensor_type(Dtype(match[1]), tuple(map(int, parts)))
        if type_.nbytes > _MAX_TENSOR_BYTES:
            text = f"'{record.type}' has more than {_MAX_TENSOR_BYTES} bytes: no machine holds that"
            self.error("RT005", text, record.line, record.type)
            return None
        return type_

    def op(self, stage: Stage, groups: Groups, record: OpRecord) -> Op | None:
        called = self.called(record)
        if called is None:
            return None
        line = record.line
        reads = self.resolve(stage, groups, record.reads, line) if record.reads else ()
        writes = self.resolve(stage, groups, record.writes, line) if record.writes else ()
        updates = self.resolve(stage, groups, record.updates, line) if record.updates else ()
        scratch = self.resolve(stage, groups, record.scratch, line) if record.scratch else ()
        if reads is None or writes is None or updates is None or scratch is None:
            return None
        (make, fields), micro_batch = called
        operands = {"reads": reads, "writes": writes, "updates": updates, "scratch": scratch, "line": line}
        if micro_batch is not None:
            operands["micro_batch"] = micro_batch
        return make(**operands, **fields)

    def called(self, record: OpRecord) -> tuple[Call, int | None] | None:
        """Return (class, fields except the micro-batch) and the micro-batch of an op; None if it is wrong.

        Ops that differ only in their micro-batch share one entry of `calls`.
        """
        words = record.words
        micro_batch = None
        for place, word in enumerate(words):
            if word[0] == "m" and _MICRO_BATCH.fullmatch(word):
                micro_batch = int(word[1:])
                words = [*words[:place], "m0", *words[place + 1 :]]
                break
        key = record.keyword, *words
        call = self.calls.get(key)
        if call is None:
            call = self.read_call(record)
            if call is None:
                return None
            if micro_batch is not None:
                del call[1]["micro_batch"]
            self.calls[key] = call
        return call, micro_batch

    def read_call(self, record: OpRecord) -> Call | None:
        cls = OP_CLASSES.get(self.renamed(record.keyword))
        if cls is None:
            text = f"'{record.keyword}' is not an op; the ops are {', '.join(OP_CLASSES)}"
            self.error("RT004", text, record.line, record.keyword, help=nearest(record.keyword, OP_CLASSES, RENAMED))
            return None
        try:
            return cls, read_fields(cls, record.words)
        except FieldError as problem:
            self.error("RT005", str(problem), record.line, record.keyword)
            return None

    def resolve(self, stage: Stage, groups: Groups, names: list[str], line: int) -> Tensors | None:
        tensors = stage.tensors
        try:
            return tuple([tensors[name] for name in names])
        except KeyError:
            pass
        found: list[Tensor] = []
        for name in names:
            tensor = tensors.get(name)
            if tensor is not None:
                found.append(tensor)
            elif name in groups:
                found += groups[name]
            else:
                self.report_missing(stage, groups, names, line)
                return None
        return tuple(found)

    def report_missing(self, stage: Stage, groups: Groups, names: list[str], line: int) -> None:
        for name in names:
            if name not in stage.tensors and name not in groups:
                close = get_close_matches(name, list(stage.tensors), n=1) if len(stage.tensors) < 5000 else []
                hint = f"did you mean %{close[0]}?" if close else None
                text = f"%{name} is not declared in stage @{stage.index}"
                self.error("RT004", text, line, "%" + name, help=hint)


def tensors_by_prefix(stage: Stage) -> Groups:
    """Return the tensors of a stage by the part of their names before the last dot."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in stage.tensors.values():
        groups.setdefault(tensor.name.rpartition(".")[0], []).append(tensor)
    return {prefix: tuple(tensors) for prefix, tensors in groups.items()}
