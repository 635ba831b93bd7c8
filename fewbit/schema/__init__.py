"""Untrusted JSON documents: limits, JSON Schemas, and validators with one-line errors."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable
from functools import cache

from fewbit.printable import shorten
from fewbit.sizes import counted

TABLE = "fewbit.table/1"
TABLES = "fewbit.tables/1"
VARIANCE_PROFILE = "fewbit.variance_profile/1"
PLAN = "fewbit.plan/3"
FIT = "fewbit.fit/1"

FILES = {
    TABLE: "table-1.json",
    TABLES: "tables-1.json",
    VARIANCE_PROFILE: "variance_profile-1.json",
    PLAN: "plan-3.json",
    FIT: "fit-1.json",
}


@cache
def load(name: str) -> dict:
    """Return the JSON Schema for documents whose field `schema` is `name`, one of FILES."""
    return json.loads(pkgutil.get_data(__name__, FILES[name]))


def find_error(document, name: str) -> tuple[str, str] | None:
    """Find the first place at which a document, parsed JSON, violates the schema `name`.

    Returns:
        None if the document is valid, else (path, message). The path looks like `tables[3].codes[5]`, or is empty for the whole document.
    """
    found = _find(document, load(name), load(name))
    return None if found is None else (format_path(found[0]), found[1])


def find_field_error(value, field: str, name: str) -> tuple[str, str] | None:
    """Find the first place at which a field's value violates its schema, as `find_error` does."""
    found = _find(value, load(name)["properties"][field], load(name))
    return None if found is None else (format_path([field, *found[0]]), found[1])


def format_path(parts) -> str:
    """Join `["tables", 3, "codes", 5]` to `tables[3].codes[5]`."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return path.removeprefix(".")


# --------------------------------------------------------------------------------------------------------- A validator
# for the part of JSON Schema that the files in this folder use. A test compares it with the package jsonschema.

_TYPES = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        isinstance(value, int)
        and not isinstance(value, bool)
        or isinstance(value, float)
        and value.is_integer()
    ),
}


def _has_type(value, types) -> bool:
    return any(_TYPES[name](value) for name in ([types] if isinstance(types, str) else types))


def _is_same(value, constant) -> bool:
    return value == constant and isinstance(value, bool) == isinstance(constant, bool)


def _if(type_: str, test) -> Callable:
    """Make a check that applies `test(value, limit)` to values of one JSON type, as JSON Schema requires."""
    return lambda value, limit: not _TYPES[type_](value) or test(value, limit)


# Sizes are checked before contents, so that a document that is too large is refused at once.
_CHECKS: dict[str, Callable] = {
    "type": _has_type,
    "enum": lambda value, limit: any(_is_same(value, allowed) for allowed in limit),
    "const": _is_same,
    "minimum": _if("number", lambda value, limit: value >= limit),
    "maximum": _if("number", lambda value, limit: value <= limit),
    "exclusiveMinimum": _if("number", lambda value, limit: value > limit),
    "minLength": _if("string", lambda value, limit: len(value) >= limit),
    "maxLength": _if("string", lambda value, limit: len(value) <= limit),
    "minItems": _if("array", lambda value, limit: len(value) >= limit),
    "maxItems": _if("array", lambda value, limit: len(value) <= limit),
    "maxProperties": _if("object", lambda value, limit: len(value) <= limit),
    "uniqueItems": _if("array", lambda value, _: len(set(map(json.dumps, value))) == len(value)),
}
_NESTED = {"required", "properties", "additionalProperties", "items", "$ref", "allOf", "if", "then"}
_SILENT = {"$schema", "$id", "$defs", "title", "description"}


def _find(value, rules, root) -> tuple[list, str] | None:
    """Return (path of keys and indices, message) of the first violation, or None."""
    if rules is True:
        return None
    if "$ref" in rules:
        target, where = _referred(rules["$ref"], root)
        found = _find(value, target, where)
        if found is not None:
            return found
    for keyword, check in _CHECKS.items():
        if keyword in rules and not check(value, rules[keyword]):
            return [], f"expected {_EXPECTED[keyword](rules[keyword])}, got {shorten(value)}"
    if isinstance(value, dict):
        found = _find_in_object(value, rules, root)
    elif isinstance(value, list) and "items" in rules:
        found = _find_in_array(value, rules["items"], root)
    else:
        found = None
    if found is not None:
        return found
    for rule in rules.get("allOf", ()):
        if "if" not in rule or _find(value, rule["if"], root) is None:
            found = _find(value, rule.get("then", rule), root)
            if found is not None:
                return found
    return None


def _referred(reference: str, root: dict) -> tuple[dict, dict]:
    """Return the schema that a `$ref` names, and the root for references inside it."""
    if reference.startswith("#/$defs/"):
        return root["$defs"][reference.removeprefix("#/$defs/")], root
    found = next(load(name) for name in FILES if load(name)["$id"] == reference)
    return found, found


def _find_in_object(value: dict, rules: dict, root: dict) -> tuple[list, str] | None:
    for field in rules.get("required", ()):
        if field not in value:
            return [], f'expected the field "{field}", got none'
    known, others = rules.get("properties", {}), rules.get("additionalProperties", True)
    for field, inside in value.items():
        if field not in known and others is False:
            return [], f"expected no other field than {', '.join(known)}, got {shorten(field)}"
        found = _find(inside, known.get(field, others), root)
        if found is not None:
            return [field, *found[0]], found[1]
    return None


def _find_in_array(value: list, rules: dict, root: dict) -> tuple[list, str] | None:
    try:  # check every distinct number once, since lists can be long
        different = {(type(item), item) for item in value}
        if all(_find(item, rules, root) is None for _, item in different):
            return None
    except TypeError:  # arrays and objects are not hashable
        pass
    for i, item in enumerate(value):
        found = _find(item, rules, root)
        if found is not None:
            return [i, *found[0]], found[1]
    return None


_EXPECTED = {
    "type": lambda limit: _with_article(limit if isinstance(limit, str) else " or ".join(limit)),
    "enum": lambda limit: "one of " + ", ".join(map(json.dumps, limit)),
    "const": json.dumps,
    "minimum": lambda limit: f"at least {limit}",
    "maximum": lambda limit: f"at most {limit}",
    "exclusiveMinimum": lambda limit: f"more than {limit}",
    "minItems": lambda limit: f"at least {counted(limit, 'item')}",
    "maxItems": lambda limit: f"at most {counted(limit, 'item')}",
    "minLength": lambda limit: f"at least {counted(limit, 'character')}",
    "maxLength": lambda limit: f"at most {counted(limit, 'character')}",
    "maxProperties": lambda limit: f"at most {counted(limit, 'field')}",
    "uniqueItems": lambda _: "different items",
}


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aio" else f"a {noun}"
