"""Reading the rows of tagged sentences: a list of words, and a list with a tag for each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncsgd.data.documents import without_surrogates
from asyncsgd.data.kinds import Kind
from asyncsgd.data.labels import Names, label_name
from asyncsgd.errors import UsageError
from asyncsgd.tasks import spans


def read_tagged(where: str, columns: Mapping[str, str], row: tuple[Any, ...], names: Names) -> tuple[str, str]:
    """A sentence as a text, its words with single spaces between them, and its tags as a JSON list.

    A space inside a word becomes a no-break space.
    """
    tokens, tags = row
    for (column, flag), value in zip(columns.items(), (tokens, tags or []), strict=True):
        is_list = isinstance(value, list)
        if is_list and flag == "--tokens-column":
            is_list = all(isinstance(token, str) for token in value)
        if not is_list:
            raise UsageError(f"{where} column {column!r} holds no list of words or of tags; choose another with {flag}")
    if tags is not None and len(tokens) != len(tags):
        raise UsageError(f"{where} {len(tokens)} words and {len(tags)} tags; every word needs one tag: mend the row")
    words = [without_surrogates(token).replace(" ", "\u00a0") for token in tokens]
    sentence = " ".join(words)
    if not sentence.strip():
        return "", ""
    tag_names = [label_name(where, columns, tag, names) for tag in tags or ()]
    if not any(tag_names):
        return sentence, ""
    for tag in tag_names:
        try:
            spans.split_tag(tag)
        except ValueError as error:
            hint = "; numbers need names, in labels.json beside the files" if tag.isdecimal() else ""
            raise UsageError(f"{where} {error}{hint}") from error
    return sentence, json.dumps(tag_names)


TAGGED = Kind(read_tagged, json.loads, "sentence", "words", "word", "tag", takes=("hub:NAME",))
