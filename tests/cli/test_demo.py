"""The command `fewbit demo`: training, counted bytes and report, with a few steps only."""

import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import fewbit
from fewbit import cli
from fewbit.demo import experiment, training
from fewbit.demo.demo_result import Arm, Demo
from fewbit.demo.experiment import run_demo
from fewbit.demo.parallel import run_all
from fewbit.demo.small_transformer import CharTransformer
from fewbit.demo.text import Corpus, python_topics
from fewbit.errors import FewbitError
from fewbit.render.terminal import plain

SMALL = training.TrainingSettings(
    steps=12, batch=4, context=16, width=16, depth=2, heads=2, held_out_windows=8
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Use one thread, since tensors are tiny and other tests may run on the other cores."""
    with experiment.one_thread():
        yield


@pytest.fixture(scope="module")
def corpus():
    return python_topics()


@pytest.fixture(scope="module")
def demo(corpus):
    """Train exact GELUs, GELUs with 4 and 1 bits, and whole models with 2 bits and 2 bits on average, from two seeds."""
    return run_demo((4, 1), (2,), (2,), seeds=2, settings=SMALL, corpus=corpus)


def test_corpus_is_the_text(corpus):
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    numbers = torch.cat([corpus.train, corpus.held_out]).tolist()
    assert "".join(corpus.alphabet[number] for number in numbers) == text
    assert len(corpus.held_out) == pytest.approx(len(text) / 10, abs=1)


def test_batches_are_windows_and_their_successors():
    numbers = torch.randint(26, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    corpus = Corpus.from_text("".join(chr(97 + number) for number in numbers))
    x, y = corpus.batch(5, 20, torch.Generator().manual_seed(3))
    again, _ = corpus.batch(5, 20, torch.Generator().manual_seed(3))
    other, _ = corpus.batch(5, 20, torch.Generator().manual_seed(4))
    assert x.shape == y.shape == (5, 20)
    assert torch.equal(x[:, 1:], y[:, :-1]) and torch.equal(x, again)
    assert not torch.equal(x, other)
    windows = corpus.train.unfold(0, 21, 1)
    for row, following in zip(x, y[:, -1:], strict=True):
        assert (windows == torch.cat([row, following])).all(1).any()


@pytest.mark.parametrize("method", ["batch", "held_out_batch"])
def test_no_window_reaches_over_the_end(method):
    corpus = Corpus.from_text("abcdefghij" * 3)  # 27 characters to train on, 3 held out
    extra = (torch.Generator().manual_seed(0),) if method == "batch" else ()
    context = 26 if method == "batch" else 2
    x, y = getattr(corpus, method)(200, context, *extra)
    assert x.shape == (200, context)
    part = corpus.train if method == "batch" else corpus.held_out
    assert torch.equal(x[0], part[:context]) and torch.equal(y[-1], part[1 : context + 1])


def test_a_character_sees_only_what_came_before():
    torch.manual_seed(0)
    model = CharTransformer(11, 16, width=16, depth=2, heads=2)
    characters = torch.randint(11, (3, 16))
    changed = characters.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 11
    before, after = model(characters), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.isclose(before[:, 9:], after[:, 9:]).all(-1).any()


@pytest.mark.slow
def test_the_loss_falls_and_same_seed_is_same_curve(corpus):
    settings = replace(SMALL, steps=40, batch=8)

    def run(seed):
        model = training.build(corpus, settings, partial(fewbit.GELU, bits=3), seed)
        return training.train(model, corpus, settings, seed)

    state = torch.random.get_rng_state()
    first, again, other = run(0), run(0), run(1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert first == again and first.train != other.train
    assert first.train[0] == pytest.approx(math.log(len(corpus.alphabet)), abs=0.5)
    assert statistics.fmean(first.train[-5:]) < first.train[0] - 0.7
    assert first.final < first.train[0] - 0.7


def test_held_out_loss_is_the_mean_over_the_windows(corpus):
    model = training.build(corpus, SMALL, nn.GELU, 0)
    x, y = corpus.held_out_batch(SMALL.held_out_windows, SMALL.context)
    log = torch.log_softmax(model(x).double(), -1)
    expected = -log.gather(-1, y[..., None]).mean().item()
    assert training.held_out_loss(model, corpus, SMALL) == pytest.approx(expected, rel=1e-5)
    assert model.training


def test_the_learning_rate_warms_up_and_ends_at_zero():
    settings = training.TrainingSettings(steps=100, warmup=0.1)
    rates = [training._rate(step, settings) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1)
    assert rates.index(max(rates)) == 9 and rates[-1] == pytest.approx(0, abs=1e-9)


def test_saved_bytes_are_the_promise(demo):
    elements = SMALL.batch * SMALL.context * 4 * SMALL.width  # of each of `depth` GELUs
    exact, four, one, everything, average = demo.arms
    assert [arm.bits for arm in demo.arms] == [None, 4, 1, None, None]
    assert [arm.everything for arm in demo.arms] == [None, None, None, 2, 2]
    assert [arm.level for arm in demo.arms[3:]] == ["L2", "L3"]
    for arm in (everything, average):
        assert 0 < arm.activation_bytes < exact.activation_bytes / 7
        assert exact.model_bytes > 9 * arm.model_bytes
    assert exact.activation_bytes == SMALL.depth * 4 * elements
    for arm in (four, one):
        assert arm.activation_bytes == SMALL.depth * 4 * arm.bits * math.ceil(elements / 32)
        saved = exact.activation_bytes - arm.activation_bytes
        assert exact.model_bytes - arm.model_bytes == saved


def test_runs_compare_in_pairs(demo):
    exact, four, one, everything, average = demo.arms
    assert [run.seed for run in four.runs] == [0, 1]
    for arm, limit in ((four, 0.02), (everything, 0.1), (average, 0.1)):
        for ours, theirs in zip(arm.runs, exact.runs, strict=True):
            assert ours.train[0] == pytest.approx(theirs.train[0], abs=1e-5)  # the forward is exact
            assert ours.final == pytest.approx(theirs.final, abs=limit)
            assert ours.final != theirs.final
    assert one.runs != four.runs


def test_notes_explain_the_rows(demo):
    """A word of a row's name is explained if there is such a row."""
    for arms, words in (
        (demo.arms, {"all", "L3"}),
        (demo.arms[:4], {"all"}),
        (demo.arms[:3], set()),
    ):
        notes = {note.partition(":")[0] for note in replace(demo, arms=arms).view().notes}
        assert notes & {"all", "L3"} == words


def test_the_demo_leaves_threads_and_random_numbers_alone(corpus):
    state = torch.random.get_rng_state()
    torch.set_num_threads(2)
    try:
        run_demo((3,), (), settings=replace(SMALL, steps=1), corpus=corpus)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert torch.equal(state, torch.random.get_rng_state())


def test_progress_counts_every_step(corpus):
    seen = []
    settings = replace(SMALL, steps=2)
    run_demo((2,), (4,), (), 2, settings, corpus, lambda *call: seen.append(call))
    assert [done for _, done, _ in seen] == list(range(1, 13))
    assert {total for *_, total in seen} == {12}
    assert seen[0][0] == "GELU, exact, seed 0" and seen[6][0] == "GELU, 2 bits, seed 1"
    assert seen[-1][0] == "all 4 bits, seed 1"


@pytest.mark.slow
def test_the_default_arms_are_few_and_all_are_those_of_the_stored_runs():
    stored_arms = json.loads(experiment.STORED.read_text())["arms"]
    settings = replace(SMALL, steps=1)
    few = run_demo(settings=settings)
    every = run_demo(settings=settings, **experiment.EVERY_ARM)
    assert [arm.name for arm in few.arms] == ["exact", "3 bits", "all 4 bits"]
    assert [arm.name for arm in every.arms] == [arm["name"] for arm in stored_arms]


@pytest.mark.slow
def test_processes_change_nothing_but_the_time():
    settings, seen = replace(SMALL, steps=20), []
    alone = run_demo((2,), (), (2,), 2, settings)
    beside = run_demo((2,), (), (2,), 2, settings, None, lambda *call: seen.append(call), 2)
    for ours, theirs in zip(beside.arms, alone.arms, strict=True):
        for attribute in ("runs", "activation_bytes", "model_bytes"):
            assert getattr(ours, attribute) == getattr(theirs, attribute)
    done = [number for _, number, _ in seen]
    assert done == sorted(done) and 0 < done[0] and done[-1] <= 6 * 20
    assert {total for *_, total in seen} == {6 * 20}


def _ends(task, step):
    if task == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "raises":
        raise FewbitError("made up")
    for number in range(60_000):  # ten minutes
        step(number + 1)
        time.sleep(0.01)


def interrupt(index, done):
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "report", "error", "message"),
    [
        ("killed", print, FewbitError, "a process of the demo was ended"),
        ("raises", print, FewbitError, "made up"),
        ("goes on", interrupt, KeyboardInterrupt, None),
    ],
)
def test_what_ends_one_process_ends_all(other, report, error, message):
    start = time.monotonic()
    with pytest.raises(error, match=message):
        run_all(_ends, ["goes on", other], 2, report)
    assert time.monotonic() - start < 300
    assert not multiprocessing.active_children()


def test_a_text_too_short_is_refused():
    with pytest.raises(FewbitError, match="corpus: expected more than 160 characters"):
        run_demo((3,), settings=SMALL, corpus=Corpus.from_text("a short text"))


def made_up(finals, few, stored=None):
    """Make a demo with given final losses of the exact and the 3-bit arm."""

    def arm(bits, losses):
        runs = tuple(training.Run(i, (3.0, 2.0), loss) for i, loss in enumerate(losses))
        return Arm(bits, 4096 if bits is None else 384, 10_000, runs, 1.0)

    return Demo(SMALL, 1000, "reference", (arm(None, finals), arm(3, few)), stored)


def stored(std, difference):
    within = abs(difference) <= std
    few = {"name": "3 bits", "difference": difference, "difference_std": 0.01, "within_one_std": within}  # fmt: skip
    return {"seeds": 5, "settings": asdict(SMALL), "arms": [{"std": std}, few]}


@pytest.mark.parametrize(
    ("few", "verdict"),
    [([2.1, 2.3], "yes (+0.7)"), ([2.2, 2.4], "no (+1.4)"), ([2.144, 2.344], "no (+1.02)")],
)
def test_the_verdict_of_several_seeds_is_their_own(few, verdict):
    demo = made_up([2.0, 2.2], few, stored(9.0, 0.0))
    text = plain(demo)
    assert verdict in text
    assert f"std: {statistics.stdev([2.0, 2.2]):.4f}, from these runs." in text
    record = demo.to_dict()["arms"][1]
    assert record["within_one_std"] == verdict.startswith("yes")
    assert record["difference"] == pytest.approx(statistics.fmean(few) - 2.1)


@pytest.mark.parametrize(("std", "verdict"), [(0.2, "yes (+0.5)"), (0.04, "no (+2.5)")])
def test_the_verdict_of_one_seed_is_the_stored_one(std, verdict):
    text = plain(made_up([2.0], [2.1], stored(std, 0.05)))
    within = "within" if std == 0.2 else "not within"
    assert verdict in text and ("yes" in text) == (std == 0.2)
    assert f"std: {std:.4f}, from 5 seeds in benchmarks/results/demo.json." in text
    assert f"+0.0500 ± 0.0100, {within} one std" in text
    unknown = made_up([2.0], [2.1])
    assert "unknown" in plain(unknown) and "yes" not in plain(unknown)
    assert unknown.to_dict()["arms"][1]["within_one_std"] is None


def test_a_narrow_terminal_leaves_out_bytes(demo):
    header = plain(demo, 80).splitlines()[2]
    assert header.startswith("setting ") and "all bytes" in header
    assert plain(demo, 60).endswith("columns left out: GELU bytes, all bytes")


def test_stored_runs_of_other_settings_are_not_used(tmp_path, monkeypatch):
    path = tmp_path / "demo.json"
    monkeypatch.setattr(experiment, "STORED", path)
    assert experiment._stored(SMALL) is None
    path.write_text(json.dumps(stored(0.1, 0.0)))
    assert experiment._stored(SMALL)["seeds"] == 5
    assert experiment._stored(replace(SMALL, steps=13)) is None
    path.write_text("{")
    assert experiment._stored(SMALL) is None


def test_the_curve_is_the_mean_of_blocks():
    runs = tuple(training.Run(i, tuple(float(s + i) for s in range(70)), 1.0) for i in (0, 2))
    steps, losses = Arm(3, 0, 0, runs, 0.0).curve()
    assert len(steps) == len(losses) == 35
    assert steps[:2] == [1.5, 3.5] and losses[:2] == [1.5, 3.5]


def test_the_picture_shows_every_arm(demo):
    left, right = demo.plot().axes
    assert len(left.get_lines()) == 5
    names = [tick.get_text().replace("\n", " ") for tick in right.get_xticklabels()]
    assert names == ["4 bits", "1 bit", "all 2 bits", "L3 2 bits"]


def run(*arguments):
    return CliRunner().invoke(
        cli.app, ["demo", *arguments], prog_name="fewbit", env={"COLUMNS": "80"}
    )


@pytest.fixture
def small(monkeypatch):
    """Make the command train the small model."""
    monkeypatch.setattr(training, "TrainingSettings", lambda steps=2: replace(SMALL, steps=steps))


@pytest.mark.slow
def test_command_writes_both_files_and_refuses_to_overwrite(tmp_path, small):
    out = tmp_path / "new" / "folder"
    first = run("--bits", "3", "--output", str(out))
    assert first.exit_code == 0, first.stderr
    assert "3 bits" in first.stdout and "saved to" in first.stdout
    assert (out / "demo_losses.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.iterdir()) == ["demo.json", "demo_losses.png"]
    again = run("--bits", "3", "--output", str(out))
    assert again.exit_code == 2
    assert again.stderr.startswith("fewbit: error:") and "--force" in again.stderr
    forced = run("--bits", "2", "--steps", "3", "--output", str(out), "--json", "--force")
    assert forced.exit_code == 0, forced.stderr
    document = json.loads(forced.stdout)
    assert document == json.loads((out / "demo.json").read_text())
    assert document["settings"]["steps"] == 3
    assert [arm["bits"] for arm in document["arms"]] == [None, 2, None]
    assert [arm["everything"] for arm in document["arms"]] == [None, None, 4]


@pytest.mark.parametrize(
    "arguments",
    ["--bits 0", "--everything 9", "--average 0.5", "--steps 0", "--seeds 0", f"--output {__file__}"],
)  # fmt: skip
def test_bad_options_are_one_line(arguments):
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert result.stderr.startswith("fewbit: error:") and result.stderr.count("\n") == 1


def test_without_torch_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "fewbit.demo.experiment")
    result = run("--output", str(tmp_path))
    assert result.exit_code == 2
    assert "needs torch" in result.stderr
