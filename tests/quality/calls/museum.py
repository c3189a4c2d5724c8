"""All kernels of this folder: importing it declares them."""

from __future__ import annotations

from tests.quality.calls import (
    gradients as _gradients,
    numerics as _numerics,
    quantiser as _quantiser,
    right as _right,
    right_served as _right_served,
    serving as _serving,
    serving_options as _serving_options,
    sizes as _sizes,
    state as _state,
    strides as _strides,
)
from tests.quality.calls.exhibits import EXHIBITS as EXHIBITS

ROOMS = (
    _serving,
    _serving_options,
    _sizes,
    _strides,
    _state,
    _gradients,
    _quantiser,
    _numerics,
    _right,
    _right_served,
)
