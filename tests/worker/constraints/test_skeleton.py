from __future__ import annotations

import numpy as np
import pytest

from swiftbatch.worker.constraints import skeleton as skeletons
from swiftbatch.worker.constraints.skeleton import FREE, Guess, Skeleton, TextPlace, num_tokens_in
from swiftbatch.worker.sampling.token_masks import mask_of

VOCAB = 2048
ANYTHING = mask_of(tuple(range(VOCAB)), VOCAB)
QUOTE, COMMA, BREAK, COLON = 1, 2, 3, 4
NAME, AGE = 10, 11
STRUCTURE = mask_of((QUOTE, COMMA, BREAK, COLON, 5, 6), VOCAB)


def only(token_id: int) -> np.ndarray:
    return mask_of((token_id,), VOCAB)


def field(key: int, *value: int) -> list[tuple[np.ndarray, int]]:
    """Return the tokens of a field of free text, each behind what may come in its place."""
    structure = [(STRUCTURE, BREAK), (only(key), key), (STRUCTURE, COLON), (STRUCTURE, QUOTE)]
    return [*structure, *((ANYTHING, token_id) for token_id in (*value, COMMA))]


def passed(
    skeleton: Skeleton, tokens: list[tuple[np.ndarray, int]], place: TextPlace | None = None, last: object = STRUCTURE
) -> TextPlace:
    """Let a skeleton learn a text; return the place behind it, where `last` may come."""
    place = place or TextPlace(num_allowed=num_tokens_in(tokens[0][0]))
    masks = [*(mask for mask, _ in tokens[1:]), last]
    for (_, token_id), mask in zip(tokens, masks, strict=True):
        before, place = place, place.behind(token_id, num_tokens_in(mask))
        skeleton.learn(before, FREE if place.num_free else token_id)
    return place


def guessed(skeleton: Skeleton, place: TextPlace, mask: np.ndarray = STRUCTURE) -> int | None:
    guess = skeleton.guess(place, mask)
    return None if guess is None else guess.token_id


def test_structure_comes_again_behind_another_free_text() -> None:
    skeleton = Skeleton()
    place = passed(skeleton, [*field(NAME, 100, 101), *field(AGE, 102)])
    place = passed(skeleton, [*field(NAME, 200, 201, 202)], place)
    for token_id, mask in ((BREAK, STRUCTURE), (AGE, only(AGE)), (COLON, STRUCTURE), (QUOTE, STRUCTURE)):
        assert guessed(skeleton, place, mask) == token_id
        place = place.behind(token_id, num_tokens_in(mask))
    assert guessed(skeleton, TextPlace()) is None


def test_a_free_text_is_guessed_to_end_where_the_last_one_of_its_key_did() -> None:
    skeleton = Skeleton()
    texts = [*field(NAME, 100, 101), *field(AGE, 102)]
    place = passed(skeleton, [*texts, *texts, *field(NAME)[:-1]], last=ANYTHING)
    ends = []
    for token_id in (300, 301, 302):
        ends.append(guessed(skeleton, place, ANYTHING))
        place = place.behind(token_id, num_tokens_in(ANYTHING))
    assert ends == [None, None, COMMA]


def test_behind_a_new_key_the_structure_of_other_keys_is_guessed() -> None:
    skeleton = Skeleton()
    place = passed(skeleton, [*field(NAME, 100), (STRUCTURE, BREAK)], last=only(AGE))
    assert guessed(skeleton, place, only(AGE)) is None
    assert guessed(skeleton, place.behind(AGE, num_tokens_in(STRUCTURE))) == COLON


def test_a_guess_that_misses_is_thought_less_of_than_one_that_comes_true() -> None:
    kept, broken = Skeleton(), Skeleton()
    for number in range(6):
        passed(kept, [(STRUCTURE, COMMA), (STRUCTURE, BREAK)])
        place = passed(broken, [(STRUCTURE, COMMA), (STRUCTURE, BREAK if number % 2 else QUOTE)])
    place = TextPlace(num_allowed=num_tokens_in(STRUCTURE)).behind(COMMA, num_tokens_in(STRUCTURE))
    good, bad = kept.guess(place, STRUCTURE), broken.guess(place, STRUCTURE)
    assert isinstance(good, Guess)
    assert isinstance(bad, Guess)
    assert good.share > 0.8 > 0.4 > bad.share


def test_what_may_not_come_is_not_guessed() -> None:
    skeleton = Skeleton()
    passed(skeleton, [(STRUCTURE, COMMA), (STRUCTURE, BREAK)])
    place = TextPlace(num_allowed=num_tokens_in(STRUCTURE)).behind(COMMA, num_tokens_in(STRUCTURE))
    assert guessed(skeleton, place) == BREAK
    assert guessed(skeleton, place, only(QUOTE)) is None


def test_a_skeleton_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skeletons, "MOST_CONTEXTS", 40)
    skeleton = Skeleton()
    place = passed(skeleton, field(NAME, 100))
    assert (
        guessed(skeleton, place.behind(BREAK, num_tokens_in(only(NAME))).behind(NAME, num_tokens_in(STRUCTURE)))
        == COLON
    )
    for number in range(20):
        passed(skeleton, [(STRUCTURE, 500 + number), (STRUCTURE, 600 + number), (STRUCTURE, 700 + number)])
    assert (
        guessed(skeleton, place.behind(BREAK, num_tokens_in(only(NAME))).behind(NAME, num_tokens_in(STRUCTURE))) is None
    )
    passed(skeleton, field(NAME, 100))
    assert (
        guessed(skeleton, place.behind(BREAK, num_tokens_in(only(NAME))).behind(NAME, num_tokens_in(STRUCTURE)))
        == COLON
    )
