"""An engine and a hub over TCP with keys: rows, results and actions, and what each key may not do."""

import threading

import pytest

import capflow
from capflow.capture.spec import CaptureSpec
from capflow.errors import UsageError
from capflow.steering.action import Abort, ActionApplied
from capflow.transport.client import Client
from capflow.transport.keys import AllowList, find_key, read_key, write_key
from capflow.transport.zap import new_key
from tests.kit.engines import GREEDY, engine, prompts
from tests.kit.hubs import Recorder, running_hub

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(300)]


class Counting(Recorder):
    """Counts rows without knowing which they are."""

    def on_frame(self, frame):
        for chunk in frame.chunks():
            self.rows[chunk.request.id] += chunk.rows.shape[0] * chunk.rows.shape[1]


def test_rows_results_and_actions_travel_with_keys(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("CAPFLOW_KEY", raising=False)
    keys = tmp_path / "capflow" / "keys"
    keys.mkdir(parents=True, mode=0o700)
    for name, rights in (("hub", ()), ("gpu", ("capture", "read")), ("ann", ("steer",))):
        write_key(keys, name, new_key())
        if rights:
            AllowList(keys).allow(read_key(find_key(name)).public, rights, name)
    consumer = Counting(spec=CaptureSpec({"post_block": [1]}))
    with running_hub("tcp://127.0.0.1:0", consumer, key="hub") as hub:
        with pytest.raises(UsageError, match="--key: got none"):
            capflow.LLM(tiny, hub=hub.address, skip_tokenizer_init=True)
        with engine(tiny, hub=hub.address, key="gpu", in_process=False) as llm:
            settings = llm.capflow_settings
            assert settings.hubs[0].key == str(keys / "gpu.key")
            assert read_key(find_key("gpu")).secret not in repr(settings)
            params = capflow.sampling_params(id="mine", max_tokens=5, **GREEDY)
            (output,) = llm.generate(prompts((7,)), params, use_tqdm=False)
            assert output.capture_results["recorder"].status == "ok"
            assert consumer.rows["mine"] == 7 + 5 - 1
            outcomes = []

            def abort():
                with Client(hub.address, key="ann") as client:
                    while not (outcomes and isinstance(outcomes[-1], ActionApplied)):
                        outcomes.append(client.act(Abort("long"), timeout=60))

            thread = threading.Thread(target=abort)
            thread.start()
            params = capflow.sampling_params(id="long", max_tokens=240, **GREEDY)
            (output,) = llm.generate(prompts((7,)), params, use_tqdm=False)
            thread.join(60)
            assert isinstance(outcomes[-1], ActionApplied)
            assert output.outputs[0].finish_reason == "abort"
        assert hub.counts.protocol_errors == 0
