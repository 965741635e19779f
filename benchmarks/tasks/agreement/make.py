"""Writes pairs.jsonl: 400 minimal pairs of English number agreement, the same bytes every time.

python benchmarks/tasks/agreement/make.py

Four phenomena with 25 frames each. Every frame gives four pairs: the word that the last one agrees with in
the singular and in the plural, each with a distracting noun of the same number ("match") and of the other one
("mismatch"). A model that looks at the distracting noun alone is right on every match and wrong on every
mismatch, so it scores one half, as guessing does.
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

NUMBERS = "singular", "plural"
BE = {"present": ("is", "are"), "past": ("was", "were"), "perfect": ("has", "have")}

# The verb agrees with the first noun across a prepositional phrase: "The keys to the cabinet" is / are.
PREPOSITIONAL = """
    key to cabinet present | picture of mountain present | label on bottle past | road to village past
    book about river perfect | door of house present | letter from lawyer past | price of ticket perfect
    teacher of student present | bridge over canal past | tree behind wall perfect
    window in tower present | owner of shop past | author of poem perfect | driver of truck present
    name of street past | song about soldier perfect | lamp near chair present | card in drawer past
    rule of game perfect | engine of plane present | story about king past | map of island perfect
    leader of group present | result of test past
"""
# The verb agrees with the first noun across a relative clause: "The author that the guards like" is / are.
RELATIVE = """
    author guard like present | senator voter trust past | doctor nurse know perfect
    actor critic love present | farmer neighbor hate past | pilot passenger thank perfect
    singer fan admire present | lawyer client call past | manager worker fear perfect
    student teacher praise present | artist collector visit past | player coach want perfect
    writer editor help present | dancer director choose past | officer sailor follow perfect
    mayor citizen support present | baker customer see past | chef waiter respect perfect
    painter student watch present | judge reporter question past | hunter ranger meet perfect
    poet reader remember present | engineer owner pay past | scientist journalist need perfect
    driver tourist find present
"""
# The reflexive agrees with the first noun: "The kings near the queen praised" himself / themselves.
REFLEXIVE = """
    king queen praised | father daughter blamed | brother sister hurt | uncle aunt introduced
    prince princess hid | waiter waitress burned | actor actress saw | husband wife defended
    son mother washed | monk nun fed | boy girl dressed | man woman helped | nephew niece prepared
    lord lady served | grandfather grandmother told | mother son trusted | daughter father entertained
    sister brother protected | aunt uncle taught | princess prince admired | queen king surprised
    girl boy found | woman man paid | niece nephew warned | actress actor congratulated
"""
# The noun agrees with its determiner, whatever the subject is: "The teachers bought this old" book / books.
DETERMINER = """
    teacher bought old book | farmer sold young horse | doctor found small key | artist painted green tree
    lawyer read long letter | student liked new song | sailor saw big ship | driver washed red car
    king built strong tower | writer lost short story | engineer tested heavy machine
    nurse carried white box | guard opened wooden door | singer kept golden ring
    hunter followed wild bird | tourist visited famous island | cook tasted sweet apple
    player wanted expensive ticket | worker moved large stone | boy threw round ball | girl wore blue hat
    soldier crossed narrow bridge | judge asked simple question | pilot flew fast plane
    painter cleaned broken window
"""
FEMININE = set(
    "queen mother daughter sister aunt princess girl woman niece actress wife lady nun waitress".split()
)
IRREGULAR = {"man": "men", "woman": "women", "wife": "wives", "lady": "ladies", "story": "stories"}
AGREEING = ("this", "these"), ("that", "those")


def with_s(word: str) -> str:
    return word + ("es" if word.endswith(("ch", "ss", "x")) else "s")


def noun(word: str, number: int) -> str:
    """The singular (0) or the plural (1)."""
    return IRREGULAR.get(word, with_s(word)) if number else word


def present(verb: str, number: int) -> str:
    """A verb of the present tense that agrees with a noun of that number."""
    return verb if number else with_s(verb)


def frames(text: str) -> list[list[str]]:
    return [frame.split() for line in text.strip().splitlines() for frame in line.split("|")]


def prepositional(frame: list[str], number: int, other: int, _place: int) -> tuple[str, tuple[str, str]]:
    head, preposition, distractor, tense = frame
    return f"The {noun(head, number)} {preposition} the {noun(distractor, other)}", BE[tense]


def relative(frame: list[str], number: int, other: int, _place: int) -> tuple[str, tuple[str, str]]:
    head, distractor, verb, tense = frame
    clause = f"the {noun(distractor, other)} {present(verb, other)}"
    return f"The {noun(head, number)} that {clause}", BE[tense]


def reflexive(frame: list[str], number: int, other: int, _place: int) -> tuple[str, tuple[str, str]]:
    head, distractor, verb = frame
    singular = "herself" if head in FEMININE else "himself"
    return f"The {noun(head, number)} near the {noun(distractor, other)} {verb}", (singular, "themselves")


def determiner(frame: list[str], number: int, other: int, place: int) -> tuple[str, tuple[str, str]]:
    subject, verb, adjective, thing = frame
    word = AGREEING[place % 2][number]
    return f"The {noun(subject, other)} {verb} {word} {adjective}", (thing, noun(thing, 1))


PHENOMENA = {
    "prepositional": (PREPOSITIONAL, prepositional),
    "relative": (RELATIVE, relative),
    "reflexive": (REFLEXIVE, reflexive),
    "determiner": (DETERMINER, determiner),
}


def pairs() -> Iterator[dict[str, object]]:
    """Every pair; the grammatical continuation is `choices[label]`, as often the first as the second."""
    for phenomenon, (text, make) in PHENOMENA.items():
        for place, frame in enumerate(frames(text)):
            for number, match in product((0, 1), (True, False)):
                context, forms = make(frame, number, number if match else 1 - number, place)
                # Turned from frame to frame, so that the label tells neither number nor match.
                turned = (place + number + match) % 2
                choices = list(forms)[::-1] if turned else list(forms)
                yield {
                    "phenomenon": phenomenon,
                    "number": NUMBERS[number],
                    "distractor": "match" if match else "mismatch",
                    "context": context,
                    "choices": choices,
                    "label": choices.index(forms[number]),
                }


if __name__ == "__main__":
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs())
    Path(__file__).with_name("pairs.jsonl").write_text(lines, encoding="utf-8")
