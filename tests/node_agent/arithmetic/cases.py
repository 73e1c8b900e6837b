"""Numbers of all kinds, and what becomes of them in a code."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from allfold_agent.arithmetic.codecs import codec_of
from allfold_core.dtypes import USUAL_GRAIN, Wire

Floats = npt.NDArray[np.float32]

SPECIAL = (
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    1e-45,
    -1e-40,
    1.17549435e-38,
    3.4e38,
    float(np.finfo(np.float32).max),
    65504.0,
    65520.0,
)
QUIET_AND_LOUD = (0xFFFFFFFF, 0x7FFFFFFF, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001)


@st.composite
def any_floats(draw: st.DrawFn, finite: bool = False) -> Floats:
    """Up to some blocks of one size of number, with anything put in between."""
    numel = draw(st.integers(0, 3 * USUAL_GRAIN))
    dice = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    with np.errstate(over="ignore"):
        values = (dice.normal(size=numel) * 2.0 ** draw(st.integers(-150, 120))).astype(np.float32)
    if draw(st.booleans()):
        values[: draw(st.integers(0, 2)) * USUAL_GRAIN] = 0.0
    bits = st.one_of(
        st.integers(0, 2**32 - 1),
        st.sampled_from(QUIET_AND_LOUD),
        st.sampled_from([int(np.float32(each).view(np.uint32)) for each in SPECIAL]),
    )
    for _ in range(draw(st.integers(0, 4)) if numel else 0):
        values.view(np.uint32)[draw(st.integers(0, numel - 1))] = draw(bits)
    if finite:
        values[~np.isfinite(values)] = 1.0
    return values


def encoded(wire: str, values: npt.NDArray[np.floating]) -> tuple[bytes, npt.NDArray[np.floating]]:
    """The code of some numbers, and what it stands for."""
    found = Wire.from_label(wire)
    codec = codec_of(found)
    assert codec is not None
    kept, code = values.copy(), bytearray(found.nbytes(len(values), 4))
    decoded = np.empty_like(kept)
    with np.errstate(all="ignore"):  # as in the threads that fold
        codec.encode(kept, memoryview(code))
        codec.decode(memoryview(code), decoded)
    assert kept.tobytes() == decoded.tobytes(), "who encodes keeps what is decoded"
    return bytes(code), decoded
