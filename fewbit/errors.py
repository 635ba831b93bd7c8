"""The exceptions that fewbit raises for bad input. Each message is one line, mostly "expected ..., got ..."."""

from fewbit.printable import printable


class FewbitError(ValueError):
    """The base class of all exceptions that fewbit raises on purpose. The message is one printable line."""

    def __str__(self) -> str:
        return printable(super().__str__())


class FunctionError(FewbitError):
    """Raised for an unknown activation function, a bad parameter of one, or a callable that cannot be used."""


class WeightError(FewbitError):
    """Raised for a weight, density or file of weights that cannot be used."""


class SolveError(FewbitError):
    """Raised for a request that the solver cannot satisfy, such as impossible bits, domain, objective or tails."""


class TableError(FewbitError):
    """Raised for a table whose JSON document violates the schema, or whose fields contradict each other."""


class InputError(FewbitError):
    """Raised for a tensor or an argument that cannot be used."""


class GradientError(FewbitError):
    """Raised for a derivative that cannot be computed from the saved codes, such as a second derivative."""


class BoundWarning(UserWarning):
    """The warning that the error of a gradient exceeds the bound of `ErrorBound`."""


class CompileWarning(UserWarning):
    """The warning that a model of `fewbit.compile` saves exact tensors because torch.compile does not compile all of it."""


class MissingPackageError(FewbitError, ImportError):
    """Raised if a feature needs a package that is not installed.

    Args:
        feature: The feature's name, with which the message begins.
        requirement: What to give to `pip install`.
    """

    def __init__(self, feature: str, package: str, requirement: str):
        quoted = f"'{requirement}'" if "[" in requirement else requirement
        super().__init__(f"{feature} needs {package}: pip install {quoted}")
        self.package = package


class OutputExistsError(FewbitError):
    """Raised if a file exists and would be overwritten. The only argument is the path."""

    @property
    def path(self) -> object:
        """The path of the existing file."""
        return self.args[0]

    def __str__(self) -> str:
        return printable(f"{self.path} exists; pass force=True to overwrite it")
