"""Machine files say where every constant comes from, and a malformed one is refused by key and line."""

from __future__ import annotations

import hashlib
import re
from importlib import resources
from pathlib import Path

import pytest

from fa3_simulator.machine import built_in, load, parse

TEXT = (resources.files("fa3_simulator") / "machines" / "h200.toml").read_text()


@pytest.mark.parametrize("name", built_in())
def test_every_constant_has_unit_source_and_date(name: str) -> None:
    machine = load(name)
    constants = machine.constants()
    assert len(constants) > 20
    for key, constant in (constants | dict(machine.clock)).items():
        assert constant.unit, key
        assert constant.source, key
        assert re.fullmatch(r"\d{4}-\d{2}(-\d{2})?", constant.date), key


def test_assumed_constants_are_listed() -> None:
    assert load("h200").assumed() == []
    text = TEXT.replace('kind = "documented"', 'kind = "assumed"', 1)
    assert parse(text, "file.toml").assumed() == ["sms"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("value = 132", "value = -1", r"line 3: value of sms must be a number of at least 0, got -1"),
        ("value = 132", "value = 1.5", r"line 3: value of sms must be whole, got 1.5"),
        ("value = 132", "value = true", r"value of sms must be a number"),
        ("[sms]", "[smss]", r"misses sms"),
        (
            'kind = "documented"',
            'kind = "guessed"',
            r"line 3: kind of sms must be one of measured, documented, assumed",
        ),
        ('unit = "count"\n', "", r"line 3: sms needs exactly the keys date, kind, source, unit, value"),
        ('name = "H200"', "name = 3", r"key 'name' must be a string"),
        ("[sms]", "[sms", r"line 3"),
        ("[clock.smem]", "[clock.shared]", r"table clock needs exactly the keys largest_mhz, base, .*, mean_error"),
        ("value = 700", "value = -7", r"line \d\d\d: value of power_cap_w must be a number of at least 0, got -7"),
        ("[clock.exponent]", "[clock.exponent.more]", r"exponent needs exactly the keys date, kind"),
    ],
)
def test_malformed_files_are_refused_by_key_and_line(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(TEXT.replace(old, new, 1), "file.toml")


def test_unknown_keys_are_refused_by_line() -> None:
    extra = TEXT + '\n[warp_drive]\nvalue = 1\nunit = "x"\nsource = "x"\ndate = "2026-01"\nkind = "assumed"\n'
    line = extra[: extra.index("[warp_drive]")].count("\n") + 1
    with pytest.raises(ValueError, match=rf"line {line}: unknown key 'warp_drive'"):
        parse(extra, "file.toml")


def test_unknown_machines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one of h100, h200 or a \.toml file, got 'a100'"):
        load("a100")


def test_the_frozen_constants_are_those_of_the_decision_records() -> None:
    record = Path(__file__).parents[2] / "reports" / "decisions" / "0030-what-warps-wait-for.md"
    cycles, clock, _ = TEXT.partition("\n# The SM clock of a burst")  # no cycle depends on what follows
    assert clock
    found = hashlib.sha256(cycles.encode()).hexdigest()
    assert found in record.read_text(), "constants changed: measure, and write a new record"
