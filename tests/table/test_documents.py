"""Untrusted documents: limits before parsing, and schemas, which are checked as by the package jsonschema."""

import copy
import functools
import json
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from mutations import mutate
from referencing import Registry, Resource

import fewbit
from fewbit import schema, table
from fewbit.catalog.store import tables_directory
from fewbit.errors import FewbitError, InputError
from fewbit.printable import one_line, printable
from fewbit.schema import documents
from fewbit.schema.documents import MOST_BYTES, MOST_DEPTH, parse_json, read_text


@given(st.text(st.characters(codec=None)))
def test_printable_text_is_one_line_that_can_be_encoded(text):
    found = printable(text)
    assert found.isprintable() and found.encode("utf-8").decode() == found
    assert found == text or not text.isprintable()


def test_text_and_errors_that_are_escaped():
    assert printable("a\x1b[2J\n\u202e\ud800é") == r"a\x1b[2J\n\u202e\ud800é"
    assert one_line(ValueError("a\n b\x07")) == r"ValueError: a b\x07"
    assert one_line(KeyError()) == "KeyError" and len(one_line(ValueError("x" * 999))) < 200
    for text in ("a\nb", "\x1b", "\ud800"):
        assert str(FewbitError(text)).isprintable()
        assert str(fewbit.OutputExistsError(text)).isprintable()
    assert str(FewbitError("gelu: é")) == "gelu: é"


def test_the_limits_leave_room_for_every_table():
    largest = max(path.stat().st_size for path in tables_directory().glob("*.json"))
    assert 30 * largest < MOST_BYTES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * (MOST_DEPTH + 1), "expected at most 16 arrays and objects inside one another, got more"),
        ('{"a":' * 1_000_000, "expected at most 16 arrays and objects inside one another, got more"),
        ("[]" * 1_000_000, "expected at most 131072 arrays and objects, got more"),
        (" " * (MOST_BYTES + 1), "expected a document of at most 8 MiB, got a larger text"),
        ("\ufeff{}", "expected JSON, got a byte order mark before it"),
        ('{"a": 1, "b": {"a": 2, "a": 3}}', "expected every field once, got 'a' twice"),
        ("[" + "9" * 1001 + "]", "expected finite numbers, got '999"),
        ("[1e400]", "expected finite numbers, got '1e400'"),
        ("[-Infinity]", "expected finite numbers, got '-Infinity'"),
        ('{"a": NaN}', "expected finite numbers, got 'NaN'"),
        ("[1" + "0" * 400 + "]", "expected finite numbers, got '1000000"),
        ("", "expected JSON, got other text: "),
        ('"' + '\\"' * 5_000_000, "expected a document of at most 8 MiB"),
        ('"' + '\\"' * 2_000_000 + "\\", "expected JSON, got other text: "),
        ('["' + "]" * 100, "expected JSON, got other text: "),
        ("{}x", "expected JSON, got other text: Extra data"),
    ],
    ids=range(16),
)  # fmt: skip
def test_refused_soon_and_in_one_line(text, message):
    started = time.perf_counter()
    with pytest.raises(InputError) as caught:
        parse_json(text, "here: ", InputError)
    assert time.perf_counter() - started < 10
    assert str(caught.value).startswith(f"here: {message}") and len(str(caught.value)) < 200


def test_brackets_in_strings_do_not_count():
    text = json.dumps({"a": "[" * 100 + '\\"{', "b": [[[]]]})
    assert parse_json(text) == json.loads(text)
    deep = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert parse_json(deep) == json.loads(deep)


@pytest.mark.parametrize("path", [None, 1.5, "null\x00"], ids=ascii)
def test_what_is_no_path(path):
    got = ": " if isinstance(path, str) else f": .* not {type(path).__name__}"
    with pytest.raises(FewbitError, match=f"expected a readable file, got{got}"):
        read_text(path)


def test_a_file_behind_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "target").write_text("é")
    assert read_text(tmp_path / "link") == "é"


SAMPLES = {
    "plan": {
        "schema": schema.PLAN, "model": "M", "device": "cpu", "batches": 1, "batch_size": 8, "draws": 2, "share": 0.1,
        "exact_bytes": 10, "exact_seconds": 0.1, "exact_seconds_least": 0.1, "exact_seconds_most": 0.1, "compiled_bytes": None, "compiled_seconds": None,
        "gradient": 1.0, "sampling": None, "sampling_error": 0.5, "sampled": "batches",
        "rows": [{
            "candidate": {"policy": "fixed", "bits": {"kind": "fixed", "bits": 2}, "options": {}, "method": "compress_"}, "saved_bytes": 5,
            "error": 0.1, "error_error": None, "variance": 0.1, "variance_error": 0.1, "bias": 0.0, "seconds": 0.1,
            "seconds_least": 0.1, "seconds_most": 0.2,
        }],
    },
    "variance profile": {
        "schema": schema.VARIANCE_PROFILE, "model": "M", "contexts": ["a", "b"], "parameters": ["a"],
        "terms": [[1.0], [None]], "terms_error": [[0.1], [0.1]], "sampling": [1.0], "sampling_error": [None],
        "direct": [1.0], "direct_error": [1.0], "bias": [0.0], "bias_error": [0.0], "bits": 2, "draws": 2, "batches": 1,
        "sampled": "batches",
    },
}  # fmt: skip


def cases():
    tables = [
        fewbit.solve("gelu", 2, objective="unbiased"),
        fewbit.solve("relu6", 1),
        fewbit.solve("elu", 1, parameters={"alpha": 2.0}, weight=([-1.0, 0.0, 1.0], [1.0, 2.0])),
        fewbit.solve("tanh", 1, weight="normal:0,2"),
    ]
    yield from SAMPLES.values()
    yield from (solved.document() for solved in tables)
    yield json.loads(table.dumps_tables("relu6", tables[1:2]))


@pytest.mark.parametrize("seed", range(4))
def test_schemas_are_checked_as_by_the_package(seed):
    """Both accept the same documents. If there are several errors, they may report different ones."""
    rng = random.Random(seed)
    bases = list(cases())
    accepted = 0
    for _ in range(120):
        base = rng.choice(bases)
        name = base["schema"]
        document = mutate(base, rng) if rng.random() < 0.95 else copy.deepcopy(base)
        if not isinstance(document, dict) or not finite(document):
            continue
        expected = validator_of(name).is_valid(document)
        problem = schema.find_error(document, name)
        assert (problem is None) == expected, (problem, document)
        accepted += expected
        if problem is not None:
            path, message = problem
            assert message.startswith("expected ") and len(message) < 1000
    assert accepted > 20


@functools.cache
def validator_of(name):
    """Return the validator of the package jsonschema, which is not needed at run time."""
    schemas = [schema.load(name) for name in schema.FILES]
    resources = [(rules["$id"], Resource.from_contents(rules)) for rules in schemas]
    return Draft202012Validator(schema.load(name), registry=Registry().with_resources(resources))


def finite(value):
    """Return whether JSON can hold the value."""
    try:
        json.loads(json.dumps(value, allow_nan=False))
    except ValueError:
        return False
    return True


def test_limits_are_the_same_in_the_schema_and_in_the_table():
    rules = schema.load(schema.TABLE)
    fields, parts = rules["properties"], rules["$defs"]
    assert fields["codes"]["maxItems"] == table.MOST_PIECES == fields["breaks"]["maxItems"] + 1
    knots = parts["knots"]["properties"]
    assert knots["points"]["maxItems"] == knots["values"]["maxItems"] == table.MOST_PIECES
    histogram = parts["weight"]["allOf"][3]["then"]["properties"]
    assert histogram["density"]["maxItems"] == table.MOST_BINS
    assert histogram["edges"]["maxItems"] == table.MOST_BINS + 1
    assert fields["function"]["maxLength"] == table.MOST_CHARACTERS
    assert fields["revision"]["maximum"] == table.MOST_COUNT
    assert documents.MOST_DEPTH > 6
