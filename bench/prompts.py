"""Prompts of a given number of words, the same on every run."""

from __future__ import annotations

import random

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education"
)
_WORDS = _TEXT.split()


def prompt(seed: int, words: int = 100) -> str:
    """A sentence of words; different seeds share no beginning, so no cache of prefixes helps."""
    chosen = random.Random(seed).choices(_WORDS, k=words)
    return f"{' '.join(chosen).capitalize()}."


def copying(seed: int, words: int = 100) -> str:
    """A request whose answer repeats most of it."""
    return f"Correct the spelling of this text, and change nothing else:\n\n{prompt(seed, words)}"
