import numpy as np
import pytest
import torch

from capflow.errors import CapflowError
from capflow_engine.bank import Bank


def vector(seed):
    return np.random.default_rng(seed).standard_normal(16).astype(np.float32)


def test_equal_vectors_share_a_row_until_the_last_holder_is_gone():
    bank = Bank(torch.empty(4, 16, dtype=torch.bfloat16))
    first, second, other = bank.acquire(vector(1)), bank.acquire(vector(1)), bank.acquire(vector(2))
    assert first == second != other
    assert torch.equal(bank.rows[first], torch.from_numpy(vector(1)).bfloat16())
    bank.release(first)
    assert len(bank) == 2
    bank.release(second)
    assert len(bank) == 1


def test_a_freed_row_is_taken_again_and_a_held_one_is_not():
    bank = Bank(torch.empty(2, 16))
    kept, freed = bank.acquire(vector(1)), bank.acquire(vector(2))
    bank.release(freed)
    assert bank.acquire(vector(3)) == freed
    assert torch.equal(bank.rows[kept], torch.from_numpy(vector(1)))


def test_a_full_bank_says_what_to_raise():
    bank = Bank(torch.empty(1, 16))
    bank.acquire(vector(1))
    with pytest.raises(CapflowError, match="bank_rows_max"):
        bank.acquire(vector(2))
