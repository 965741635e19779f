"""Writes pairs.jsonl: minimal pairs of grammatical and ungrammatical English (number agreement).

python tests/data/lm_eval/make.py
"""

import json
from pathlib import Path

NOUNS = "river stone city table window letter engine garden teacher number machine sailor".split()
VERBS = ("moves", "move"), ("opens", "open"), ("writes", "write"), ("finds", "find")


def pairs() -> list[dict[str, object]]:
    """The grammatical continuation is `choices[label]`."""
    found: list[dict[str, object]] = []
    for index, noun in enumerate(NOUNS):
        for plural in (False, True):
            singular_verb, plural_verb = VERBS[index % len(VERBS)]
            right, wrong = (plural_verb, singular_verb) if plural else (singular_verb, plural_verb)
            choices = [right, wrong] if (index + plural) % 2 else [wrong, right]
            question = f"The {noun}{'s' if plural else ''} near the old bridge"
            found.append({"question": question, "choices": choices, "label": choices.index(right)})
    return found


if __name__ == "__main__":
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs())
    Path(__file__).with_name("pairs.jsonl").write_text(lines, encoding="utf-8")
