"""The JSON Schemas of documents, and their errors as one line each."""

from __future__ import annotations

import json
import pkgutil
from functools import cache

from fewbit.sizes import counted

TABLE = "fewbit.table/1"
TABLES = "fewbit.tables/1"
VARIANCE_PROFILE = "fewbit.variance_profile/1"
PLAN = "fewbit.plan/1"

FILES = {
    TABLE: "table-1.json",
    TABLES: "tables-1.json",
    VARIANCE_PROFILE: "variance_profile-1.json",
    PLAN: "plan-1.json",
}


@cache
def load(name: str) -> dict:
    """The JSON Schema (a dict) of documents whose `schema` field is `name`, one of FILES."""
    return json.loads(pkgutil.get_data(__name__, FILES[name]))


def find_error(document, name: str) -> tuple[str, str] | None:
    """None if `document` satisfies schema `name`, else (path, message) of its most telling error.

    The path is like `tables[3].codes[5]`, empty for the document itself.
    """
    from jsonschema.exceptions import best_match

    error = best_match(_validator(name).iter_errors(document))
    return None if error is None else (format_path(error.absolute_path), _explain(error))


def format_path(parts) -> str:
    """`["tables", 3, "codes", 5]` as `tables[3].codes[5]`."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return path.removeprefix(".")


def shorten(value, limit: int = 60) -> str:
    """`repr(value)` on one line of at most `limit` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


@cache
def _validator(name: str):
    from jsonschema import Draft202012Validator
    from referencing import Registry, Resource

    schemas = [load(each) for each in FILES]
    registry = Registry().with_resources(
        (schema["$id"], Resource.from_contents(schema)) for schema in schemas
    )
    return Draft202012Validator(load(name), registry=registry)


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
    "uniqueItems": lambda _: "different items",
}


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aio" else f"a {noun}"


def _explain(error) -> str:
    if error.validator == "required":
        missing = next(field for field in error.validator_value if field not in error.instance)
        return f'expected the field "{missing}", got none'
    if error.validator == "additionalProperties":
        unknown = next(field for field in error.instance if field not in error.schema["properties"])
        return f"expected no other field than {', '.join(error.schema['properties'])}, got {shorten(unknown)}"
    if error.validator in _EXPECTED:
        return f"expected {_EXPECTED[error.validator](error.validator_value)}, got {shorten(error.instance)}"
    return " ".join(error.message.split())
