"""Views hold the numbers of the tensor that they stand for, lie as their names say, and have garbage between."""

from __future__ import annotations

import numpy as np
import pytest

from fa3verify.properties.views import FAR, POOLS, PROJECTION, SLOW, VIEWS, joined, viewed, views_of

ARRAY = np.arange(2 * 3 * 4 * 8, dtype=np.float16).reshape(2, 3, 4, 8)
TABLE = np.arange(6, dtype=np.int32).reshape(2, 3)


def _torch(x):
    torch = pytest.importorskip("torch", reason="needs torch")
    return torch.from_numpy(x.copy())


@pytest.mark.parametrize("made", [np.copy, _torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("x", [ARRAY, TABLE, TABLE[0]], ids=["4-d", "2-d", "1-d"])
def test_every_view_holds_the_numbers(x, made):
    given = made(x)
    names = [name for name in views_of(given) if name not in SLOW]
    assert len(names) > 4
    for name in names:
        view = viewed(given, name)
        assert np.array_equal(np.asarray(view), x), name
        assert tuple(view.shape) == x.shape


def test_a_view_is_as_its_name_says():
    strides = {name: np.array(viewed(ARRAY, name).strides) // 2 for name in VIEWS}
    assert strides["channels 2 apart"][-1] == 2
    assert strides["channels backwards"][-1] == -1
    assert strides["tokens last"][1] == 1
    assert strides["heads and tokens swapped"].tolist() == [96, 8, 24, 1]
    assert viewed(ARRAY, "unaligned").__array_interface__["data"][0] % 16 == 2
    for name, (axis, beyond) in FAR.items():
        if name not in SLOW:
            assert viewed(ARRAY, name).strides[axis] // 2 * (ARRAY.shape[axis] - 1) > beyond


def test_what_lies_between_the_elements_is_not_a_number():
    memory = viewed(ARRAY, "channels 2 apart").base.view(np.float16).reshape(*ARRAY.shape, 2)
    assert np.isnan(memory[..., 1]).all()


@pytest.mark.parametrize("name", [*POOLS, PROJECTION])
def test_operands_in_one_tensor_do_not_overlap(name):
    given = {"q": ARRAY, "k": ARRAY + 1, "v": ARRAY + 2}
    found = joined(given, name)
    assert found.keys() == given.keys()
    assert all(np.array_equal(found[each], given[each]) for each in given)
    whole = {id(x.base) for x in found.values()}
    assert len(whole) == 1


def test_operands_of_other_lengths_lie_in_no_projection():
    assert joined({"q": ARRAY, "k": ARRAY[:, :2, :2], "v": ARRAY[:, :2, :2]}, PROJECTION) == {}


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_projection_lies_token_by_token_in_either_layout(heads_first):
    k = ARRAY[:, :, :2]
    given = {"q": ARRAY, "k": k, "v": k + 1}
    given = {name: x.swapaxes(1, 2).copy() if heads_first else x for name, x in given.items()}
    found = joined(given, PROJECTION)
    q, own = (found[name].swapaxes(1, 2) if heads_first else found[name] for name in ("q", "k"))
    assert q.strides[1] == own.strides[1] == 8 * 8 * 2
    assert all(np.array_equal(found[name], given[name]) for name in given)
