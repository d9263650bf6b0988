"""The report: its content, the scripts it must not run, and that it requests nothing from outside."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from vae.evaluation.page import MAX_SIDE, write_report
from vae.evaluation.results import LatentFacts, Protocol, Results, Sample, SizeResult, VaeResult
from vae.evaluation.tables import number_column

EVIL = "<script>alert(1)</script>.png"
QUOTES = '" onerror="alert(1)" \' onload=\'alert(1).png'
WHY_NO_LPIPS = "no <weights> of VGG: fetch them"
WHY_NO_PEAK = "not measured on a CPU"


class Page(HTMLParser):
    """A page as a browser parses it: elements with attributes, text, contents of scripts and styles."""

    def __init__(self, html: str):
        super().__init__()
        self.html, self.elements, self.text, self.raw, self._open = html, [], [], {}, None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open:
            self.raw.setdefault(self._open, []).append(data)
        else:
            self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def shown(self):
        return " ".join(" ".join(self.text).split())


def draw_image(path, side, seed):
    values = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return path


def sample(folder, name, number, side, why, channels=2):
    folder = folder / "samples"
    folder.mkdir(exist_ok=True)
    latents = [folder / f"{number}_latent_{channel}.png" for channel in range(channels)]
    for path in latents:
        Image.fromarray(np.full((8, 8), 99, dtype=np.uint8)).save(path)
    return Sample(
        name=name,
        original=draw_image(folder / f"{name.count('<')}_original.png", side, 1),
        recon=draw_image(folder / f"{number}_recon.png", side, number),
        error=draw_image(folder / f"{number}_error.png", side, number + 50),
        latents=latents,
        metrics={"psnr": 21.25, "ssim": 0.5, "ms_ssim": None, "lpips": None},
        why=why,
    )


def vae(folder, name, number, psnr, side=24):
    values = {"psnr": psnr, "psnr_alpha": None, "ssim": 0.75, "ms_ssim": 0.875, "lpips": None, "rfid": 4.5}
    small = values | {"ms_ssim": None if name == "second" else 0.875}  # for one VAE only
    per_image = {EVIL: {**values, "psnr": 20.0}, QUOTES: {**values, "psnr": 30.0}}
    sizes = [
        SizeResult(size, row, per_image, 12.5 + number, 7.25, None, None)
        for size, row in ((256, values), (512, small))
    ]
    return VaeResult(
        name=name,
        path=f"/models/{name}",
        kind="checkpoint",
        sizes=sizes,
        latents=LatentFacts(2, 8, [0.0, 0.25], [1.0, 0.001], 123.5, 0.02, [1], 0.5),
        samples=[
            sample(folder, EVIL, 10 * number, side, "worst"),
            sample(folder, QUOTES, 10 * number + 1, side, "best"),
        ],
        config={"channels": [8, 16], "z_channels": 2},
    )


def build_results(tmp_path):
    codec = vae(tmp_path, "JPEG 0.5 bit/px", 3, 40.0)
    codec.kind, codec.latents, codec.path = "codec", None, ""
    return Results(
        Protocol(f"data/{EVIL}", 2, (256, 512), "middle", "mode", "fp32", "CPU", 1, None, 0),
        {"torch": "2.15.0", "command": f"evaluate_vae.py {EVIL}", "date": "2030-01-01 00:00 UTC"},
        [vae(tmp_path, f"first {EVIL}", 1, 28.5), vae(tmp_path, "second", 2, 29.5), codec],
        {"lpips": WHY_NO_LPIPS, "peak memory": WHY_NO_PEAK, "second at 512": "gave NaN"},
        {f"broken {EVIL}": "truncated <file>"},
    )


@pytest.fixture
def results(tmp_path):
    return build_results(tmp_path)


def write_and_parse(results, folder) -> Page:
    write_report(results, folder / "report.html")
    return Page((folder / "report.html").read_bytes().decode("utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def page(folder) -> Page:
    return write_and_parse(build_results(folder), folder)


def cells(page, caption) -> list[list[str]]:
    """The texts of the table with this caption, row by row."""
    found = page.html[page.html.index(f"<caption>{caption}") :]
    rows = re.findall(r"<tr>(.*?)</tr>", found[: found.index("</table>")], re.S)
    return [
        [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[hd].*?</t[hd]>", row)]
        for row in rows
    ]


def test_names_are_escaped_everywhere(page):
    assert len(page.all("script")) == 1
    assert "alert" not in page.raw["script"][0]
    assert EVIL not in page.html
    assert EVIL in page.shown
    assert QUOTES in page.shown
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes), attributes
    alts = [image["alt"] for image in page.all("img")]
    assert f"{EVIL}, original" in alts
    assert f"{QUOTES}, reconstruction by second" in alts
    assert any(option.get("value") == "1" for option in page.all("option"))


def test_page_requests_nothing_from_outside(page, folder):
    for tag, attributes in page.elements:
        assert tag not in {"link", "iframe", "object", "embed", "base", "form", "use"}
        assert not {"srcset", "action", "data", "xlink:href"} & attributes.keys()
        if "src" in attributes:
            assert attributes["src"].startswith("data:image/")
        if "href" in attributes:
            link = attributes["href"]  # to a section, or to the file of an image
            assert link.startswith("#") or (folder / link).is_file()
    assert "url(" not in page.html
    assert "@import" not in page.html
    assert not re.search(r"\bfetch\(|XMLHttpRequest|import\(|innerHTML|eval\(", page.raw["script"][0])


def test_every_sample_is_in_a_slider_unchanged(page, folder):
    ranges = [one for one in page.all("input") if one.get("type") == "range"]
    assert len(ranges) == 2
    assert all(one["aria-label"] and one["min"] == "0" and one["max"] == "100" for one in ranges)
    layers = [image for image in page.all("img") if image.get("class") == "layer"]
    assert len(layers) == 2 * (1 + 3)  # each original only once
    recon = next(image for image in layers if image["alt"] == f"{EVIL}, reconstruction by second")
    content = base64.b64decode(recon["src"].partition(",")[2])
    with Image.open(io.BytesIO(content)) as embedded, Image.open(folder / "samples" / "20_recon.png") as file:
        assert np.array_equal(np.asarray(embedded.convert("RGB")), np.asarray(file))
    alts = [image["alt"] for image in page.all("img")]
    assert f"error map of second for {EVIL}" in alts
    assert f"latent channel 1 of second for {QUOTES}" in alts
    assert "1, dead" in page.shown


def test_middle_of_a_large_image_is_shown_at_full_size(results, tmp_path):
    large = vae(tmp_path, "second", 2, 29.5, side=MAX_SIDE + 40)
    results.vaes = [large]
    page = write_and_parse(results, tmp_path)
    layer = next(image for image in page.all("img") if image.get("class") == "layer")
    assert layer["width"] == layer["height"] == str(MAX_SIDE)
    content = base64.b64decode(layer["src"].partition(",")[2])
    with Image.open(io.BytesIO(content)) as embedded, Image.open(large.samples[0].original) as file:
        assert np.array_equal(np.asarray(embedded.convert("RGB")), np.asarray(file)[20:-20, 20:-20])
    assert f"the middle of {MAX_SIDE + 40} × {MAX_SIDE + 40}" in page.shown


def test_tables_contain_every_metric_at_each_size_and_mark_the_best_vae(page):
    for size in (256, 512):
        head, first, second, codec = cells(page, f"Quality, {size} × {size} px")
        assert [title.split()[0] for title in head[1:]] == ["PSNR", "SSIM", "MS-SSIM", "rFID"]
        assert first[1:] == ["28.50", "0.7500", "0.8750", "4.500"]  # equal values: none is best
        assert second[1] == "★ 29.50"
        assert second[3] == ("0.8750" if size == 256 else "missing")
        assert codec[1] == "40.00"  # higher, but codecs are not ranked
    head, first, second = cells(page, "Speed and memory, 512 × 512 px")
    assert second[1:] == ["★ 14.5", "7.25"]
    latents = cells(page, "Latents")[1][1:]
    assert latents == ["2", "8", "123.5", "0.02", "0 to 0.25", "0.001 to 1", "1 of 2 (1)"]
    hardest = cells(page, "PSNR of the hardest images")
    assert [row[1] for row in hardest[1:]] == ["20.00", "30.00"]
    for text in ("2.15.0", "8, 16", "/models/second", "truncated <file>", "2030-01-01"):
        assert text in page.shown


def test_what_is_missing_is_named_once_with_its_reason(page):
    assert sum("missing" in cell.get("class", "") for cell in page.all("td")) == 1
    for reason in (WHY_NO_LPIPS, WHY_NO_PEAK, "gave NaN"):
        assert page.shown.count(reason) == 1


def test_values_that_look_the_same_win_together():
    cells = number_column([1.001, 1.002, 0.5], lambda value: f"{value:.2f}", best=max)
    assert [cell.kind for cell in cells] == ["best", "best", "number"]
    assert [cell.kind for cell in number_column([1.0, None], best=max)] == ["number", "missing"]
    assert number_column([None])[0].text == "missing"
