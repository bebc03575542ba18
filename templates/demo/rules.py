"""Families of tasks whose rule holds drawn constants: digits, sequences, two lists, dictionaries, matrices, cases."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator

from composed import Task, is_prime_number
from rule_tables import MAPPINGS, MATRICES, TEXTS, TWO_LISTS, Rule

Family = Callable[[random.Random], Task]

FRUIT = ["pear", "fig", "plum", "kiwi", "lime", "nut"]
SIMPLE_WORDS = ["sun", "moon", "river", "hello", "world", "python", "seven", "little", "tree"]
LABELS = ["red", "blue", "low", "high", "yes", "no", "left", "right", "A", "B", "C"]


def rule_tasks(rng: random.Random, count: int) -> Iterator[Task]:
    """Yield `count` tasks, the families in turn."""
    for number in range(count):
        yield FAMILIES[number % len(FAMILIES)](rng)


def _digits(rng: random.Random) -> Task:
    kind, keep = rng.choice(
        [
            ("even", lambda d: d % 2 == 0),
            ("odd", lambda d: d % 2 == 1),
            ("non-zero", bool),
            ("prime", is_prime_number),
            ("distinct", lambda d: True),
            ("small (less than 5)", lambda d: d < 5),
        ]
    )
    what, reduce = rng.choice(
        [
            ("sum", sum),
            ("number", len),
            ("largest", lambda v: max(v, default=0)),
            ("smallest", lambda v: min(v, default=0)),
        ]
    )

    def function(n: int) -> int:
        digits = [int(c) for c in str(n)]
        return reduce([d for d in (set(digits) if kind == "distinct" else digits) if keep(d)])

    name = f"{what}_{kind.split(' ')[0].replace('-', '_')}_digits"
    phrase = f"the {what} of the {kind} digits of the positive integer n"
    return Task(name, phrase, (("n", "int"),), "int", function, lambda r: (r.randint(10, 99999),))


def _sequence(rng: random.Random) -> Task:
    a, b, p, q = rng.randint(0, 3), rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 3)
    letter = rng.choice("abcfghtu")

    def function(n: int) -> int:
        x, y = a, b
        for _ in range(n):
            x, y = y, p * y + q * x
        return x

    rule = " + ".join(f"{letter}(n-{i})" if c == 1 else f"{c} * {letter}(n-{i})" for i, c in ((1, p), (2, q)))
    phrase = f"the n-th number of the sequence {letter}(0) = {a}, {letter}(1) = {b}, {letter}(n) = {rule}"
    return Task(f"{letter}_sequence", phrase, (("n", "int"),), "int", function, lambda r: (r.randint(2, 9),))


def _range(rng: random.Random) -> Task:
    k, m = rng.randint(2, 7), rng.randint(2, 9)
    keep, words = rng.choice(
        [
            (lambda x: x % k == 0, f"divisible by {k}"),
            (lambda x: x % k == 0 or x % m == 0, f"divisible by {k} or by {m}"),
            (lambda x: str(m) in str(x), f"whose digits contain {m}"),
            (is_prime_number, "which are prime"),
            (lambda x: x % k == 1, f"that leave remainder 1 when divided by {k}"),
        ]
    )
    what, returns, reduce = rng.choice([("sum", "int", sum), ("number", "int", len), ("list", "List[int]", list)])

    def function(n: int) -> int | list[int]:
        return reduce([x for x in range(1, n + 1) if keep(x)])

    phrase = f"the {what} of the integers from 1 to n {words}"
    return Task(f"{what}_up_to", phrase, (("n", "int"),), returns, function, lambda r: (r.randint(5, 30),))


def _two_lists(rng: random.Random) -> Task:
    k = rng.randint(1, 4)
    rule = rng.choice(TWO_LISTS)

    def draw(r: random.Random) -> tuple[list[int], list[int]]:
        n = r.randint(3, 5)
        return [r.randint(1, 9) for _ in range(n)], [r.randint(1, 9) for _ in range(n)]

    first, second = rng.choice([("a", "b"), ("first", "second"), ("left", "right"), ("xs", "ys")])
    # "a list of a": the article goes before another word, the name stands alone or before a comma.
    names = {"a": first, "b": second}
    words = re.sub(r"(?<=\s)([ab])(?=[,\s]|$)", lambda match: names[match.group()], rule.phrase.format(k=k))
    task = _of_rule(rule, k, ((first, "List[int]"), (second, "List[int]")), draw)
    return Task(task.name, words, task.parameters, task.returns, task.function, task.draw)


def _mapping(rng: random.Random) -> Task:
    k = rng.randint(2, 8)
    rule = rng.choice(MAPPINGS)

    def draw(r: random.Random) -> tuple[dict[str, int]]:
        return ({word: r.randint(1, 12) for word in r.sample(FRUIT, r.randint(2, 3))},)

    return _of_rule(rule, k, (("d", "Dict[str, int]"),), draw)


def _matrix(rng: random.Random) -> Task:
    k = rng.randint(2, 6)
    rule = rng.choice(MATRICES)

    def draw(r: random.Random) -> tuple[list[list[int]]]:
        return ([[r.randint(1, 9) for _ in range(2)] for _ in range(2)],)

    return _of_rule(rule, k, ((rng.choice(["matrix", "grid", "m", "rows"]), "List[List[int]]"),), draw)


def _cases(rng: random.Random) -> Task:
    a, b = rng.sample([2, 3, 4, 5, 6, 7, 8, 10], 2)
    x, y, z = rng.sample(LABELS, 3)
    rule, function = rng.choice(
        [
            (
                f"'{x}' if n is divisible by {a}, '{y}' if n is divisible by {b}, and '{z}' otherwise",
                lambda n: x if n % a == 0 else y if n % b == 0 else z,
            ),
            (
                f"'{x}' if n is less than {a * b}, '{y}' if n is exactly {a * b}, and '{z}' otherwise",
                lambda n: x if n < a * b else y if n == a * b else z,
            ),
            (
                f"'{x}' if n is even and '{y}' if n is odd, but '{z}' for multiples of {a + 1}",
                lambda n: z if n % (a + 1) == 0 else y if n % 2 else x,
            ),
        ]
    )
    name = rng.choice(["classify_number", "label_for", "choose_label", "name_of_number", "kind_of"])
    return Task(name, rule, (("n", "int"),), "str", function, lambda r: (r.randint(1, a * b + 9),))


def _arithmetic(rng: random.Random) -> Task:
    k, m = rng.randint(2, 9), rng.randint(2, 9)
    price = f"the price of a apples at {k} coins each and b bananas at {m} coins each"
    time = f"the number of minutes in a hours and b minutes, plus a break of {k} minutes"
    remainders = f"the sum of the remainders of a and b when divided by {k}"
    limited = f"x limited to the range from {k} to {k + 3 * m}"
    power = f"a to the power of {min(k, 4)} minus b squared"
    seats = f"how many of {k * m} seats are left after a groups of {k} people took their seats, but at least 0"
    middle = "the number of a, b and c that is neither the largest nor the smallest"
    name, phrase, parameters, function = rng.choice(
        [
            ("total_price", price, "ab", lambda a, b: a * k + b * m),
            ("minutes_in", time, "ab", lambda a, b: 60 * a + b + k),
            ("box_surface", "the surface area of a box with the sides a, b and c", "abc", _surface),
            ("remainder_sum", remainders, "ab", lambda a, b: a % k + b % k),
            ("clamped", limited, "x", lambda x: min(max(x, k), k + 3 * m)),
            ("power_difference", power, "ab", lambda a, b: a ** min(k, 4) - b * b),
            ("seats_left", seats, "a", lambda a: max(k * m - a * k, 0)),
            ("middle_of_three", middle, "abc", lambda a, b, c: sorted((a, b, c))[1]),
        ]
    )

    def draw(r: random.Random) -> tuple[int, ...]:
        return tuple(r.randint(1, 20) for _ in parameters)

    return Task(name, phrase, tuple((parameter, "int") for parameter in parameters), "int", function, draw)


def _strings(rng: random.Random) -> Task:
    k = rng.randint(2, 4)
    rule = rng.choice(TEXTS)

    def draw(r: random.Random) -> tuple[str]:
        return (" ".join(r.sample(SIMPLE_WORDS, r.randint(1, 3))),)

    return _of_rule(rule, k, ((rng.choice(["s", "text", "string", "sentence"]), "str"),), draw)


def _of_rule(rule: Rule, k: int, parameters: tuple[tuple[str, str], ...], draw: Callable[..., tuple]) -> Task:
    phrase = rule.phrase.format(k=k)
    return Task(rule.name, phrase, parameters, rule.returns, functools.partial(rule.code, k), draw)


def _surface(a: int, b: int, c: int) -> int:
    return 2 * (a * b + b * c + a * c)


FAMILIES: tuple[Family, ...] = (
    _digits,
    _sequence,
    _range,
    _two_lists,
    _mapping,
    _matrix,
    _cases,
    _arithmetic,
    _strings,
)
