"""Compiled inner loop of `ratrain.ratrain_ir.text.text_numbers`: reads the lines of a stage into numbers.

    %y.m1 = forward mlp.0 m1 (%w, %x.m1)        the shape of both lines:  $ = forward mlp.0 # ($, $)
    %y.m2 = forward mlp.0 m2 (%w, %x.m2)

The *shape* of a line is its text with a mark in place of each name of a tensor, its micro-batch and its offset: lines
of one shape mean the same for other operands. Shapes, names and kinds of ops get consecutive numbers in the order in
which they first occur. They are found again by a hash table with open addressing, and compared byte by byte, so that a
collision of hashes cannot confuse two of them. The loop takes a constant number of passes over each byte.

The loop checks only what it needs to split lines; `text_numbers` has one line of each shape parsed, and compares.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from ratrain.ratrain_ir.support.loops import part
from ratrain.ratrain_ir.support.native_loops import native

NONE = -1
NAME, MICRO_BATCH, OFFSET = 1, 2, 3
"""Marks in a shape: control characters, which no usual line contains."""
READ, MORE_ROOM, UNUSUAL, IN_NAME = range(4)
"""Outcomes of the loop: all lines are read, an array was too small, a line is not in the usual layout.

They are also the classes of bytes: `UNUSUAL` for a byte that no usual line contains, `IN_NAME` for one that may stand
in a name, `READ` for any other.
"""
(
    LINES, SHAPES, SHAPE_BYTES, TENSORS, GROUPS, SLOTS, FORMS, OPS, KINDS, KIND_NUMBERS, OPERANDS, ENDED,
) = range(COUNTS := 12)  # fmt: skip
"""Indices of the counts that the loop keeps in `StageArrays.counts`."""
(
    MICRO_BATCH_NUMBER, OFFSET_NUMBER, NAMES, WRITES_STOP, UPDATES_BEGIN, UPDATES_STOP, READS_BEGIN, READS_STOP,
    NAMED_BEFORE, DECLARES, IN_READS, HASH, SHAPE_STOP,
) = range(LINE_NUMBERS := 13)  # fmt: skip
"""Indices into `StageArrays.line`, the facts about the current line.

They are its micro-batch and offset, its number of names, and the ranges of names that it writes, updates and reads.
Names from `NAMED_BEFORE` on are scratch.
"""
_OF_SHAPES, _OF_TENSORS, _OF_GROUPS, _OF_SLOTS, _OF_KINDS = range(TABLE_COLUMNS := 5)
"""Columns of the hash table, one for each sort of numbered things."""
_TAB, _NEWLINE, _BLANK, _PERCENT, _OPEN, _CLOSE, _STAR, _PLUS, _DOT, _ZERO, _NINE, _COLON, _EQUALS = b"\t\n %()*+.09:="
_UPPER_A, _UPPER_F, _UPPER_Z, _UNDERLINE, _A, _F, _M, _X, _Z = b"AFZ_afmxz"
_SAVED, _RELEASE = tuple(b"saved "), tuple(b"release")


class Shapes(NamedTuple):
    """Shapes of lines, by number."""

    text: Any
    """bytes of all shapes, one after the other"""
    starts: Any
    stops: Any
    lines: Any
    """start and end of the first line of each in the text"""
    sections: Any
    """six numbers each: tensors written, updated, read, scratch; 1 if it has a micro-batch; 1 if an offset"""


class Declared(NamedTuple):
    """Tensors in the order of their declarations; `starts` and `stops` bound the name in the text."""

    shapes: Any
    starts: Any
    """start of its name in the text"""
    stops: Any
    forms: Any
    offsets: Any
    next_in_group: Any
    """the next tensor whose name differs only in its last part; `NONE` at the end"""


class Groups(NamedTuple):
    """Groups of tensors whose names differ only in their last part; `%name.*` means all of one."""

    firsts: Any
    lasts: Any
    starts: Any
    stops: Any


class TensorForms(NamedTuple):
    """Forms of tensors: all that a rule about a single op can depend on.

    The form is the shape of the declaration and, for a saved tensor, its slot (the last part of the name).
    """

    shapes: Any
    slots: Any
    slot_starts: Any
    slot_stops: Any


class ParsedOps(NamedTuple):
    """Ops in list order; columns as in `StageColumns`."""

    kinds: Any
    micro_batches: Any
    bounds: Any
    operands: Any
    ended_bounds: Any
    ended: Any


class Kinds(NamedTuple):
    """Kinds of ops.

    Ops are of one kind if they have one shape, the same numbers of tensors read, updated, written and scratch, and the
    same forms of these. All releases of one shape are of one kind.
    """

    numbers: Any
    """the numbers that define each kind, one kind after the other"""
    starts: Any
    stops: Any
    ops: Any
    """the first op of each"""
    is_release: Any


class StageArrays(NamedTuple):
    """Arrays that the loop fills."""

    counts: Any
    shapes: Shapes
    tensors: Declared
    groups: Groups
    forms: TensorForms
    ops: ParsedOps
    kinds: Kinds
    names: Any
    """three numbers for each name of the current line: start, stop, hash"""
    table: Any
    """hash table: a number or `NONE` in each row, one column for each sort; the rows are a power of two"""
    line: Any
    """facts about the current line"""


@cache
def compiled_sweep() -> Any:
    """Compile the loop."""
    return native(sweep)


def sweep(text: Any, begin: int, stop: int, classes: Any, made: StageArrays) -> int:
    """Read the lines of `text` from `begin` to `stop` (exclusive) into `made`; return an outcome.

    `classes` is the class of each byte. All declarations must stand before the ops.
    """
    position = begin
    while position < stop:
        first = position
        while position < stop and text[position] != _NEWLINE:
            position += 1
        made.counts[LINES] += 1
        start = first
        while start < position and (text[start] == _BLANK or text[start] == _TAB):
            start += 1
        if start < position:
            outcome = _read_line(text, first, start, position, classes, made)
            if outcome != READ:
                return outcome
        position += 1
    return READ


@part
def _read_line(text: Any, first: int, start: int, stop: int, classes: Any, made: Any) -> int:
    """Read the line [first, stop); `start` is its first byte that is no blank."""
    outcome = _read_shape(text, start, stop, classes, made)
    if outcome != READ:
        return outcome
    counts, shapes, line = made.counts, made.shapes, made.line
    if counts[SHAPES] == len(shapes.lines):
        return MORE_ROOM
    known = counts[SHAPES]
    # The shape is written behind the known ones already. If it is known, its bytes are simply overwritten by the next
    # line.
    shape = _intern(
        _OF_SHAPES, line[HASH], shapes.text, counts[SHAPE_BYTES], line[SHAPE_STOP], shapes.starts, shapes.stops, known,
        made.table,
    )  # fmt: skip
    if shape == known:
        shapes.lines[shape, 0], shapes.lines[shape, 1] = first, stop
        sections = shapes.sections[shape]
        sections[0], sections[1] = line[WRITES_STOP], line[UPDATES_STOP] - line[UPDATES_BEGIN]
        sections[2], sections[3] = line[READS_STOP] - line[READS_BEGIN], line[NAMES] - line[NAMED_BEFORE]
        sections[4], sections[5] = line[MICRO_BATCH_NUMBER] != NONE, line[OFFSET_NUMBER] != NONE
        counts[SHAPES] += 1
        counts[SHAPE_BYTES] = line[SHAPE_STOP]
    if line[DECLARES]:
        return _declare(text, shape, made)
    return _add_op(text, shape, made)


@part
def _read_shape(text: Any, start: int, stop: int, classes: Any, made: Any) -> int:
    """Write the shape of a line behind the known ones; note its names, its numbers and its sections in `made.line`."""
    line, written, at = made.line, made.shapes.text, made.counts[SHAPE_BYTES]
    if at + stop - start > len(written):
        return MORE_ROOM
    line[:] = 0
    line[MICRO_BATCH_NUMBER] = line[OFFSET_NUMBER] = NONE
    hashed, begin, position = 7, at, start
    while position < stop:
        character = mark = text[position]
        behind_blank = position == start or text[position - 1] == _BLANK
        if character == _PERCENT:
            if 3 * line[NAMES] + 2 >= len(made.names):
                return MORE_ROOM
            position = _read_name(text, position + 1, stop, classes, made.names, line)
            mark = NAME
        elif classes[character] == UNUSUAL:
            return UNUSUAL
        elif character == _M and behind_blank and position > start and text[position - 2] != _EQUALS:
            # `m` and digits after the keyword, which is the first word or follows `= `; a keyword may look like that.
            position, mark = _read_micro_batch(text, position, stop, line)
        elif character == _ZERO and behind_blank:
            position, mark = _read_offset(text, position, stop, line)
        else:
            _note_sign(text, position, line)
            position += 1
        written[at] = mark
        at += 1
        hashed = _mixed(hashed, mark)
    line[HASH], line[SHAPE_STOP] = hashed, at
    # An open bracket at the end of a line is not in the printer's layout.
    return UNUSUAL if line[IN_READS] or at == begin else READ


@part
def _read_name(text: Any, position: int, stop: int, classes: Any, names: Any, line: Any) -> int:
    """Note a name; return its end. The hash of `name.*` is that of the part before the dot."""
    number = 3 * line[NAMES]
    names[number] = position
    whole = group = 7
    dot = NONE
    while position < stop and classes[text[position]] == IN_NAME:
        if text[position] == _DOT:
            dot = position
            group = whole
        whole = _mixed(whole, text[position])
        position += 1
    names[number + 1] = position
    # `name.*` is looked up by the hash of `name`, which groups are numbered by.
    is_group = dot != NONE and dot == position - 2 and text[position - 1] == _STAR
    names[number + 2] = group if is_group else whole
    line[NAMES] += 1
    return position


@part
def _read_micro_batch(text: Any, position: int, stop: int, line: Any) -> Any:
    """Note the micro-batch if a whole word is `m` and digits; return the next position and the mark for the shape."""
    place, number = position + 1, 0
    # Nine digits at most, as in the grammar's reader; a second micro-batch in a line stays part of the shape.
    while place < stop and _ZERO <= text[place] <= _NINE and place - position < 10:
        number = 10 * number + text[place] - _ZERO
        place += 1
    if line[MICRO_BATCH_NUMBER] == NONE and place > position + 1 and (place == stop or text[place] == _BLANK):
        line[MICRO_BATCH_NUMBER] = number
        return place, MICRO_BATCH
    return position + 1, _M


@part
def _read_offset(text: Any, position: int, stop: int, line: Any) -> Any:
    """Note the offset if the rest of the line is `0x` and digits; return the next position and the mark."""
    place, number = position + 2, 0
    if position + 1 < stop and text[position + 1] == _X:
        # At most 13 digits, so that the number fits 64 bits. A longer offset stays in the shape; the parser finds it.
        while place < stop and place - position < 15:
            digit = text[place]
            if _ZERO <= digit <= _NINE:
                value = digit - _ZERO
            elif _A <= digit <= _F:
                value = digit - _A + 10
            elif _UPPER_A <= digit <= _UPPER_F:
                value = digit - _UPPER_A + 10
            else:
                break
            number = 16 * number + value
            place += 1
        if line[OFFSET_NUMBER] == NONE and place > position + 2 and place == stop:
            line[OFFSET_NUMBER] = number
            return place, OFFSET
    return position + 1, _ZERO


@part
def _note_sign(text: Any, position: int, line: Any) -> None:
    """Note the section that a sign opens or closes for the names before and after it."""
    character = text[position]
    if character == _COLON:
        line[DECLARES] = 1
    elif character == _EQUALS:
        # `writes = updates += keyword`: names before `=` are written, names between `=` and `+=` are updated.
        if text[position - 1] == _PLUS:
            line[UPDATES_BEGIN], line[UPDATES_STOP] = line[WRITES_STOP], line[NAMES]
        else:
            line[WRITES_STOP] = line[NAMES]
        line[NAMED_BEFORE] = line[NAMES]
    elif character == _OPEN:
        line[READS_BEGIN] = line[NAMES]
        line[IN_READS] = 1
    elif character == _CLOSE:
        line[READS_STOP] = line[NAMES]
        line[IN_READS] = 0
        line[NAMED_BEFORE] = line[NAMES]


@part
def _declare(text: Any, shape: int, made: Any) -> int:
    """Number the tensor of a declaration, and its form; link it into the group of its name."""
    counts, tensors, groups, line = made.counts, made.tensors, made.groups, made.line
    number = counts[TENSORS]
    if line[NAMES] != 1 or counts[OPS] or line[MICRO_BATCH_NUMBER] != NONE or number == len(tensors.starts):
        return UNUSUAL
    first, stop = made.names[0], made.names[1]
    # A name consists of letters, digits, '_' and '-' between single dots, and begins with a letter or '_'.
    letter = text[first]
    if first == stop or not (_A <= letter <= _Z or _UPPER_A <= letter <= _UPPER_Z or letter == _UNDERLINE):
        return UNUSUAL
    dot = NONE
    whole = group_hash = slot_hash = 7
    for place in range(first, stop):
        character = text[place]
        if character == _STAR or (character == _DOT and (place == stop - 1 or text[place + 1] == _DOT)):
            return UNUSUAL
        if character == _DOT:
            dot, group_hash, slot_hash = place, whole, 7
        else:
            slot_hash = _mixed(slot_hash, character)
        whole = _mixed(whole, character)
    if _intern(_OF_TENSORS, whole, text, first, stop, tensors.starts, tensors.stops, number, made.table) != number:
        return UNUSUAL  # declared twice
    tensors.next_in_group[number] = NONE
    # Groups are linked lists in the order of declaration, in which `%name.*` lists its tensors.
    if dot != NONE:
        known = counts[GROUPS]
        group = _intern(_OF_GROUPS, group_hash, text, first, dot, groups.starts, groups.stops, known, made.table)
        if group == known:
            counts[GROUPS] += 1
            groups.firsts[group] = number
        else:
            tensors.next_in_group[groups.lasts[group]] = number
        groups.lasts[group] = number
    form = _form(text, shape, first if dot == NONE else dot + 1, stop, slot_hash, made)
    if form == NONE:
        return UNUSUAL
    tensors.shapes[number], tensors.forms[number], tensors.offsets[number] = shape, form, line[OFFSET_NUMBER]
    counts[TENSORS] += 1
    return READ


@part
def _form(text: Any, shape: int, slot_start: int, stop: int, slot_hash: int, made: Any) -> Any:
    """Return the number of a tensor's form; `NONE` if the array is full."""
    counts, shapes, forms = made.counts, made.shapes, made.forms
    slot = NONE
    if _begins_with(shapes.text, shapes.starts[shape], shapes.stops[shape], _SAVED):
        known = counts[SLOTS]
        slot = _intern(
            _OF_SLOTS, slot_hash, text, slot_start, stop, forms.slot_starts, forms.slot_stops, known, made.table
        )
        counts[SLOTS] += slot == known
    # A linear search: a stage has a few dozen forms.
    for form in range(counts[FORMS]):
        if forms.shapes[form] == shape and forms.slots[form] == slot:
            return form
    form = counts[FORMS]
    if form == len(forms.shapes):
        return NONE
    forms.shapes[form], forms.slots[form] = shape, slot
    counts[FORMS] += 1
    return form


@part
def _add_op(text: Any, shape: int, made: Any) -> int:
    """Append an op with its operands, and number its kind."""
    counts, shapes, ops, kinds, line = made.counts, made.shapes, made.ops, made.kinds, made.line
    op = counts[OPS]
    if line[OFFSET_NUMBER] != NONE or op == len(ops.kinds):
        return UNUSUAL
    start, stop = shapes.starts[shape], shapes.stops[shape]
    word_stop = start + len(_RELEASE)
    is_release = _begins_with(shapes.text, start, stop, _RELEASE) and (
        word_stop == stop or shapes.text[word_stop] == _BLANK
    )
    if is_release and (line[NAMED_BEFORE] != line[NAMES] or line[WRITES_STOP] or line[UPDATES_STOP]):
        return UNUSUAL
    begin = counts[KIND_NUMBERS]
    if begin + 5 > len(kinds.numbers):
        return MORE_ROOM
    kinds.numbers[begin] = shape
    counts[KIND_NUMBERS] += 5
    # The order of operands in `StageColumns`: reads, updates, writes, scratch.
    sections = (
        (line[READS_BEGIN], line[READS_STOP]),
        (line[UPDATES_BEGIN], line[UPDATES_STOP]),
        (0, line[WRITES_STOP]),
        (line[NAMED_BEFORE], line[NAMES]),
    )
    for section in range(4):
        before = counts[OPERANDS]
        for name in range(sections[section][0], sections[section][1]):
            outcome = _add_operands(text, name, is_release, made)
            if outcome != READ:
                return outcome
        ops.bounds[4 * op + section] = counts[OPERANDS]
        kinds.numbers[begin + 1 + section] = counts[OPERANDS] - before
    ops.ended_bounds[op] = counts[ENDED]
    if counts[KINDS] == len(kinds.ops):
        return MORE_ROOM
    ops.kinds[op], ops.micro_batches[op] = _kind(op, begin, is_release, made), line[MICRO_BATCH_NUMBER]
    counts[OPS] += 1
    return READ


@part
def _kind(op: int, begin: int, is_release: bool, made: Any) -> Any:
    """Return the number of an op's kind.

    The defining numbers stand behind those of all known kinds, from `begin`; they stay there only if the kind is new.
    """
    counts, kinds = made.counts, made.kinds
    hashed = 7
    for place in range(begin, counts[KIND_NUMBERS]):
        hashed = _mixed(hashed, kinds.numbers[place])
    known, stop = counts[KINDS], counts[KIND_NUMBERS]
    kind = _intern(_OF_KINDS, hashed, kinds.numbers, begin, stop, kinds.starts, kinds.stops, known, made.table)
    if kind == known:
        kinds.ops[kind], kinds.is_release[kind] = op, is_release
        counts[KINDS] += 1
    else:
        counts[KIND_NUMBERS] = begin
    return kind


@part
def _add_operands(text: Any, name: int, is_release: bool, made: Any) -> int:
    """Add the tensor that a name means, or all tensors of `name.*`, to the op's operands.

    For a release they are added to the ended tensors instead, and its kind does not depend on them.
    """
    counts, tensors, groups, ops, kinds = made.counts, made.tensors, made.groups, made.ops, made.kinds
    start, stop, hashed = made.names[3 * name], made.names[3 * name + 1], made.names[3 * name + 2]
    is_group = stop - start > 2 and text[stop - 1] == _STAR and text[stop - 2] == _DOT
    if is_group:
        group, _ = _find(_OF_GROUPS, hashed, text, start, stop - 2, groups.starts, groups.stops, made.table)
        tensor = NONE if group == NONE else groups.firsts[group]
    else:
        tensor, _ = _find(_OF_TENSORS, hashed, text, start, stop, tensors.starts, tensors.stops, made.table)
    if tensor == NONE:
        return UNUSUAL
    while tensor != NONE:
        used, ends, place = counts[OPERANDS], counts[ENDED], counts[KIND_NUMBERS]
        if used == len(ops.operands) or ends == len(ops.ended) or place == len(kinds.numbers):
            return MORE_ROOM
        if is_release:
            ops.ended[ends] = tensor
            counts[ENDED] += 1
        else:
            ops.operands[used] = tensor
            kinds.numbers[place] = tensors.forms[tensor]
            counts[OPERANDS] += 1
            counts[KIND_NUMBERS] += 1
        tensor = tensors.next_in_group[tensor] if is_group else NONE
    return READ


@part
def _begins_with(text: Any, start: int, stop: int, word: Any) -> bool:
    """Tell whether the bytes [start, stop) begin with a word."""
    if stop - start < len(word):
        return False
    for index in range(len(word)):  # noqa: SIM110 - numba compiles no generators
        if text[start + index] != word[index]:
            return False
    return True


@part
def _mixed(hashed: int, value: int) -> int:
    """Mix a number into a hash (FNV-1a's step), kept to 44 bits so that it is never negative."""
    return ((hashed ^ value) * 16777619) & 0xFFFFFFFFFFF


@part
def _find(
    column: int, hashed: int, source: Any, start: int, stop: int, starts: Any, stops: Any, table: Any
) -> Any:  # fmt: skip
    """Find the number of `source[start:stop]` among numbered things; return it and its row of the table.

    If it is unknown, return `NONE` and the free row where it belongs.
    """
    row = hashed & (len(table) - 1)
    # Ends: the table has more rows than entries (`text_numbers._arrays`), so a free row comes.
    while table[row, column] != NONE:
        number = table[row, column]
        if stops[number] - starts[number] == stop - start:
            same = True
            for index in range(stop - start):
                if source[starts[number] + index] != source[start + index]:
                    same = False
                    break
            if same:
                return number, row
        row = (row + 1) & (len(table) - 1)
    return NONE, row


@part
def _intern(
    column: int, hashed: int, source: Any, start: int, stop: int, starts: Any, stops: Any, count: int, table: Any
) -> Any:  # fmt: skip
    """Return the number of `source[start:stop]`; if it is unknown, number it `count` and record its bounds."""
    number, row = _find(column, hashed, source, start, stop, starts, stops, table)
    if number == NONE:
        number = table[row, column] = count
        starts[count], stops[count] = start, stop
    return number
