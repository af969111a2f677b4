from __future__ import annotations

import pytest

from services.tokenizer.refusal_text import without_quotes


@pytest.mark.parametrize(
    ("reason", "form", "told"),
    [
        ("Invalid type: secret", '{"type": "secret"}', "Invalid type: …"),
        ('Unimplemented keys: ["uniqueItems"]', '{"uniqueItems": true}', 'Unimplemented keys: ["uniqueItems"]'),
        (
            "nested too deep, at $.properties.address",
            '{"properties": {"address": 1}}',
            "nested too deep, at $.properties.…",
        ),
        ("at most 100000 items", '{"maxItems": 200000}', "at most 100000 items"),
        # A number may be a card's.
        ("a count of 4111222233334444 is too large", "a{4111222233334444}", "a count of … is too large"),
        # The library quotes a part of a word, and of several words.
        ('found "ecret" (at "ecret wishes")', "start: secret wishes", 'found "…" (at "… …")'),
        ("unknown name: Größe", "start: Größe", "unknown name: …"),
        ("no text fits", "(?!)", "no text fits"),
    ],
)
def test_a_reason_keeps_its_words_and_leaves_out_those_of_the_form(reason: str, form: str, told: str) -> None:
    assert without_quotes(reason, form) == told
