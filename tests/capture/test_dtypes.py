"""float16 is read by a table, and every number is what numpy makes of it."""

import numpy as np

from capflow.capture.dtypes import widened


def test_every_float16_number_is_widened_as_numpy_does():
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    wide = widened(values)
    assert wide.dtype == np.float32
    assert wide.tobytes() == values.astype(np.float32).tobytes()


def test_other_numbers_are_left_as_they_are():
    values = np.arange(4, dtype=np.float64)
    assert widened(values) is values
