"""The links of a built site: `python tests/site_links.py FOLDER` prints those that lead nowhere.

It prints, too, what a page would load from another host, such as a font, for the site is to be read without a network;
and what Python says of an object or a field that nobody has described. Where it prints something, it ends with 1.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

UNDESCRIBED = re.compile(r"\bat 0x[0-9a-f]{6,}|Alias for field number \d+")


class Links(HTMLParser):
    """What a page links to, what it loads, and the names of its places."""

    def __init__(self, page):
        super().__init__()
        self.targets = []
        self.loaded = []
        self.places = {""}
        text = page.read_text("utf-8")
        self.undescribed = UNDESCRIBED.findall(text)
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.places.add(given.get("id"))
        for name in ("href", "src"):
            if name in given:
                of = self.targets if tag == "a" else self.loaded
                of.append(given[name])


def wrong_links(folder):
    """A line for each link of the pages in `folder` that leads nowhere, and for what comes from another host."""
    pages = {page.resolve(): Links(page) for page in sorted(Path(folder).rglob("*.html"))}
    wrong = []
    for page, links in pages.items():
        name = page.relative_to(Path(folder).resolve())
        wrong.extend(f"{name} says {words}" for words in links.undescribed)
        for link in dict.fromkeys((*links.targets, *links.loaded)):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in links.loaded and parts.scheme != "data":
                    wrong.append(f"{name} loads {link}")
                continue
            target = page
            if parts.path:
                target = (page.parent / unquote(parts.path)).resolve()
            if target in pages:
                places = pages[target].places
            else:
                places = {"", parts.fragment}
            if not target.is_file() or unquote(parts.fragment) not in places:
                wrong.append(f"{name} links to {link}")
    return wrong


if __name__ == "__main__":
    wrong = wrong_links(sys.argv[1])
    for line in wrong:
        print(line)
    sys.exit(1 if wrong else 0)
