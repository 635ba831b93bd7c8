"""Damage to documents of dicts, lists, numbers and strings, which knows their structure."""

import copy
import math

NUMBERS = [
    0, 1, -1, 2, 3, 7, 8, 9, 16, 255, 256, 0.5, 1.5, -0.0, -1e-9, 1e-30, 1e30, 1e38, 1e39, 1e100, 1e200, 1e308, -1e308,
    5e-324, 2**31, 2**53, 2**63, 2**64, 10**400, math.nan, math.inf, -math.inf, True, False,
]  # fmt: skip
TEXTS = [
    "", "x", "0", "gelu", "elu", "sys:exit", "builtins:input", "\ud800", "\x1b[2J", "\u202e", "a\nb", "$\\frac{$", "<b>",
    "[red]", "\x00", "é", "right", "left", "uniform", "unbiased", "intervals", "fewbit.table/1", "a" * 5000,
]  # fmt: skip
OTHERS = [None, [], {}, [[]], [{}], [0], {"a": 1}, [None]]


def mutate(document, random, odd=()):
    """Return a damaged copy of a document, with one to three changes in different places.

    Args:
        document: nested dicts and lists. It is not changed.
        random: a random.Random.
        odd: more values to put into the document.
    """
    root = [copy.deepcopy(document)]
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = list(_places(root))
        # Otherwise long lists of numbers would have nearly all places, and fields nearly none.
        if not places:
            break
        random.shuffle(places)
        holder, key = min(places[:4], key=lambda place: len(place[0]))
        if holder is root and random.random() < 0.9:
            continue
        random.choice(CHANGES)(holder, key, random, odd)
    return root[0] if root else None


def _places(holder):
    keys = list(holder) if isinstance(holder, dict) else range(len(holder))
    for key in keys:
        yield holder, key
        if isinstance(holder[key], dict | list) and holder[key]:
            yield from _places(holder[key])


def _delete(holder, key, random, odd):
    del holder[key]


def _duplicate(holder, key, random, odd):
    value = copy.deepcopy(holder[key])
    if isinstance(holder, list):
        holder.insert(random.randrange(len(holder) + 1), value)
    else:
        holder[random.choice([*TEXTS, *map(str, holder)])] = value


def _retype(holder, key, random, odd):
    value = holder[key]
    others = [str(value)[:50], [copy.copy(value)], {"a": copy.copy(value)}, *OTHERS, *odd]
    holder[key] = copy.deepcopy(random.choice(others))


def _number(holder, key, random, odd):
    holder[key] = random.choice(NUMBERS)


def _nudge(holder, key, random, odd):
    value = holder[key]
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000):
        near = [value + 1, value - 1, -value, value * 2, value / 3, float(value), value * 1e20]
        holder[key] = random.choice([*near, round(value) if math.isfinite(value) else 0])
    else:
        _number(holder, key, random, odd)


def _text(holder, key, random, odd):
    value = holder[key]
    texts = list(TEXTS)
    if isinstance(value, str):
        texts += [value + random.choice(TEXTS)[:10], value[:-1], value.upper(), value * 2]
    holder[key] = random.choice(texts)


def _swap(holder, key, random, odd):
    other = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    holder[key], holder[other] = holder[other], holder[key]


def _reorder(holder, key, random, odd):
    value = holder[key]
    if isinstance(value, list):
        random.choice((value.reverse, lambda: random.shuffle(value)))()


def _resize(holder, key, random, odd):
    value = holder[key]
    if isinstance(value, list):
        holder[key] = random.choice(
            (
                value[: len(value) // 2],
                value[:-1],
                value[1:],
                value * 2,
                value[:1] * 40,
                value * 200,
            )
        )


def _nest(holder, key, random, odd):
    for _ in range(random.choice((1, 5, 100))):
        holder[key] = [holder[key]]


def _rename(holder, key, random, odd):
    if isinstance(holder, dict):
        holder[random.choice([str(key)[:-1], f"{key}s", *TEXTS])] = holder.pop(key)


CHANGES = [
    _delete, _duplicate, _retype, _number, _number, _number, _nudge, _nudge, _nudge, _text, _swap, _reorder, _resize, _nest,
    _rename,
]  # fmt: skip
