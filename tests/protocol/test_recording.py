"""A recording on a disk that does not keep it."""

import shutil

import pytest

from capflow.capture.result import RequestDone
from capflow.errors import CapflowError
from capflow.protocol import recording
from capflow.protocol.recording import Recorder
from tests.kit.frames import make_frame, make_model


def done(request):
    return RequestDone("engine-1", request, "stop", 4, 4, 4, 4, ())


def record(recorder, seq, request, *, sync=True):
    recorder.frame(make_frame([(request, 4, 0, 4)], seq=seq))
    recorder.done(done(request), sync=sync)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("gone", ["*.spool", "."])
def test_a_recording_that_somebody_removed_is_an_error_from_then_on(tmp_path, gone, sync):
    path = tmp_path / "rec"
    recorder = Recorder(path)
    recorder.open()
    recorder.engine("engine-1", make_model())
    record(recorder, 1, "r1")
    if gone == ".":
        shutil.rmtree(path)
    else:
        for file in path.glob(gone):
            file.unlink()
    for seq, request in ((2, "r2"), (3, "r3")):
        with pytest.raises(CapflowError, match=r"rec is gone: got No such file or directory; start .* again"):
            record(recorder, seq, request, sync=sync)
    with pytest.raises(CapflowError, match="rec is gone"):
        recorder.close()
    with Recorder(path) as again:
        record(again, 4, "r4")
    assert [item.request for item in recording.read(path) if isinstance(item, RequestDone)] == ["r4"]


def test_a_recording_that_cannot_be_read_is_given_back(tmp_path, monkeypatch):
    """Whoever opens it next, in this process or another, is not told that it is in use."""
    path = tmp_path / "rec"
    with Recorder(path) as recorder:
        record(recorder, 1, "r1")

    def fails(spool):
        raise CapflowError("unreadable")

    with monkeypatch.context() as patch:
        patch.setattr(recording.Spool, "heads", fails)
        with pytest.raises(CapflowError, match="unreadable"):
            Recorder(path).open()
    with Recorder(path) as again:
        record(again, 2, "r2")
    assert [item.request for item in recording.read(path) if isinstance(item, RequestDone)] == ["r1", "r2"]
