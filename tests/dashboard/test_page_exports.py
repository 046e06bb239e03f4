"""The page's sheet of exports in a real browser: links, pictures and files."""

from __future__ import annotations

import csv
import io
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
from playwright.sync_api import expect

from capflow.capture.site import Site
from capflow.probes.probe import Probe
from tests.dashboard.test_exports import get, table
from tests.kit.dashboards import open_dashboard
from tests.kit.frames import make_model
from tests.kit.pages import done, frame_of
from tests.kit.waiting import eventually

pytestmark = pytest.mark.browser

NORMS = np.random.default_rng(1).uniform(10, 20, (4, 120)).astype(np.float32)


def show(consumer, *requests):
    consumer.on_session("engine-1", make_model())
    for number, request in enumerate(requests):
        consumer.on_frame(frame_of(request, NORMS[:, : 120 - number], prompt=40, seq=number + 1))


def probes(tmp_path):
    path = tmp_path / "probes.safetensors"
    Probe.make(Site(1, "post_block"), np.eye(8)[3:4], names=("truth",), threshold=15.0).save(path)
    return (str(path),)


def downloaded(page, locator):
    """Click and return the name and the content of the file that the browser saves."""
    with page.expect_download() as waiting:
        locator.click()
    return waiting.value.suggested_filename, waiting.value.path().read_bytes()


def pixels_of(page, png):
    """Return the pixels of a PNG, [height, width, rgb]."""
    size, data = page.evaluate(
        """async (bytes) => {
          const bitmap = await createImageBitmap(new Blob([new Uint8Array(bytes)], { type: "image/png" }));
          const context = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d");
          context.drawImage(bitmap, 0, 0);
          const { data } = context.getImageData(0, 0, bitmap.width, bitmap.height);
          return [[bitmap.height, bitmap.width], [...data]];
        }""",
        list(png),
    )
    return np.array(data, np.uint8).reshape(*size, 4)[..., :3]


def test_the_list_is_saved_as_it_is_filtered_and_sorted(opened, tmp_path):
    with open_dashboard(probes=probes(tmp_path)) as consumer:
        window = opened(consumer, "#/requests")
        page = window.page
        show(consumer, "r1", "r2", "other", "=r3")
        consumer.on_request_done(done("r1", prompt=40))
        expect(page.locator("#list-count")).to_have_text("4")
        expect(page.locator("#requests .row[data-key='1']")).to_contain_text("done")
        page.keyboard.press("e")
        _, everything = downloaded(page, page.locator("#export [data-name=list]"))
        page.keyboard.press("Escape")
        page.fill("#filter", "r -other")
        page.locator("#requests .head button", has_text="Tokens").click()
        expect(page.locator("#list-count")).to_have_text("3 of 4")
        page.locator("#export-open").click()
        expect(page.locator("#export")).to_contain_text("3 of 4 requests, as filtered")
        name, content = downloaded(page, page.locator("#export [data-name=list]"))
        expect(page.locator("#export [data-name=list]")).to_have_text("CSV ✓")
        server = table(get(consumer, "/api/requests.csv")[2])
    assert name == "capflow-requests.csv"
    assert table(content)["id"] == ["r1", "r2", "'=r3"]
    mine = table(everything)
    assert list(mine) == list(server)
    for column in mine:
        if column.startswith("truth"):
            assert [float(cell) for cell in mine[column]] == [float(cell) for cell in server[column]]
        else:
            assert mine[column] == server[column]
    rows = list(csv.reader(io.StringIO(content.decode(), newline="")))
    assert {len(row) for row in rows} == {len(rows[0])}


def test_the_request_is_saved_as_csv_and_parquet(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        show(consumer, "r1")
        window.wait_tokens(120)
        page.keyboard.press("e")
        name, content = downloaded(page, page.locator("#export [data-name=csv]"))
        assert name == "capflow-r1.csv"
        read = table(content)
        packed_name, packed = downloaded(page, page.locator("#export [data-name=parquet]"))
        assert packed_name == "capflow-r1.parquet"
    np.testing.assert_array_equal(np.array(read["norm post_block:3"], np.float32), NORMS[3])
    np.testing.assert_array_equal(pq.read_table(io.BytesIO(packed))["norm post_block:3"].to_numpy(), NORMS[3])


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.long)])
def test_pictures_hold_what_is_shown(opened, tmp_path, scheme):
    with open_dashboard(probes=probes(tmp_path)) as consumer:
        window = opened(consumer, color_scheme=scheme)
        page = window.page
        show(consumer, "r1")
        window.wait_coloured()
        page.keyboard.press("e")
        pictures = {}
        for shot in ("Text", "Curves", "Heatmap"):
            name, content = downloaded(page, page.locator(f"#export [data-name={shot}]"))
            assert name == f"capflow-r1-{shot.lower()}.png"
            pictures[shot] = pixels_of(page, content)
        page.keyboard.press("Escape")
        cells = window.cells(4, 120)[..., :3].reshape(-1, 3)
        backs = page.evaluate(
            "[...document.querySelectorAll('#text .t')].map((token) => getComputedStyle(token).backgroundColor)"
        )
    colours = {name: set(map(tuple, picture.reshape(-1, 3).tolist())) for name, picture in pictures.items()}
    assert set(map(tuple, cells.tolist())) <= colours["Heatmap"]
    assert {tuple(map(int, re.findall(r"\d+", back)[:3])) for back in backs} <= colours["Text"]
    assert all(picture.shape[0] > 60 and picture.shape[1] > 300 for picture in pictures.values())
    assert len(colours["Curves"]) > 3
    corner = (255, 255, 255) if scheme == "light" else (20, 27, 33)
    assert all(tuple(picture[1, 1]) == corner for picture in pictures.values())


def test_a_picture_has_the_name_of_the_request_that_it_shows(opened):
    """The page follows the newest request, also behind the sheet."""
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        show(consumer, "r1")
        window.wait_coloured()
        page.keyboard.press("e")
        expect(page.locator("#export-link")).to_have_value(re.compile("r1"))
        consumer.on_request_done(done("r1", prompt=40))
        consumer.on_frame(frame_of("r2", NORMS, prompt=40, seq=2))
        expect(page.locator("#request-id")).to_have_text("r2")
        window.wait_coloured()
        name, _ = downloaded(page, page.locator("#export [data-name=Text]"))
    assert name == "capflow-r2-text.png"


def test_the_link_opens_the_same_view(opened):
    with open_dashboard() as consumer:
        window = opened(consumer)
        page = window.page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        show(consumer, "r1", "r2")
        window.choose("r1")
        window.wait_tokens(120)
        window.click_token(55)
        page.keyboard.press("e")
        assert "token=" not in page.locator("#export-link").input_value()
        page.locator("#export [data-name=link]").click()
        expect(page.locator("#export [data-name=link]")).to_have_text("Copy link ✓")
        link = page.evaluate("navigator.clipboard.readText()")
        page.goto("about:blank")
        page.goto(link)
        expect(page.locator("#request-id")).to_have_text("r1")
        expect(page.locator("#token-facts")).to_contain_text("55, generated")


def test_the_sheet_is_reached_by_keys_and_fits(opened):
    with open_dashboard() as consumer:
        window = opened(consumer, viewport={"width": 320, "height": 640})
        page = window.page
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(frame_of("long-" * 60, NORMS, prompt=40))
        window.wait_tokens(120)
        page.keyboard.press("e")
        expect(page.locator("#export")).to_be_visible()
        sheet = "[...document.querySelectorAll('#export, #export *')].map((one) => one.getBoundingClientRect().right)"
        eventually(lambda: max(page.evaluate(sheet)) <= 320)
        assert window.findings() == []
        page.keyboard.press("j")
        page.keyboard.press("Escape")
        expect(page.locator("#export")).to_be_hidden()
        page.keyboard.press("?")
        expect(page.locator("#help")).to_contain_text("export")
