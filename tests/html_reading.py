"""Reading a page: its tags and text, and what a browser would load for it."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Parsed(HTMLParser):
    """The tags, attributes and text of a page; ValueError where tags do not match."""

    VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(source)
        self.close()
        if self.open:
            raise ValueError(f"not closed: {self.open}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            raise ValueError(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def said(self) -> str:
        return " ".join(" ".join(self.text).split())


def outside(source: str) -> list[str]:
    """What a browser would load or run."""
    found = []
    for tag, attributes in Parsed(source).tags:
        if tag in ("script", "iframe", "object", "embed", "img", "image", "base", "form"):
            found.append(tag)
        for name, value in attributes.items():
            local = (value or "").startswith(("#", "data:"))
            if name in ("src", "href", "xlink:href", "srcset", "action", "data") and not local:
                found.append(f"{name}={value}")
            if name.startswith("on"):
                found.append(name)
    found += [each for each in re.findall(r"url\(([^)]*)\)", source) if not each.startswith("#")]
    return found + re.findall(r"@import|@font-face|https?://", source)
