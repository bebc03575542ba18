"""Rules with a drawn constant {k}, by the kind of their arguments; each has the code that computes its examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """Name, words and return type of a function; `code` takes k, then the function's own arguments."""

    name: str
    phrase: str
    returns: str
    code: Callable[..., Any]


INTS, STRINGS, MATRIX = "List[int]", "List[str]", "List[List[int]]"

# Arguments a and b, lists of the same length.
TWO_LISTS = [
    Rule(
        "add_lists", "the element-wise sums of the lists a and b", INTS, lambda k, a, b: [x + y for x, y in _both(a, b)]
    ),
    Rule(
        "multiply_lists",
        "the element-wise products of the lists a and b",
        INTS,
        lambda k, a, b: [x * y for x, y in _both(a, b)],
    ),
    Rule(
        "larger_of_each",
        "for each position the larger of the two numbers in a and b",
        INTS,
        lambda k, a, b: [max(pair) for pair in _both(a, b)],
    ),
    Rule(
        "only_in_first", "the elements of a that do not occur in b", INTS, lambda k, a, b: [x for x in a if x not in b]
    ),
    Rule(
        "in_either",
        "a sorted list of all elements that occur in a or in b",
        INTS,
        lambda k, a, b: sorted(set(a) | set(b)),
    ),
    Rule(
        "dot_product", "the dot product of the lists a and b", "int", lambda k, a, b: sum(x * y for x, y in _both(a, b))
    ),
    Rule(
        "equal_positions",
        "the indices at which a and b hold the same number",
        INTS,
        lambda k, a, b: [i for i, (x, y) in enumerate(_both(a, b)) if x == y],
    ),
    Rule(
        "interleave_lists",
        "the elements of a and b taken alternately, starting with a",
        INTS,
        lambda k, a, b: [x for pair in _both(a, b) for x in pair],
    ),
    Rule(
        "sum_is_greater", "True if the sum of a is greater than the sum of b", "bool", lambda k, a, b: sum(a) > sum(b)
    ),
    Rule(
        "pairs_with_difference",
        "the number of pairs of one element of a and one of b that differ by {k}",
        "int",
        lambda k, a, b: sum(abs(x - y) == k for x in a for y in b),
    ),
]

# One dictionary d from strings to integers.
MAPPINGS = [
    Rule(
        "keys_above",
        "the keys of d whose value is greater than {k}",
        STRINGS,
        lambda k, d: [n for n, v in d.items() if v > k],
    ),
    Rule(
        "total_above",
        "the sum of the values of d that are at least {k}",
        "int",
        lambda k, d: sum(v for v in d.values() if v >= k),
    ),
    Rule("best_key", "the key with the largest value in d", "str", lambda k, d: max(d, key=lambda n: d[n])),
    Rule(
        "invert_mapping",
        "a dictionary that maps the values of d to its keys",
        "Dict[int, str]",
        lambda k, d: {v: n for n, v in d.items()},
    ),
    Rule(
        "scale_values",
        "a dictionary with the values of d multiplied by {k}",
        "Dict[str, int]",
        lambda k, d: {n: v * k for n, v in d.items()},
    ),
    Rule(
        "drop_small",
        "a dictionary without the entries of d whose value is less than {k}",
        "Dict[str, int]",
        lambda k, d: {n: v for n, v in d.items() if v >= k},
    ),
    Rule("keys_by_value", "the keys of d sorted by their values", STRINGS, lambda k, d: sorted(d, key=lambda n: d[n])),
]

# One matrix, a list of rows.
MATRICES = [
    Rule("row_totals", "the sum of each row of the matrix", INTS, lambda k, m: [sum(row) for row in m]),
    Rule("column_totals", "the sum of each column of the matrix", INTS, lambda k, m: [sum(c) for c in _both(*m)]),
    Rule(
        "flatten_rows",
        "all elements of the matrix as one list, row by row",
        INTS,
        lambda k, m: [x for row in m for x in row],
    ),
    Rule("turn_matrix", "the transpose of the matrix", MATRIX, lambda k, m: [list(column) for column in _both(*m)]),
    Rule("row_maxima", "the largest element of each row of the matrix", INTS, lambda k, m: [max(row) for row in m]),
    Rule("count_in_matrix", "how often {k} occurs in the matrix", "int", lambda k, m: sum(row.count(k) for row in m)),
    Rule(
        "diagonal_total",
        "the sum of the main diagonal of the square matrix",
        "int",
        lambda k, m: sum(m[i][i] for i in range(len(m))),
    ),
    Rule(
        "scale_matrix",
        "the matrix with every element multiplied by {k}",
        MATRIX,
        lambda k, m: [[x * k for x in row] for row in m],
    ),
]

# One string.
TEXTS = [
    Rule(
        "repeat_each",
        "the string with every character repeated {k} times",
        "str",
        lambda k, s: "".join(c * k for c in s),
    ),
    Rule(
        "chunks_of",
        "a list of the pieces of the string of length {k}, the last one may be shorter",
        STRINGS,
        lambda k, s: [s[i : i + k] for i in range(0, len(s), k)],
    ),
    Rule("rotate_left", "the string rotated to the left by {k} characters", "str", lambda k, s: s[k:] + s[:k]),
    Rule(
        "letter_counts",
        "a dictionary with the number of times each character occurs in the string",
        "Dict[str, int]",
        lambda k, s: {c: s.count(c) for c in s},
    ),
    Rule("every_nth", "every character of the string at an index divisible by {k}", "str", lambda k, s: s[::k]),
    Rule(
        "initials_of",
        "the first letters of all words of the string in uppercase",
        "str",
        lambda k, s: "".join(w[0].upper() for w in s.split()),
    ),
    Rule("mirror_text", "the string followed by its reverse", "str", lambda k, s: s + s[::-1]),
    Rule(
        "first_repeated",
        "the first character that occurs again later in the string, or an empty string",
        "str",
        lambda k, s: next((c for i, c in enumerate(s) if c in s[i + 1 :]), ""),
    ),
    Rule(
        "title_words",
        "the string with the first letter of every word in uppercase",
        "str",
        lambda k, s: " ".join(w.capitalize() for w in s.split()),
    ),
    Rule("word_order", "the words of the string in reverse order", "str", lambda k, s: " ".join(reversed(s.split()))),
]


def _both(*lists: list[int]) -> list[tuple[int, ...]]:
    return list(zip(*lists, strict=True))
