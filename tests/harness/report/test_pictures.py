"""Pictures of a kernel: they tell which heads, queries, channels and keys are wrong, and nothing under a sound one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem
from fa3verify import records
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging import sketch
from fa3verify.report import pictures

PROBLEM = AttentionProblem(1, 4, 2, 40, 90, 64, dtype="fp16", causal=True)
WINDOW = AttentionProblem(1, 1, 1, 40, 90, 64, dtype="fp16", window=(20, 3))


@cache
def operands(problem: AttentionProblem):
    return Case("twin.fp16", problem, Recipe("normal")).draw()[1].operands.dequantized(problem)


def exact(problem: AttentionProblem, q, k, v):
    return attention(problem, q, k, v).out


def sketched(problem: AttentionProblem, out: np.ndarray) -> sketch.Sketch:
    """The sketch of outputs, in fp16, with a bound of two of its roundings."""
    q, k, v = operands(problem)
    truth = exact(problem, q, k, v)
    bound = np.full(truth.shape, 2.0**-10)
    found = sketch.of_case(problem, encode(out, FORMATS["fp16"], "ieee"), truth, bound, v)
    found = records.read(sketch.Sketch, json.loads(json.dumps(records.plain(found))), "sketch")
    merged = sketch.merged([("a case", found)])
    assert merged is not None
    return merged


def without_last_key(problem, q, k, v):
    shorter = replace(problem, seqlen_k=problem.seqlen_k - 1, causal=False)
    out = exact(problem, q, k, v).copy()
    out[:, -1] = exact(shorter, q, k[:, :-1], v[:, :-1])[:, -1]  # under a causal mask the last query alone sees it
    return out


def one_key_more(problem, q, k, v):
    one = replace(problem, seqlen_q=problem.seqlen_q - 1)
    out = exact(problem, q, k, v).copy()
    out[:, :-1] = exact(one, q[:, :-1], k, v)  # whose diagonal lies one key further right
    return out


def of_rows(problem, q, k, v):
    out = exact(problem, q, k, v).copy()
    out[:, 32:] *= 1.1
    return out


def of_channel(problem, q, k, v):
    out = exact(problem, q, k, v).copy()
    out[..., 17] += 0.1
    return out


def of_head(problem, q, k, v):
    out = exact(problem, q, k, v).copy()
    out[:, :, 2] = exact(problem, 1.1 * q, k, v)[:, :, 2]
    return out


def with_nan(problem, q, k, v):
    out = exact(problem, q, k, v).copy()
    out[0, 7, 3] = np.nan
    return out


def wider_window(problem, q, k, v):
    return exact(replace(problem, window=(problem.window[0] + 1, problem.window[1])), q, k, v)


@pytest.mark.parametrize(
    ("problem", "kernel", "told"),
    [
        (PROBLEM, without_last_key, "query 39 of 40"),
        (PROBLEM, one_key_more, "towards the values of key +1 from the diagonal"),
        (PROBLEM, of_rows, "queries 32 to 39 of 40"),
        (PROBLEM, of_channel, "channel 17 of 64"),
        (PROBLEM, of_head, "Wrong: head 2 of 4; "),
        (PROBLEM, with_nan, "Wrong: head 3 of 4; in head 3 query 7 of 40, all 64 channels."),
        (WINDOW, wider_window, "towards the values of key -21 from the diagonal"),
    ],
)
def test_the_words_tell_what_is_wrong(problem, kernel, told):
    found = sketched(problem, kernel(problem, *operands(problem)))
    assert told in pictures.told(found.worst)


def test_errors_of_a_lost_key_point_away_from_its_value():
    dense = replace(PROBLEM, causal=False)
    q, k, v = operands(dense)
    shorter = replace(dense, seqlen_k=dense.seqlen_k - 1)
    found = sketched(dense, exact(shorter, q, k[:, :-1], v[:, :-1]))
    assert "The errors point away from the values of key 89." in pictures.told(found.worst)


def test_a_sound_kernel_is_not_said_to_point_anywhere():
    found = sketched(PROBLEM, exact(PROBLEM, *operands(PROBLEM)))
    told = pictures.told(found.worst)
    assert told.endswith("within its bound, as is everything else.")
    drawn = pictures.of_kernel("mine", found)
    assert drawn.worst.ratio <= 1
    assert len(drawn.drawn) == 2  # the head and its peers, no direction
    assert "0 beyond the bound" in drawn.profiles[3].words


def test_a_ratio_just_below_1_is_not_written_out():
    found = sketched(PROBLEM, exact(PROBLEM, *operands(PROBLEM)))
    assert "is < 1.00, at" in pictures.told(replace(found.worst, ratio=0.99999999996))


def test_profiles_and_histogram_count_every_output_once():
    found = sketched(PROBLEM, of_channel(PROBLEM, *operands(PROBLEM)))
    outputs = 40 * 4 * 64
    assert sum(found.histogram) == outputs
    assert all(sum(count for _, _, count in getattr(found, axis)) == outputs for axis in ("query", "keys", "channel"))
    wrong = [i for i, (worst, _, _) in enumerate(found.channel) if worst > 1]
    assert wrong == [17]
    assert len(found.query) == 5  # of 8 rows each
    assert [i for i, bin_ in enumerate(found.keys) if bin_[2]] == [12, 13]  # 51 to 90 keys: 2^5.5 to 2^6.5


def test_a_ratio_of_exactly_1_stands_within_the_bound():
    """The bin numbered 24 ends at 1: 0, 1/2, 1, just above 1, infinity."""
    q = AttentionProblem(1, 1, 1, 1, 1, 5, dtype="fp16")
    bound = np.ones((1, 1, 1, 5))
    out = np.array([0.0, 0.5, 1.0, 1.001, np.inf]).reshape(bound.shape)
    found = sketch.of_case(q, out, np.zeros(bound.shape), bound, np.ones(bound.shape))
    assert [i for i, count in enumerate(found.histogram) if count] == [0, 22, 24, 25, 40]


def test_rows_of_one_key_are_apart_from_rows_of_two():
    problem = replace(PROBLEM, batch=1, seqlen_q=2, seqlen_k=2)  # causal: query 0 sees one key
    found = sketched(problem, exact(problem, *operands(problem)))
    assert [i for i, bin_ in enumerate(found.keys) if bin_[2]] == [1, 3]  # ends at 2^0 and 2^1


def test_keys_close_together_are_told_as_one_range():
    wrong = operands(PROBLEM)
    worst = sketched(PROBLEM, of_head(PROBLEM, *wrong)).worst

    def told(*lit: int) -> str:
        keys = [-9.0 if i in lit else 0.0 for i in range(90)]
        return pictures.told(replace(worst, toward=sketch.Toward(tuple(keys), (0.0,), 0)))

    assert "away from the values of keys 20 to 24." in told(20, 21, 24)
    assert "away from the values of keys 20 to 28." in told(20, 28)
    assert "away from the values of keys 20 and 29." in told(20, 29)


def test_sketches_of_many_cases_keep_the_largest_and_add_the_rest():
    first, second = (sketched(PROBLEM, kernel(PROBLEM, *operands(PROBLEM))) for kernel in (of_rows, of_head))
    both = sketch.merged([("one", first), ("two", second)])
    larger = "one" if first.worst.ratio > second.worst.ratio else "two"
    assert both.worst.case == larger
    assert sum(both.histogram) == 2 * sum(first.histogram)
    assert sketch.merged([]) is None


def test_a_picture_is_small_and_refers_to_nothing_outside():
    drawn = pictures.of_kernel("<mine>", sketched(PROBLEM, of_head(PROBLEM, *operands(PROBLEM))))
    text = "".join(each.svg for each in (*drawn.profiles, *drawn.drawn))
    assert len(text) < 150_000
    assert not re.search(r"https?:|href|<mine>", text)
