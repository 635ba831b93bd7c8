"""Settings with which `fewbit.fit_` measures little."""

from fewbit.planning import costs, examination


def quick_fit(monkeypatch, folder, probes=1) -> None:
    """Time each option once, and keep costs in a folder in place of the user's cache."""
    monkeypatch.setattr(examination, "ROUNDS", 1)
    monkeypatch.setattr(examination, "PROBES", probes)
    monkeypatch.setattr(costs, "SHORTEST", 0.0)
    monkeypatch.setenv("FEWBIT_CACHE", str(folder / "cache"))
