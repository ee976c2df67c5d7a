"""The page in a real browser: nothing is wider than the screen, dark is dark, and the browser has nothing to say."""

import json
import re
import shutil
import subprocess

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")]
DARK = 0
LIGHT = 1
# The page lies in a frame as wide as the screen. Its own policy lets no script run, so the frame's owner measures it.
OWNER = """<!doctype html><title>not loaded</title><iframe id="frame" width="{width}" height="900"></iframe><script>
const frame = document.getElementById("frame");
frame.onload = () => {{
  const page = frame.contentDocument;
  for (const folded of page.querySelectorAll("details")) folded.open = true;
  const style = frame.contentWindow.getComputedStyle(page.body);
  const shown = page.documentElement.clientWidth, outside = (part) => part.getBoundingClientRect().right > shown + 1;
  const wide = [...page.body.querySelectorAll(":not(.scroll *, pre *)")].filter(outside).map((part) => part.outerHTML);
  const isLarge = (svg) => svg.clientWidth > 2 * svg.viewBox.baseVal.width;
  const large = [...page.querySelectorAll("figure svg")].filter(isLarge).map((svg) => svg.closest("figure").id);
  document.title = "measured " + JSON.stringify({{shown, wide, large, ink: style.color, paper: style.backgroundColor}});
}};
frame.srcdoc = {page};
</script>"""


@pytest.fixture(scope="module")
def page(example, tmp_path_factory):
    return example.report(tmp_path_factory.mktemp("out") / "report.html").read_text("utf-8")


def measured(page, width, scheme, folder):
    """What the browser measures of the page, and the lines of its console."""
    owner = folder / f"{width}-{scheme}.html"
    owner.write_text(OWNER.format(width=width, page=json.dumps(page).replace("</", "<\\/")), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    flags += [f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, owner.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    (title,) = re.findall(r"<title>measured (.*?)</title>", done.stdout)
    return json.loads(title), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def brightness(color):
    red, green, blue = map(int, re.findall(r"\d+", color)[:3])
    return (red + green + blue) / 3


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_a_screen_shows_the_whole_width_in_its_own_colours(page, width, scheme, tmp_path):
    seen, console = measured(page, width, scheme, tmp_path)
    assert seen["shown"] == pytest.approx(width, abs=20)
    assert seen["wide"] == []
    assert seen["large"] == []  # letters of twice their size, as a picture alone in its row had
    assert console == []
    assert (brightness(seen["ink"]) < brightness(seen["paper"])) == (scheme == LIGHT)
