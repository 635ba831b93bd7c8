"""Commands for tables: solve, list, show, plot, compare and verify."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

from fewbit.cli.application import BAD_INPUT, FAILED, app, complain
from fewbit.cli.options import (
    FunctionName,
    TableSource,
    function_option,
    given,
    json_option,
    number,
    output_options,
    several_bits,
    table_options,
)
from fewbit.cli.output import print_report, print_result
from fewbit.cli.progress_bar import Progress
from fewbit.cli.selection import select_tables
from fewbit.errors import FewbitError, TableError
from fewbit.printable import printable

QUANTIZER = "quantizer"
"""The argument with which `fewbit compare` compares quantizers instead of tables."""


@app.command()
@click.argument("name", type=FunctionName())
@table_options
@number(
    "--grid",
    "The number of cells. More bring the error and the lower bound closer together.",
)
@click.option(
    "--no-refine",
    is_flag=True,
    help="Keep the levels that are best on the cells.",
)
@number("--threads", "Use at most N threads.")
@output_options("the table document", ".json")
@json_option
def solve(name, no_refine, output, force, as_json, **request):
    """Solve for the best table of NAME and show it.

    NAME is a function that 'fewbit list' shows, or an alias of such a function. It may also be
    package.module:f, where f is any Python function of NumPy arrays or torch tensors.

    \b
    Examples:
      fewbit solve gelu --bits 3
      fewbit solve elu --param alpha=2 --bits 2 --domain -5 5 -o elu.json
      fewbit solve numpy:arctan --bits 3 --json
    """
    from fewbit.solver.solve import solve

    if request["bits"] is None and request["levels"] is None:
        raise FewbitError("expected --bits from 1 to 8, or --levels from 2 to 256, got neither")
    with Progress() as progress:
        table = solve(name, refine=not no_refine, progress=progress, **given(**request))
    if output is not None:
        table.save(output, force=force)
    _show_table(table, as_json, output)


@app.command("list")
@json_option
def list_(as_json):
    """List the functions that fewbit knows.

    The columns are the parameters with their defaults, the aliases, the domain, the limits of
    f', and the bits of the tables that are shipped with fewbit (form levels).

    \b
    Examples:
      fewbit list
      fewbit list --json
    """
    from fewbit.catalog.listing import FunctionList

    print_result(FunctionList(), as_json)


@app.command()
@click.argument("source", metavar="NAME|FILE", type=TableSource())
@table_options
@function_option
@json_option
def show(source, function, as_json, **request):
    """Show a table that is shipped, was solved before, or is in a file.

    With the NAME of a function, the command shows all shipped tables of this function, or with
    --bits one table, which is solved and cached if it is not shipped. With a FILE, the command
    shows those tables of the file that the options select. A FILE is a path that ends in .json or
    has a slash.

    \b
    Examples:
      fewbit show gelu
      fewbit show gelu --bits 3 --weight normal
      fewbit show elu.json
    """
    tables = select_tables(source, request, function, several=True)
    if len(tables) == 1:
        _show_table(tables[0], as_json)
    elif as_json:
        from fewbit.table import dumps_tables

        click.echo(dumps_tables(tables[0].function, tables))
    else:
        from fewbit.catalog.table_report import tables_report

        print_report(tables_report(printable(source), tables))


@app.command()
@click.argument("source", metavar="NAME|FILE", type=TableSource())
@table_options
@function_option
@output_options("the picture, PNG or SVG by its ending,", ".png", ".svg", required=True)
def plot(source, function, output, force, **request):
    """Draw a table: f' and q, and below their difference.

    NAME|FILE and the options are those of 'fewbit show'. They must select exactly one table.

    \b
    Examples:
      fewbit plot gelu --bits 3 -o gelu.png
      fewbit plot elu.json -o elu.svg
    """
    (table,) = select_tables(source, request, function, several=False)
    table.plot(path=output, force=force)
    click.echo(f"saved to {printable(output)}")


@app.command()
@click.argument("names", nargs=-1, metavar="[NAME]...|quantizer", type=FunctionName())
@several_bits(default="1 to 4; with quantizer 1 to 8")
@output_options("the rows, CSV or JSON by its ending,", ".csv", ".json")
@json_option
def compare(names, bits, output, force, as_json):
    """Solve tables of both forms, and compare errors with the paper's.

    The paper is Few-bit Backward (ICML 2023); its errors are those of Table 3. Without a NAME, the
    functions are those of the paper, and Mish.

    'fewbit compare quantizer' compares instead the errors of quantizers for saved tensors, both
    computed and measured on random numbers.

    \b
    Examples:
      fewbit compare
      fewbit compare gelu silu --bits 3 --bits 4 -o compared.csv
      fewbit compare quantizer
    """
    options = given(bits=bits)
    for name in names:
        if name != QUANTIZER and difflib.get_close_matches(name, [QUANTIZER]):
            raise FewbitError(f"unknown function {name!r}: did you mean {QUANTIZER}?")
    with Progress() as progress:
        if QUANTIZER in names:
            comparison = _compare_quantizers(names, progress, options)
        else:
            from fewbit.catalog.comparison import compare

            comparison = compare(names or None, progress=progress, **options)
    if output is not None:
        comparison.save(output, force=force)
    print_result(comparison, as_json, output)


@app.command()
@click.argument("files", nargs=-1, metavar="[FILE]...")
@function_option
@json_option
def verify(files, function, as_json):
    """Recompute and check the errors and other numbers that tables claim.

    For each FILE (default: all shipped tables) the command checks the schema, the errors of each
    table (by adaptive quadrature), that no lower bound is above the error, and that no table is
    worse than one with fewer bits. If a function is not built in, the error is recomputed only
    if --function names it. The lower bound is not proved again.

    The exit code is 0 if everything holds, 1 if a claim does not hold, and 2 if a FILE or its
    function cannot be read.

    \b
    Examples:
      fewbit verify
      fewbit verify elu.json --json
    """
    from fewbit.catalog.verification import Verification, verify

    paths = [Path(name) for name in files] or _shipped_files()
    found, is_unreadable = [], False
    with Progress() as progress:
        for done, path in enumerate(paths):
            progress(f"verifying {path.name}", done, len(paths))
            try:
                found.append((path, verify(path, function=function)))
            except TableError as error:
                complain("error", error)
                is_unreadable = True
    verification = Verification(tuple(found))
    if as_json or found:
        print_result(verification, as_json)
    is_wrong = any(finding.problems for finding in verification.findings)
    is_unchecked = any(finding.unchecked for finding in verification.findings)
    if is_unreadable or is_wrong or is_unchecked:
        context = click.get_current_context()
        context.exit(FAILED if is_wrong and not is_unreadable else BAD_INPUT)


def _compare_quantizers(names, progress, options):
    if len(names) > 1:
        raise FewbitError(
            f"expected names of functions, or {QUANTIZER} alone, got {' '.join(map(printable, names))}"
        )
    from fewbit.catalog.quantizers import compare_quantizers

    return compare_quantizers(progress=progress, **options)


def _show_table(table, as_json, saved=None):
    if as_json:
        click.echo(table.dumps())
        return
    from fewbit.catalog.table_report import TableReport

    print_report(TableReport(table), saved)


def _shipped_files():
    from fewbit.catalog.store import tables_directory

    paths = sorted(tables_directory().glob("*.json"))
    if not paths:
        raise TableError("expected shipped tables to verify, found none")
    return paths
