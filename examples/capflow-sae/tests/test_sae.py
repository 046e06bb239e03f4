import json
import threading

import pytest
import torch
from capflow_sae.autoencoder import SparseAutoencoder
from capflow_sae.buffer import ShuffleBuffer
from capflow_sae.consumer import Sae, SaeConfig
from capflow_sae.trainer import Curve, Trainer
from safetensors import safe_open

from capflow import ModelInfo, UsageError


def test_the_buffer_gives_out_each_row_once_shuffled_and_says_what_had_no_room():
    buffer = ShuffleBuffer(100, 1)
    assert buffer.put(torch.arange(80.0)[:, None]) == 0
    first = buffer.take(30)
    assert buffer.put(torch.arange(80.0, 160.0)[:, None]) == 30  # 50 were left, so 50 more had room
    buffer.close()
    taken = [first, *iter(lambda: buffer.take(30), None)]
    rows = torch.cat(taken).flatten().tolist()
    assert len(rows) == 120  # three batches more of the 100; the last 10 make none
    assert len(set(rows)) == 120
    assert set(rows) <= set(range(130))
    assert rows[:30] != sorted(rows[:30])


def test_the_buffer_waits_until_it_is_half_full():
    buffer, taken = ShuffleBuffer(10, 1), []
    thread = threading.Thread(target=lambda: taken.append(buffer.take(2)))
    thread.start()
    buffer.put(torch.zeros(4, 1))
    thread.join(0.1)
    assert thread.is_alive()
    buffer.put(torch.zeros(1, 1))
    thread.join(20)
    assert [len(rows) for rows in taken] == [2]


def test_a_row_is_a_sum_of_at_most_so_many_features():
    torch.manual_seed(0)
    model = SparseAutoencoder(8, 32, active=3)
    assert ((model.encode(torch.randn(50, 8)) > 0).sum(-1) <= 3).all()


def test_the_curve_is_bounded_and_keeps_the_mean():
    curve = Curve()
    for step in range(10_000):
        curve.add(float(step))
    assert len(curve.losses) <= 4096
    assert curve.steps == 10_000
    assert curve.losses[0] == pytest.approx((curve.every - 1) / 2)


def test_a_training_that_fails_says_so_to_who_comes_next(tmp_path):
    model = SparseAutoencoder(4, 8, 2)
    buffer = ShuffleBuffer(8, 5)  # not as wide
    trainer = Trainer(model, buffer, tmp_path, {"site": "post_block:0"}, batch=2, learning_rate=0.1)
    trainer.start()
    buffer.put(torch.randn(8, 5))
    trainer.stop()
    assert trainer.error is not None
    assert not list(tmp_path.iterdir())


def test_the_files_say_what_they_are(tmp_path):
    consumer = Sae(SaeConfig(str(tmp_path), "post_block:3", features=16, active=2, batch=4, buffer_rows=8))
    consumer.check()
    consumer.open(None)
    consumer.on_session("engine", ModelInfo("m", 4, 6, "float32", ()))
    consumer.trainer.buffer.put(torch.randn(8, 6))
    consumer.close()
    with safe_open(tmp_path / "sae.safetensors", "pt") as file:
        about = json.loads(file.metadata()["sae"])
        assert {name: file.get_slice(name).get_shape() for name in file.keys()} == {  # noqa: SIM118  no mapping
            "encoder": [16, 6],
            "decoder": [16, 6],
            "bias": [6],
            "scale": [],
        }
        assert torch.allclose(file.get_tensor("decoder").norm(dim=-1), torch.ones(16))
    assert about == {"active": 2, "site": "post_block:3", "model": "m", "steps": 2}
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"sae.safetensors", "loss.png"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"site": "nope"}, "site: got nope"),
        ({"active": 0}, "consumers.sae.active: got 0, expected above 0"),
        ({"active": 5000}, "consumers.sae.active: got 5000, expected at most 4096"),
        ({"buffer_rows": 300}, "consumers.sae.buffer_rows: got 300, expected at least two batches, 512"),
        ({"out": __file__}, "which is a file, expected a directory"),
    ],
)
def test_options_out_of_range_are_refused(tmp_path, options, words):
    sae = Sae(SaeConfig(**({"out": str(tmp_path), "site": "post_block:3"} | options)))
    with pytest.raises(UsageError, match=words):
        sae.check() or sae.spec()
