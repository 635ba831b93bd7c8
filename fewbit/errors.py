"""The exceptions fewbit raises on bad input; each message is one line: what was expected, what came."""

from fewbit.text import printable


class FewbitError(ValueError):
    """Base of every exception that fewbit raises on purpose. The message is always one printable line."""

    def __str__(self) -> str:
        return printable(super().__str__())


class FunctionError(FewbitError):
    """An unknown function or parameter, or a callable that cannot be used."""


class WeightError(FewbitError):
    """A weight specification, density or file that cannot be used."""


class SolveError(FewbitError):
    """A request the solver cannot satisfy (bits, domain, objective, tails ...)."""


class TableError(FewbitError):
    """A table document that breaks its schema or its invariants."""


class InputError(FewbitError):
    """A tensor or an argument of a layer that cannot be used."""


class GradientError(FewbitError):
    """A derivative that few-bit codes cannot give."""


class BoundWarning(UserWarning):
    """Gradients that are larger than the bound of policy="error-bound" allows."""


class OutputExistsError(FewbitError):
    """Refusal to overwrite an existing file. Its one argument is the path."""

    @property
    def path(self):
        return self.args[0]

    def __str__(self) -> str:
        return printable(f"{self.path} exists; pass force=True to overwrite it")
