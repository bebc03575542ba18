"""Small programming tasks composed from parts, each with a working implementation that computes its examples.

A task is a phrase ("the sum of the squares of the even numbers in the list") built from a filter, a map and a
reduction, or one of a family of rules with drawn constants; the prompt is a signature and a docstring as a Python
programmer writes them. The implementation exists for the examples alone and is never shown to the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]


@dataclass(frozen=True)
class Task:
    """What a function returns, in words and in code; `draw` makes one tuple of arguments."""

    name: str
    phrase: str
    parameters: tuple[tuple[str, str], ...]
    returns: str
    function: Function
    draw: Callable[[random.Random], tuple[Any, ...]]


def is_prime_number(n: int) -> bool:
    """Tell primes, for the filters below."""
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


# (name, phrase, predicate); {k} is drawn per task.
NUMBER_FILTERS: list[tuple[str, str, Callable[[int, int], bool]]] = [
    ("all", "all numbers", lambda x, k: True),
    ("even", "the even numbers", lambda x, k: x % 2 == 0),
    ("odd", "the odd numbers", lambda x, k: x % 2 == 1),
    ("positive", "the positive numbers", lambda x, k: x > 0),
    ("negative", "the negative numbers", lambda x, k: x < 0),
    ("prime", "the prime numbers", lambda x, k: is_prime_number(x)),
    ("big", "the numbers greater than {k}", lambda x, k: x > k),
    ("small", "the numbers less than {k}", lambda x, k: x < k),
    ("multiples", "the multiples of {k}", lambda x, k: x % k == 0),
    ("non_multiples", "the numbers that are not divisible by {k}", lambda x, k: x % k != 0),
    ("square", "the perfect squares", lambda x, k: x >= 0 and int(x**0.5) ** 2 == x),
    ("single_digit", "the single-digit numbers", lambda x, k: 0 <= x <= 9),
    ("two_digit", "the numbers with exactly two digits", lambda x, k: 10 <= abs(x) <= 99),
    ("ends_with", "the numbers whose last digit is {k}", lambda x, k: abs(x) % 10 == k),
]
NUMBER_MAPS: list[tuple[str, str, Callable[[int, int], int]]] = [
    ("", "{items}", lambda x, k: x),
    ("", "{items}", lambda x, k: x),
    ("squares", "the squares of {items}", lambda x, k: x * x),
    ("cubes", "the cubes of {items}", lambda x, k: x**3),
    ("doubled", "twice the value of {items}", lambda x, k: 2 * x),
    ("absolute", "the absolute values of {items}", lambda x, k: abs(x)),
    ("digit_sums", "the digit sums of {items}", lambda x, k: sum(map(int, str(abs(x))))),
    ("remainders", "the remainders modulo {k} of {items}", lambda x, k: x % k),
]
NUMBER_REDUCTIONS: list[tuple[str, str, str, Callable[[list[int]], Any]]] = [
    ("sum", "the sum of {items}", "int", sum),
    ("count", "how many of {items} there are", "int", len),
    ("max", "the largest of {items}, or None if there are none", "int", lambda v: max(v, default=None)),
    ("min", "the smallest of {items}, or None if there are none", "int", lambda v: min(v, default=None)),
    ("list", "a list of {items}", "List[int]", list),
    ("sorted", "{items} in ascending order", "List[int]", sorted),
    ("descending", "{items} from largest to smallest", "List[int]", lambda v: sorted(v, reverse=True)),
    ("reversed", "{items} in reverse order", "List[int]", lambda v: v[::-1]),
    (
        "mean",
        "the average of {items}, or 0 if there are none",
        "float",
        lambda v: round(sum(v) / len(v), 2) if v else 0,
    ),
    ("unique", "{items} without duplicates, keeping the order", "List[int]", lambda v: list(dict.fromkeys(v))),
    (
        "spread",
        "the difference between the largest and the smallest of {items}",
        "int",
        lambda v: max(v) - min(v) if v else 0,
    ),
    ("last", "the last of {items}, or -1 if there is none", "int", lambda v: v[-1] if v else -1),
    ("first", "the first of {items}, or -1 if there is none", "int", lambda v: v[0] if v else -1),
    ("running", "the running totals of {items}", "List[int]", lambda v: [sum(v[: i + 1]) for i in range(len(v))]),
]
LETTER_FILTERS: list[tuple[str, str, Callable[[str], bool]]] = [
    ("vowels", "vowels", lambda c: c.lower() in "aeiou"),
    ("consonants", "consonants", lambda c: c.isalpha() and c.lower() not in "aeiou"),
    ("uppercase", "uppercase letters", str.isupper),
    ("lowercase", "lowercase letters", str.islower),
    ("digits", "digits", str.isdigit),
    ("spaces", "spaces", str.isspace),
    ("letters", "letters", str.isalpha),
]
LETTER_OPERATIONS: list[tuple[str, str, str, Callable[[str, Callable[[str], bool]], Any]]] = [
    ("count", "the number of {what} in the string", "int", lambda s, f: sum(map(f, s))),
    ("remove", "the string with all {what} removed", "str", lambda s, f: "".join(c for c in s if not f(c))),
    ("keep", "a string of only the {what} of the input", "str", lambda s, f: "".join(filter(f, s))),
    ("star", "the string with all {what} replaced by '*'", "str", lambda s, f: "".join("*" if f(c) else c for c in s)),
    (
        "double",
        "the string in which all {what} are doubled",
        "str",
        lambda s, f: "".join(c * 2 if f(c) else c for c in s),
    ),
    (
        "positions",
        "the indices of all {what} in the string",
        "List[int]",
        lambda s, f: [i for i, c in enumerate(s) if f(c)],
    ),
    ("any", "True if the string has any {what}, otherwise False", "bool", lambda s, f: any(map(f, s))),
    (
        "swap",
        "the string with the case of all {what} swapped",
        "str",
        lambda s, f: "".join(c.swapcase() if f(c) else c for c in s),
    ),
    (
        "front",
        "the string with all {what} moved to the front",
        "str",
        lambda s, f: "".join(sorted(s, key=lambda c: not f(c))),
    ),
    (
        "distinct",
        "the sorted list of the distinct {what} of the string",
        "List[str]",
        lambda s, f: sorted(set(filter(f, s))),
    ),
]
WORD_FILTERS: list[tuple[str, str, Callable[[str, int], bool]]] = [
    ("long_words", "words longer than {k} letters", lambda w, k: len(w) > k),
    ("short_words", "words of at most {k} letters", lambda w, k: len(w) <= k),
    ("vowel_words", "words that start with a vowel", lambda w, k: w[0].lower() in "aeiou"),
    ("capital_words", "words that start with a capital letter", lambda w, k: w[0].isupper()),
    ("e_words", "words that contain the letter e", lambda w, k: "e" in w.lower()),
    ("even_words", "words of even length", lambda w, k: len(w) % 2 == 0),
]
WORD_OPERATIONS: list[tuple[str, str, str, Callable[[list[str]], Any]]] = [
    ("count", "the number of {what} in the text", "int", len),
    ("list", "a list of the {what} in the text", "List[str]", list),
    ("join", "the {what} of the text joined by a dash", "str", "-".join),
    ("upper", "the {what} of the text in uppercase", "List[str]", lambda v: [w.upper() for w in v]),
    ("reversed", "the {what} of the text, each written backwards", "List[str]", lambda v: [w[::-1] for w in v]),
    (
        "longest",
        "the longest of the {what} in the text, or an empty string",
        "str",
        lambda v: max(v, key=len, default=""),
    ),
    (
        "lengths",
        "a dictionary from each of the {what} in the text to its length",
        "Dict[str, int]",
        lambda v: {w: len(w) for w in v},
    ),
    ("sorted", "the {what} of the text in alphabetical order", "List[str]", sorted),
]
WORDS = [
    "apple",
    "River",
    "stone",
    "Green",
    "tiny",
    "house",
    "Orange",
    "cat",
    "open",
    "window",
    "Light",
    "sea",
    "quiet",
    "mountain",
    "Extra",
    "paper",
    "blue",
    "Under",
    "the",
    "old",
    "tree",
    "Birds",
    "sing",
    "early",
    "morning",
    "code",
    "is",
    "fun",
    "Every",
    "day",
    "we",
    "learn",
    "New",
    "things",
    "about",
    "idea",
    "Music",
]


def number_tasks(rng: random.Random) -> Iterator[Task]:
    """Yield filter × map × reduction over a list of integers, in a random order, without end of constants."""
    combined = [(f, m, r) for f in NUMBER_FILTERS for m in NUMBER_MAPS for r in NUMBER_REDUCTIONS]
    rng.shuffle(combined)
    for (f_name, f_phrase, keep), (m_name, m_phrase, change), (r_name, r_phrase, returns, reduce) in combined:
        k = rng.randint(2, 9)
        argument = rng.choice(["numbers", "lst", "arr", "nums", "l", "values", "xs", "data"])
        items = m_phrase.format(items=f_phrase.format(k=k) + f" in {argument}", k=k)
        name = "_".join(part for part in (r_name, m_name, f_name) if part)

        def function(v: list[int], k: int = k, keep: Any = keep, change: Any = change, reduce: Any = reduce) -> Any:
            return reduce([change(x, k) for x in v if keep(x, k)])

        yield Task(name, r_phrase.format(items=items), ((argument, "List[int]"),), returns, function, _draw_numbers)


def text_tasks(rng: random.Random) -> Iterator[Task]:
    """Yield operations on the letters and on the words of a string."""
    tasks: list[Task] = []
    for f_name, what, keep in LETTER_FILTERS:
        for o_name, phrase, returns, operate in LETTER_OPERATIONS:
            argument = rng.choice(["s", "text", "string", "word"])

            def on_letters(s: str, keep: Any = keep, operate: Any = operate) -> Any:
                return operate(s, keep)

            tasks.append(
                Task(
                    f"{o_name}_{f_name}",
                    phrase.format(what=what),
                    ((argument, "str"),),
                    returns,
                    on_letters,
                    _draw_text,
                )
            )
    for f_name, what, chosen in WORD_FILTERS:
        for o_name, phrase, returns, collect in WORD_OPERATIONS:
            k = rng.randint(2, 5)

            def on_words(s: str, k: int = k, chosen: Any = chosen, collect: Any = collect) -> Any:
                return collect([w for w in s.split() if chosen(w, k)])

            text = phrase.format(what=what.format(k=k))
            tasks.append(Task(f"{o_name}_{f_name}", text, (("text", "str"),), returns, on_words, _draw_text))
    rng.shuffle(tasks)
    yield from tasks


def _draw_numbers(rng: random.Random) -> tuple[list[int]]:
    low = rng.choice([0, 1, 1, -10])
    return ([rng.randint(low, rng.choice([9, 12, 30])) for _ in range(rng.randint(3, 6))],)


def _draw_text(rng: random.Random) -> tuple[str]:
    words = rng.sample(WORDS, rng.randint(1, 3))
    if rng.random() < 0.3:
        words.append(str(rng.randint(1, 99)))
    return (" ".join(words),)
