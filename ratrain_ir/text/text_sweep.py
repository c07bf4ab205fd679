"""The inner loop of `ratrain.ratrain_ir.text.text_numbers`, compiled: the lines of a stage as numbers.

What lines are made of, apart from their names of tensors, their micro-batch and their offset, is their *shape*: lines of one shape say the
same of others. Shapes, names, kinds of ops are numbered as they come, and compared byte by byte.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ratrain.ratrain_ir.support.native_loops import native

NONE = -1
NAME, MICRO_BATCH, OFFSET = 1, 2, 3
"""What stands in a shape where a name, a micro-batch, an offset was: bytes that no line has."""
READ, UNUSUAL, MORE_ROOM, IN_NAME = range(4)
"""Outcomes: all lines are read; there is something that only the grammar knows, or that is wrong; the arrays are too small.

`UNUSUAL` is also what a byte is that stands in no usual line, `IN_NAME` one that may stand in a name, `READ` any other.
"""
(
    LINES, SHAPES, SHAPE_BYTES, TENSORS, GROUPS, SLOTS, FORMS, OPS, KINDS, KIND_NUMBERS, OPERANDS, ENDED,
) = range(12)  # fmt: skip
"""Counts that the loop returns, by place."""


@cache
def compiled_sweep() -> Any:
    """The loop."""
    return native(sweep)


def sweep(
    text: Any, begin: int, stop: int, classes: Any,
    counts: Any, shape_bytes: Any, shape_starts: Any, shape_stops: Any, shape_lines: Any, shape_sections: Any,
    tensor_shapes: Any, tensor_starts: Any, tensor_ends: Any, tensor_forms: Any, tensor_offsets: Any,
    next_in_group: Any, group_firsts: Any, group_lasts: Any, group_starts: Any, group_ends: Any, slot_starts: Any, slot_ends: Any,
    form_shapes: Any, form_slots: Any,
    op_kinds: Any, micro_batches: Any, bounds: Any, operands: Any, ended_bounds: Any, ended: Any,
    kind_numbers: Any, kind_starts: Any, kind_stops: Any, kind_ops: Any, kind_is_release: Any, found: Any, table: Any,
) -> int:  # fmt: skip
    """Read the lines from `begin` to `stop`; an outcome. `table` is empty (-1), a power of two in size, of rows of 5 columns.

    Of a kind of ops the numbers are: shape, how many tensors it reads, updates, writes, works in, and the form of each. Releases are of one kind a shape,
    and what they end is apart, in `ended`. All declarations stand before the ops.
    """

    def intern(column: int, hashed: int, source: Any, start: int, end: int, starts: Any, ends: Any, count: int) -> Any:
        """The number of some of the source, `count` where it is new: its place is kept then."""
        at = hashed & (len(table) - 1)
        while table[at, column] != NONE:
            number = table[at, column]
            if ends[number] - starts[number] == end - start:
                same = True
                for index in range(end - start):
                    if source[starts[number] + index] != source[start + index]:
                        same = False
                        break
                if same:
                    return number
            at = (at + 1) & (len(table) - 1)
        table[at, column] = count
        starts[count] = start
        ends[count] = end
        return count

    def find(column: int, hashed: int, start: int, end: int, starts: Any, ends: Any) -> Any:
        """The number of a part of the text; `NONE` where it has none."""
        at = hashed & (len(table) - 1)
        while table[at, column] != NONE:
            number = table[at, column]
            if ends[number] - starts[number] == end - start:
                same = True
                for index in range(end - start):
                    if text[starts[number] + index] != text[start + index]:
                        same = False
                        break
                if same:
                    return number
            at = (at + 1) & (len(table) - 1)
        return NONE

    def mixed(hashed: int, value: int) -> int:
        return ((hashed ^ value) * 16777619) & 0xFFFFFFFFFFF

    lines = shapes = shape_stop = tensors = groups = slots = forms = ops = kinds = kind_stop = used = ends = 0
    position = begin
    while position < stop:
        line_stop = position
        while line_stop < stop and text[line_stop] != 10:
            line_stop += 1
        line = position
        while position < line_stop and (text[position] == 32 or text[position] == 9):
            position += 1
        lines += 1
        if position == line_stop:
            position = line_stop + 1
            continue
        if shape_stop + line_stop - position > len(shape_bytes):
            return MORE_ROOM
        # the shape, and what stands between
        shape_start = shape_stop
        hashed = 7
        micro_batch = offset = NONE
        is_declaration = in_reads = False
        names = names_read = reads_begin = reads_stop = updates_begin = updates_stop = writes_stop = 0
        start = position
        while position < line_stop:
            character = text[position]
            after_blank = position == start or text[position - 1] == 32
            mark = character
            if character == 37:  # %
                mark = NAME
                position += 1
                if 3 * names + 2 >= len(found):
                    return MORE_ROOM
                found[3 * names] = position
                name_hash = group_hash = 7
                dot = NONE
                while position < line_stop:
                    character = text[position]
                    if classes[character] != IN_NAME:
                        break
                    if character == 46:
                        dot = position
                        group_hash = name_hash
                    name_hash = mixed(name_hash, character)
                    position += 1
                found[3 * names + 1] = position
                is_group = dot != NONE and dot == position - 2 and text[position - 1] == 42
                found[3 * names + 2] = group_hash if is_group else name_hash
                names += 1
            elif classes[character] == UNUSUAL:
                return UNUSUAL
            elif (
                character == 109
                and after_blank
                and micro_batch == NONE
                and position > start
                and text[position - 2] != 61
            ):
                # a word that is m and digits, but for the first word of the op, behind which it may stand
                place = position + 1
                number = 0
                while place < line_stop and 48 <= text[place] <= 57 and place - position < 10:
                    number = 10 * number + text[place] - 48
                    place += 1
                if place > position + 1 and (place == line_stop or text[place] == 32):
                    mark, micro_batch, position = MICRO_BATCH, number, place
                else:
                    position += 1
            elif (
                character == 48
                and after_blank
                and offset == NONE
                and position + 1 < line_stop
                and text[position + 1] == 120
            ):
                place = position + 2
                number = 0
                digits = 0
                while place < line_stop and digits < 13:
                    digit = text[place]
                    if 48 <= digit <= 57:
                        digit -= 48
                    elif 97 <= digit <= 102:
                        digit -= 87
                    elif 65 <= digit <= 70:
                        digit -= 55
                    else:
                        break
                    number = 16 * number + digit
                    digits += 1
                    place += 1
                if digits and place == line_stop:
                    mark, offset, position = OFFSET, number, place
                else:
                    position += 1
            else:
                if character == 58:
                    is_declaration = True
                elif character == 61:
                    if text[position - 1] == 43:
                        updates_begin, updates_stop = max(writes_stop, 0), names
                    else:
                        writes_stop = names
                    names_read = names
                elif character == 40:
                    reads_begin = names
                    in_reads = True
                elif character == 41:
                    reads_stop = names
                    in_reads = False
                    names_read = names
                position += 1
            shape_bytes[shape_stop] = mark
            shape_stop += 1
            hashed = mixed(hashed, mark)
        if in_reads or shape_stop == shape_start:
            return UNUSUAL
        if shapes == len(shape_lines):
            return MORE_ROOM
        shape = intern(0, hashed, shape_bytes, shape_start, shape_stop, shape_starts, shape_stops, shapes)
        if shape == shapes:
            shape_lines[shapes, 0], shape_lines[shapes, 1] = line, line_stop
            sections = shape_sections[shapes]
            sections[0], sections[1], sections[2] = writes_stop, updates_stop - updates_begin, reads_stop - reads_begin
            sections[3], sections[4], sections[5] = names - names_read, micro_batch != NONE, offset != NONE
            shapes += 1
        else:
            shape_stop = shape_start
        position = line_stop + 1
        if is_declaration:
            if names != 1 or ops or micro_batch != NONE or tensors == len(tensor_starts):
                return UNUSUAL
            first, end = found[0], found[1]
            # a name: letters, digits, '_' and '-' between single dots; it begins with a letter or '_'
            character = text[first]
            if first == end or not (97 <= character <= 122 or 65 <= character <= 90 or character == 95):
                return UNUSUAL
            dot = NONE
            whole = group_hash = 7
            slot_hash = 7
            for place in range(first, end):
                character = text[place]
                if character == 42 or (character == 46 and (place == end - 1 or text[place + 1] == 46)):
                    return UNUSUAL
                if character == 46:
                    dot = place
                    group_hash = whole
                    slot_hash = 7
                else:
                    slot_hash = mixed(slot_hash, character)
                whole = mixed(whole, character)
            if intern(1, whole, text, first, end, tensor_starts, tensor_ends, tensors) != tensors:
                return UNUSUAL
            next_in_group[tensors] = NONE
            if dot != NONE:
                group = intern(2, group_hash, text, first, dot, group_starts, group_ends, groups)
                if group == groups:
                    groups += 1
                    group_firsts[group] = tensors
                else:
                    next_in_group[group_lasts[group]] = tensors
                group_lasts[group] = tensors
            slot = NONE
            saved = shape_starts[shape]
            if (
                shape_bytes[saved] == 115
                and shape_bytes[saved + 1] == 97
                and shape_bytes[saved + 2] == 118
                and shape_bytes[saved + 3] == 101
                and shape_bytes[saved + 4] == 100
                and shape_bytes[saved + 5] == 32
            ):
                slot_start = first if dot == NONE else dot + 1
                slot = intern(3, slot_hash, text, slot_start, end, slot_starts, slot_ends, slots)
                if slot == slots:
                    slots += 1
            form = NONE
            for known in range(forms):
                if form_shapes[known] == shape and form_slots[known] == slot:
                    form = known
                    break
            if form == NONE:
                form = forms
                if forms == len(form_shapes):
                    return UNUSUAL
                form_shapes[form], form_slots[form] = shape, slot
                forms += 1
            tensor_shapes[tensors], tensor_forms[tensors], tensor_offsets[tensors] = shape, form, offset
            tensors += 1
            continue
        # an op
        if offset != NONE or ops == len(op_kinds):
            return UNUSUAL
        letters = shape_starts[shape]
        is_release = (
            shape_stops[shape] - letters >= 7
            and shape_bytes[letters] == 114
            and shape_bytes[letters + 1] == 101
            and shape_bytes[letters + 2] == 108
            and shape_bytes[letters + 3] == 101
            and shape_bytes[letters + 4] == 97
            and shape_bytes[letters + 5] == 115
            and shape_bytes[letters + 6] == 101
            and (shape_stops[shape] - letters == 7 or shape_bytes[letters + 7] == 32)
        )
        if is_release and (names_read != names or writes_stop or updates_stop):
            return UNUSUAL
        kind_start = kind_stop
        if kind_stop + 5 > len(kind_numbers):
            return MORE_ROOM
        kind_numbers[kind_stop] = shape
        kind_stop += 5
        for section in range(4):
            if section == 0:
                first, end = reads_begin, reads_stop
            elif section == 1:
                first, end = updates_begin, updates_stop
            elif section == 2:
                first, end = 0, writes_stop
            else:
                first, end = names_read, names
            before = ends if is_release else used
            for name in range(first, end):
                start, name_stop, name_hash = found[3 * name], found[3 * name + 1], found[3 * name + 2]
                if name_stop - start > 2 and text[name_stop - 1] == 42 and text[name_stop - 2] == 46:
                    group = find(2, name_hash, start, name_stop - 2, group_starts, group_ends)
                    if group == NONE:
                        return UNUSUAL
                    tensor = group_firsts[group]
                else:
                    group = NONE
                    tensor = find(1, name_hash, start, name_stop, tensor_starts, tensor_ends)
                    if tensor == NONE:
                        return UNUSUAL
                while tensor != NONE:
                    if used == len(operands) or ends == len(ended) or kind_stop == len(kind_numbers):
                        return MORE_ROOM
                    if is_release:
                        ended[ends] = tensor
                        ends += 1
                    else:
                        operands[used] = tensor
                        used += 1
                        kind_numbers[kind_stop] = tensor_forms[tensor]
                        kind_stop += 1
                    tensor = NONE if group == NONE else next_in_group[tensor]
            bounds[4 * ops + section] = used
            kind_numbers[kind_start + 1 + section] = 0 if is_release else used - before
        ended_bounds[ops] = ends
        hashed = 7
        for place in range(kind_start, kind_stop):
            hashed = mixed(hashed, kind_numbers[place])
        if kinds == len(kind_ops):
            return MORE_ROOM
        kind = intern(4, hashed, kind_numbers, kind_start, kind_stop, kind_starts, kind_stops, kinds)
        if kind == kinds:
            kind_ops[kinds], kind_is_release[kinds] = ops, is_release
            kinds += 1
        else:
            kind_stop = kind_start
        op_kinds[ops], micro_batches[ops] = kind, micro_batch
        ops += 1
    counts[LINES], counts[SHAPES], counts[SHAPE_BYTES], counts[TENSORS] = lines, shapes, shape_stop, tensors
    counts[GROUPS], counts[SLOTS], counts[FORMS], counts[OPS] = groups, slots, forms, ops
    counts[KINDS], counts[KIND_NUMBERS], counts[OPERANDS], counts[ENDED] = kinds, kind_stop, used, ends
    return READ
