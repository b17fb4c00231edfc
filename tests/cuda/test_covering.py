"""On a device the kernels write every row: those of no sequence get what the host fills in elsewhere."""

import numpy as np
import pytest

from numbaflash import emulator, reference
from numbaflash import segments as seg
from numbaflash.cuda import plans
from numbaflash.options import Options
from numbaflash.problem import make_problem

LENGTHS = {"q_lengths": [20, 0, 33], "kv_lengths": [7, 40, 0]}
BATCH, HEADS, ROWS, KEYS, DIM = 3, 2, 33, 40, 9


def inputs(dtype):
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((BATCH, HEADS, n, DIM)).astype(dtype) for n in (ROWS, KEYS, KEYS, ROWS))
    options = {
        "causal": True,
        "sinks": rng.standard_normal(HEADS).astype(np.float32),
        "alibi_slopes": rng.random((BATCH, HEADS)),
        "bias": rng.standard_normal((BATCH, 1, ROWS, KEYS)).astype(np.float32),
        **LENGTHS,
    }
    return q, k, v, dout, rng.standard_normal((BATCH, HEADS, ROWS)).astype(np.float32), options


def covered(q, k, v, options):
    problem = make_problem(q, k, v, Options(**options))
    return problem._replace(segments=seg.covering(problem.segments, BATCH, ROWS, KEYS))


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float16, marks=pytest.mark.slow)])
def test_rows_and_keys_of_no_sequence_get_the_constants_of_the_host(dtype):
    """float32 runs on plain multiply-adds, float16 on tensor cores."""
    q, k, v, dout, dlse, options = inputs(dtype)
    problem = covered(q, k, v, options)
    assert len(problem.segments) > BATCH
    expected, expected_lse = reference.attention(q, k, v, **options)
    gradients = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)

    out, lse = np.full(q.shape, np.nan, dtype), np.full(q.shape[:3], np.nan, np.float32)
    emulator.execute(plans.plan_forward(problem, out, lse))
    gaps = seg.uncovered(problem.segments[:BATCH], BATCH, ROWS)
    assert gaps
    for batch, start, stop in gaps:
        assert not out[batch, :, start:stop].any() and (lse[batch, :, start:stop] == -np.inf).all()
    tolerance = {"atol": 4 * float(np.finfo(dtype).eps)}
    np.testing.assert_allclose(out.astype(float), expected.astype(float), **tolerance)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)

    dq, dk, dv = (np.full_like(array, np.nan) for array in (q, k, v))
    dbias, dsinks = np.empty(options["bias"].shape, np.float32), np.empty(HEADS)
    emulator.execute(plans.plan_backward(problem, dout, out, lse, dlse, dq, dk, dv, dbias, dsinks))
    for name, actual in zip(("dq", "dk", "dv", "dbias", "dsinks"), (dq, dk, dv, dbias, dsinks)):
        wanted = getattr(gradients, name).astype(float)
        np.testing.assert_allclose(actual.astype(float), wanted, atol=20 * tolerance["atol"] + 1e-5, err_msg=name)
