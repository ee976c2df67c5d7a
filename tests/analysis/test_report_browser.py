"""The report's page in a real browser, headless: nothing overflows, every picture shows, no complaints."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from analysis.report.page import page, render

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chromium-headless-shell")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None, reason="no browser: apt-get install chromium (any of " + ", ".join(NAMES) + " on PATH)"
    ),
]

MEASURE = """
const told = [];
for (const frame of document.querySelectorAll('iframe')) {
  const page = frame.contentDocument, root = page.documentElement, width = root.clientWidth;
  const view = frame.contentWindow;
  const scrolls = node => {
    const inside = node.closest('.scroll, pre');
    return inside && view.getComputedStyle(inside).overflowX !== 'visible';
  };
  const beyond = [...page.body.querySelectorAll('*')].filter(node => {
    const box = node.getBoundingClientRect();
    return box.width > 0 && (box.right > width + 0.5 || box.left < -0.5) && !scrolls(node) && !node.closest('svg');
  });
  const outer = [...page.querySelectorAll('.scroll, pre')].filter(
    node => node.getBoundingClientRect().right > width + 0.5);
  const pictures = [...page.querySelectorAll('svg[role=img]')].map(svg => {
    const box = svg.getBoundingClientRect(), drawn = svg.getBBox();
    const cut = [...svg.querySelectorAll('text')].filter(text => {
      const own = text.getBoundingClientRect();
      return own.left < box.left - 2 || own.right > box.right + 2
        || own.top < box.top - 2 || own.bottom > box.bottom + 2;
    });
    const texts = cut.map(text => text.textContent);
    const boxes = [...svg.querySelectorAll('text')].filter(text => text.textContent.trim()).map(text => {
      const own = text.getBoundingClientRect(), margin = own.height / 5;  // a box holds more than the ink
      return {text: text.textContent, left: own.left + 1, right: own.right - 1, top: own.top + margin,
        bottom: own.bottom - margin};
    });
    const over = boxes.flatMap((a, place) => boxes.slice(place + 1).filter(b =>
      a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom).map(b => [a.text, b.text]));
    const scale = box.width / svg.viewBox.baseVal.width;
    const sizes = [...svg.querySelectorAll('text, tspan')].filter(text => text.textContent.trim())
      .map(text => parseFloat(view.getComputedStyle(text).fontSize) * scale);
    const least = Math.min(...sizes);
    return {width: box.width, height: box.height, drawn: drawn.width * drawn.height, cut: texts, least, over};
  });
  const light = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(part => {
      const c = part / 255;
      return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = node => {
    for (let up = node; up; up = up.parentElement) {
      const colour = view.getComputedStyle(up).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  const faint = [];
  for (const node of page.querySelectorAll('h1, h2, h3, p, td, th, dt, dd, li, a, span, figcaption, code, text')) {
    const style = view.getComputedStyle(node);
    const ink = node.namespaceURI.endsWith('svg') ? style.fill : style.color;
    const [one, two] = [light(ink), light(behind(node))];
    const contrast = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    // the square beside an algorithm's name, in its colour, is no text
    const coloured = node.namespaceURI.endsWith('svg') && (node.getAttribute('style') || '').includes('--series');
    if (contrast < 4.5 && !coloured && node.textContent.trim())
      faint.push([node.tagName, node.textContent.trim().slice(0, 40), contrast]);
  }
  told.push({
    clientWidth: width, scrollWidth: root.scrollWidth, height: root.scrollHeight,
    beyond: beyond.map(node => node.outerHTML.slice(0, 120)), outer: outer.length, pictures,
    images: [...page.images].map(image => image.naturalWidth), faint: faint.slice(0, 5),
    background: light(view.getComputedStyle(page.body).backgroundColor), title: page.title,
    tables: page.querySelectorAll('table').length,
  });
}
document.body.textContent = '';
const out = document.createElement('pre');
out.id = 'measured';
out.textContent = JSON.stringify(told);
document.body.append(out);
"""


def browse(arguments, tmp_path):
    """Run the browser once, with a profile of its own; returns the document it ended with and what it complained of."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=20000"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, re.findall(r".*CONSOLE.*", done.stderr)


def measure(tmp_path, *pages, dark=False, widths=(1280, 400)):
    """What a browser makes of the pages at each width, and what it complains of.

    A page is as it is, in a frame; the script is outside it.
    """
    opened = [text.replace("<details", "<details open") for text in pages]  # what is folded has to fit too
    frames = "".join(
        f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{html.escape(text, quote=True)}"></iframe>'
        for text in opened
        for width in widths
    )
    wrapper = tmp_path / "wrapper.html"
    script = f"<script>addEventListener('load', () => {{ {MEASURE} }})</script>"
    wrapper.write_text(f'<!DOCTYPE html><meta charset="utf-8"><body>{frames}{script}', encoding="utf-8")
    scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    dom, complaints = browse([*scheme, "--window-size=1400,1000", "--dump-dom", wrapper.as_uri()], tmp_path)
    found = re.search(r'<pre id="measured">(.*?)</pre>', dom, flags=re.DOTALL)
    assert found, dom[-500:]
    frame = iter(json.loads(html.unescape(found[1])))
    return [{width: next(frame) for width in widths} for _ in pages], complaints


def long_names(made):
    """The same results with names that no line can hold."""
    name = "a_name_without_any_place_to_break_it_" * 4
    runs = tuple(dataclasses.replace(run, remark=name) for run in made.runs)
    arms = tuple(dataclasses.replace(arm, label=f"{arm.label} {name}") for arm in made.arms)
    headline = dataclasses.replace(made.headlines[0], text=name, details=(name,))
    tests = tuple(dataclasses.replace(row, comparison=f"{name} vs sync", endpoint_label=name) for row in made.tests)
    trust = tuple(dataclasses.replace(item, value=name, detail=name) for item in made.trust)
    tiles = tuple(dataclasses.replace(tile, note=name, text="-1,234.56789") for tile in made.tiles)
    left_out = tuple(dataclasses.replace(item, name=name) for item in made.left_out)
    return dataclasses.replace(
        made,
        title=name,
        runs=runs,
        arms=arms,
        headlines=(headline,),
        tests=tests,
        trust=trust,
        tiles=tiles,
        left_out=left_out,
        command=f"python -m analysis.report {name}",
    )


def check(measured):
    for width, found in measured.items():
        assert found["clientWidth"] == width
        assert found["scrollWidth"] == width, found["beyond"][:5]
        assert found["beyond"] == []
        assert found["outer"] == 0
        assert all(picture["width"] > 200 and picture["height"] > 80 for picture in found["pictures"])
        assert all(picture["drawn"] > 10_000 for picture in found["pictures"])
        assert [picture["cut"] for picture in found["pictures"] if picture["cut"]] == []
        assert [picture["over"] for picture in found["pictures"] if picture["over"]] == []  # text on text
        assert all(picture["least"] >= 11 for picture in found["pictures"])  # pixels
        assert all(found["images"])
        assert found["faint"] == []


def test_nothing_overflows_every_picture_shows_and_all_text_has_contrast_on_a_desktop_and_a_phone(
    example_page, tmp_path
):
    (measured,), complaints = measure(tmp_path, example_page)
    check(measured)
    for found in measured.values():
        assert found["title"] == "synthetic: report"
        assert len(found["pictures"]) == example_page.count("<figure") > 30
        assert found["tables"] == example_page.count("<table>")
        assert found["background"] > 0.8
    assert measured[400]["height"] > measured[1280]["height"]  # one picture per line
    assert complaints == []


def test_a_dark_page_is_dark_and_its_text_and_pictures_are_readable(example_page, tmp_path):
    (measured,), _ = measure(tmp_path, example_page, dark=True)
    check(measured)
    assert all(found["background"] < 0.05 for found in measured.values())


def test_an_empty_study_and_endless_names_overflow_nothing(empty, lean, tmp_path):
    texts = [render(page(made, Path("report.html"), Path("."))) for made in (empty, long_names(lean))]
    for measured in measure(tmp_path, *texts)[0]:
        for width, found in measured.items():
            assert (found["scrollWidth"], found["beyond"]) == (width, [])


def test_what_overflows_would_be_found_and_a_script_would_not_run_and_be_complained_of(empty, tmp_path):
    """That the measurement can fail, and that the page's policy holds."""
    text = render(page(empty, Path("report.html"), Path(".")))
    spoilt = '<p style="width: 1500px">wide</p><script>document.title = "run"</script></main>'
    (measured,), complaints = measure(tmp_path, text.replace("</main>", spoilt))
    assert measured[400]["scrollWidth"] > 400
    assert any("1500px" in node for node in measured[400]["beyond"])
    assert measured[400]["title"] == "synthetic: report"
    assert any("Content Security Policy" in line for line in complaints), complaints
