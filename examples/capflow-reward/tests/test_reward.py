import numpy as np
import pytest
from capflow_reward import Reward, RewardConfig

from capflow import Block, Frame, FrameHeader, Probe, Rank, RequestDone, RequestRows, Site, Span, UsageError

SITE = Site(1, "post_block")


def frame(request, start, rows):
    rows = np.asarray([rows], np.float32)  # [sites, tokens, hidden_size]
    count = rows.shape[1]
    header = FrameHeader(
        engine="engine",
        boot="boot",
        rank=Rank(0, 0, 0),
        seq=start + 1,
        step=start,
        time_ns=0,
        dtype="float32",
        hidden_size=rows.shape[2],
        requests=(RequestRows(request, prompt_length=2, start=start, token_ids=tuple(range(count))),),
        blocks=(Block((SITE,), rows=count, spans=(Span(0, start, count, 0),)),),
    )
    return Frame.seal(header, rows)


def done(request, computed_length):
    rows = computed_length - 2
    return RequestDone("engine", request, "stop", 2, computed_length, rows_promised=rows, rows=rows, dropped=())


@pytest.fixture
def probe(tmp_path):
    path = tmp_path / "kind.safetensors"
    Probe.make(SITE, [1.0, -2.0], 0.5).save(path)
    return str(path)


@pytest.mark.parametrize(("pool", "reward"), [("mean", 1.5), ("max", 3.5), ("last", 2.5)])
def test_the_reward_is_what_the_probe_scores_pooled(probe, pool, reward):
    consumer = Reward(RewardConfig(probe, pool))
    consumer.on_frame(frame("r", 2, [[3, 0], [0, 1]]))  # scores 3.5 and -1.5
    consumer.on_frame(frame("r", 4, [[2, 0]]))  # 2.5
    result = consumer.on_request_done(done("r", 5))
    assert result.status == "ok"
    assert result.payload == {"reward": pytest.approx(reward), "tokens": 3}
    assert consumer.scores == {}


@pytest.mark.parametrize("computed_length", [2, 4])
def test_without_every_row_there_is_no_reward(probe, computed_length):
    consumer = Reward(RewardConfig(probe))
    if computed_length > 2:
        consumer.on_frame(frame("r", 2, [[3, 0]]))
    result = consumer.on_request_done(done("r", computed_length))
    assert result.status == "error"
    assert "rows of generated tokens: got" in result.error
    assert result.payload == {}


def test_rows_of_another_width_are_refused(probe):
    with pytest.raises(UsageError, match="rows: got 3 wide, expected 2"):
        Reward(RewardConfig(probe)).on_frame(frame("r", 2, [[1, 2, 3]]))


def test_several_probes_are_refused(tmp_path):
    Probe.make(SITE, np.eye(2), names=["a", "b"]).save(tmp_path / "two.safetensors")
    with pytest.raises(UsageError, match="got 2 probes, expected one"):
        Reward(RewardConfig(str(tmp_path / "two.safetensors"))).spec()
