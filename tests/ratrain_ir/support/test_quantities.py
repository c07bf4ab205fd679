"""Quantities with units: what is read, what is refused and how, and numbers that come back from their texts."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ratrain.ratrain_ir.support.quantities import (
    EXAMPLES,
    SCALES,
    QuantityError,
    parse_count,
    parse_quantity,
    quantity_text,
    whole_bytes,
    with_unit,
)


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("80 GB", "bytes", 80e9),
        ("80GiB", "bytes", 80 * 2**30),
        (" 1.5 MiB ", "bytes", 1572864),
        ("7", "bytes", 7),
        ("900 GB/s", "bytes/s", 900e9),
        ("3.35TB/s", "bytes/s", 3.35e12),
        ("25 us", "s", 25e-6),
        ("25 \u00b5s", "s", 25e-6),
        ("25 \u03bcs", "s", 25e-6),
        ("1.2 ms", "s", 1.2e-3),
        ("3 ns", "s", 3e-9),
        ("1e-5", "s", 1e-5),
        ("989 TFLOP/s", "flop/s", 989e12),
        ("989.4 Tflop/s", "flop/s", 989.4e12),
        ("1 PFLOPS", "flop/s", 1e15),
        ("1.2 GHz", "cycles/s", 1.2e9),
    ],
)
def test_quantities_are_read_as_the_number_one_would_write(text: str, unit: str, value: float) -> None:
    assert parse_quantity(text, unit) == value


@pytest.mark.parametrize(
    ("text", "unit", "message", "help_text"),
    [
        ("900 GB/s", "bytes", "is in bytes/s, not in bytes", "write 900 GB"),
        ("900 GB", "bytes/s", "is in bytes, not in bytes/s", "write 900 GB/s"),
        ("400 Gb/s", "bytes/s", "counts bits, not bytes/s", "eight bits are a byte: that is 50 GB/s"),
        ("400 Gbit/s", "bytes/s", "counts bits, not bytes/s", "eight bits are a byte: that is 50 GB/s"),
        ("200Gbps", "bytes/s", "counts bits, not bytes/s", "eight bits are a byte: that is 25 GB/s"),
        ("8 Gib", "bytes", "counts bits, not bytes", "eight bits are a byte: that is 1 GiB"),
        ("8 Gb", "bytes/s", "counts bits, not bytes/s", "write for example 900 GB/s"),
        ("80 gb", "bytes", "'gb' is no unit of bytes", "write 80 GB"),
        ("20G", "bytes", "'G' is no unit of bytes", "write 20 GB or 20 GiB"),
        ("20gi", "bytes", "'gi' is no unit of bytes", "write 20 GiB"),
        ("20 m/s", "bytes/s", "'m/s' is no unit of bytes/s", "write 20 MB/s or 20 MiB/s"),
        ("989 tflop/s", "flop/s", "'tflop/s' is no unit of flop/s", "write 989 TFLOP/s"),
        ("25 minutes", "s", "'minutes' is no unit of s", "write for example 25 us"),
        ("25 us", "flop/s", "is in s, not in flop/s", "write for example 989 TFLOP/s"),
        ("-1 GB", "bytes", "is not a number with a unit", "write for example 80 GB or 80 GiB"),
        ("", "s", "is not a number with a unit", "write for example 25 us"),
        ("9" * 5000, "bytes", "is not a number with a unit", "write for example 80 GB or 80 GiB"),
        ("1e999 GB", "bytes", "is not a number with a unit", "write for example 80 GB or 80 GiB"),
    ],
)
def test_what_is_refused_says_how_it_is_written(text: str, unit: str, message: str, help_text: str) -> None:
    with pytest.raises(QuantityError, match=message) as refused:
        parse_quantity(text, unit)
    assert refused.value.help == help_text


@pytest.mark.parametrize(
    ("text", "count"), [("1T", 1e12), ("300B", 3e11), ("1.5 M", 1.5e6), ("20k", 2e4), ("1e12", 1e12), ("15_000", 15e3)]
)
def test_tokens_are_counted_as_people_write_them(text: str, count: float) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "help_text"),
    [
        ("1t", "write 1T"),
        ("15 tokens", "write for example 1e12 or 1T, 300e9 or 300B"),
        ("nan", "1e12"),
        ("-1T", "1e12"),
    ],
)
def test_what_counts_no_tokens_says_how_they_are_written(text: str, help_text: str) -> None:
    with pytest.raises(QuantityError) as refused:
        parse_count(text)
    assert help_text in refused.value.help


@pytest.mark.parametrize(
    ("text", "size"), [("23.6GiB", 25_340_307_046), ("0.3 MiB", 314_572), ("1.5 GB", 1_500_000_000)]
)
def test_a_part_of_a_byte_of_a_larger_unit_is_dropped(text: str, size: int) -> None:
    assert whole_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *(("1.5", "no whole number"), ("1.5B", "no whole number"), ("0.0001 KB", "no whole number")),
        ("2e18", "more bytes than any memory has"),
    ],
)
def test_sizes_that_no_memory_has_are_refused(text: str, why: str) -> None:
    with pytest.raises(QuantityError, match=why):
        whole_bytes(text)


@given(st.sampled_from(sorted(SCALES)), st.integers(1, 10**6))
def test_a_number_alone_is_refused_with_spellings_that_are_taken(unit: str, number: int) -> None:
    with pytest.raises(QuantityError, match="has no unit") as refused:
        with_unit(str(number), unit)
    spelt = refused.value.help.removeprefix("write ").removesuffix(", if that is meant").replace("; or ", " or ")
    for text in spelt.split(" or "):
        assert parse_quantity(with_unit(text, unit), unit) > 0


@given(st.sampled_from(sorted(SCALES)), st.floats(1e-15, 1e30))
@example("bytes", 570425344.0)
@example("bytes", 0.0)
@example("s", 1e-15)
@example("bytes/s", 1e30)
def test_a_number_comes_back_from_its_text(unit: str, value: float) -> None:
    assert parse_quantity(quantity_text(value, unit), unit) == value


@given(st.decimals(0, 10**6, places=4), st.sampled_from([("us", "e-6"), ("ms", "e-3"), ("s", "")]))
def test_a_time_is_the_literal_of_its_exponent(number: object, unit: tuple[str, str]) -> None:
    """Rounded once: `0.3 us` and `0.3e-6` are one number."""
    assert parse_quantity(f"{number} {unit[0]}", "s") == float(f"{number}{unit[1]}")


def test_every_unit_has_an_example_that_is_one() -> None:
    assert EXAMPLES.keys() == SCALES.keys()
    for unit, text in EXAMPLES.items():
        assert all(parse_quantity(each, unit) > 0 for each in text.split(" or "))


@pytest.mark.parametrize(
    ("value", "text"),
    [(80e9, "80 GB"), (85899345920, "80 GiB"), (1 << 20, "1 MiB"), (5, "5 B"), (544 << 20, "544 MiB")],
)
def test_bytes_are_shown_in_the_shorter_way(value: float, text: str) -> None:
    assert quantity_text(value, "bytes") == text
