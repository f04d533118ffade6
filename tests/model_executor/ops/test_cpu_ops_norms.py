"""RMSNorm with and without a residual: equal to the reference, and a row's bits are its own."""

from __future__ import annotations

import numpy as np
import paddle
import pytest


@pytest.fixture
def dtype() -> str:
    """Norms do not depend on the dtype of the weights."""
    return "float32"


@pytest.mark.parametrize("rows,width", [(1, 896), (3, 17), (65, 100), (40, 4096)])
def test_norms_agree_with_the_reference(ops, reference, rng, rows, width):
    x, residual = (rng.standard_normal((rows, width)).astype(np.float32) for _ in range(2))
    weight = paddle.to_tensor(rng.uniform(0.5, 1.5, width).astype(np.float32))
    actual = ops.rms_norm(paddle.to_tensor(x), weight, 1e-6).numpy()
    np.testing.assert_allclose(
        actual, reference.rms_norm(paddle.to_tensor(x), weight, 1e-6).numpy(), rtol=1e-5, atol=1e-6
    )
    sums = [paddle.to_tensor(residual), paddle.to_tensor(residual)]
    actual = ops.add_rms_norm(paddle.to_tensor(x), sums[0], weight, 1e-6).numpy()
    expected = reference.add_rms_norm(paddle.to_tensor(x), sums[1], weight, 1e-6).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(sums[0].numpy(), residual + x)


def test_a_row_has_the_same_bits_in_any_batch(ops, rng, threads):
    x, residual = (rng.standard_normal((200, 900)).astype(np.float32) for _ in range(2))
    weight = paddle.to_tensor(rng.uniform(0.5, 1.5, 900).astype(np.float32))
    together = ops.rms_norm(paddle.to_tensor(x), weight, 1e-6).numpy()
    together_sum = ops.add_rms_norm(paddle.to_tensor(x), paddle.to_tensor(residual), weight, 1e-6).numpy()
    for count in (1, 3):
        ops.set_num_threads(count)
        for rows in (slice(0, 1), slice(199, 200), slice(3, 50)):
            np.testing.assert_array_equal(ops.rms_norm(paddle.to_tensor(x[rows]), weight, 1e-6).numpy(), together[rows])
            part = ops.add_rms_norm(paddle.to_tensor(x[rows]), paddle.to_tensor(residual[rows]), weight, 1e-6).numpy()
            np.testing.assert_array_equal(part, together_sum[rows])
