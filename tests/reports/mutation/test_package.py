"""A mutant's package has the mistake, and nothing else has."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from fa3_kernels.faults import table
from fa3_kernels.twin import float32, softmax
from fa3_reports.mutation import edits
from fa3_reports.mutation.apart import apart

# A loop that numba has stored for the sound package, with another constant: its bytecode, by which numba finds stored
# loops, is that of the sound one.
JITTED = (
    "float32._flush_loop: out[i] = b & np.int32(-(1 << 31)) if b & 2139095040 == 0 else b -> "
    "out[i] = b & np.int32(-(1 << 31)) if b & 2139095041 == 0 else b"
)
PLAIN = (
    "softmax.finalize: inverse = mufu.rcp(row_sum) if order.inverse == 'reciprocal' else np.float32(1) / row_sum -> "
    "inverse = np.float32(1) / row_sum"
)
SUBNORMAL = np.array([2.0**-149], np.float32)  # its last bit alone is set


def test_identities_are_unique_and_find_their_mutant():
    every = [mutant for module in edits.modules() for mutant in edits.mutants(module)]
    identities = [mutant.identity for mutant in every]
    assert len(set(identities)) == len(identities)
    assert len(identities) > 3000
    for mutant in every[::500]:
        assert edits.find(mutant.identity) == mutant


@pytest.mark.parametrize("module", edits.modules())
def test_every_edit_changes_its_statement(module):
    assert all(mutant.before != mutant.after for mutant in edits.mutants(module))


def test_idealised_errors_are_not_edited():
    every = [mutant for module in edits.modules() for mutant in edits.mutants(module)]
    assert "self.ideal" in table.source("arithmetic")
    assert not [mutant for mutant in every if "ideal" in mutant.before]


def test_a_compiled_loop_of_a_mutant_is_never_the_stored_one():
    assert float32.flushed(SUBNORMAL).tolist() == [0]  # compiles and stores the sound loop

    def work():
        module = import_module(f"{table.load('fa3_mutant', edits.find(JITTED))}.float32")
        yield module.flushed(SUBNORMAL).tolist()
        yield float32.flushed(SUBNORMAL).tolist()

    said = apart(work, 60)
    assert said.values == [[2.0**-149], [0]], said
    assert float32.flushed(SUBNORMAL).tolist() == [0]


def test_only_what_depends_on_the_mutated_module_is_loaded_again():
    def work():
        alias = table.load("fa3_mutant", edits.find(PLAIN))
        forward = import_module(f"{alias}.forward")
        yield forward.softmax is not softmax
        yield forward.float32 is float32

    assert apart(work, 60).values == [True, True]


def test_a_process_has_one_mutant():
    def work():
        table.load("fa3_mutant", edits.find(PLAIN))
        table.load("fa3_mutant", edits.find(JITTED))
        yield "never"

    said = apart(work, 60)
    assert said.end == "raised"
    assert "a package fa3_mutant already" in said.words
