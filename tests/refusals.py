"""What every refusal promises: an error of the user's, whose message has certain words."""

import contextlib

import pytest
from doors import UsageError


def assert_words(message, words):
    """Each of `words`, a text with spaces between them, is in the message."""
    for word in words.split():
        assert word in message, message


@contextlib.contextmanager
def refused(words):
    """What is done in this block raises a `UsageError` with these words."""
    with pytest.raises(UsageError) as raised:
        yield
    message = str(raised.value)
    assert_words(message, words)
