"""An extension of griffe, which reads fewbit's source for the API reference without importing fewbit.

`fewbit` imports its names when they are first used, and `fewbit.nn` and `fewbit.functional` collect the names of their
files, so their source does not define the names that users write. This extension adds these names.
"""

import ast

import griffe


class PublicNames(griffe.Extension):
    """Add the names that users write, such as `fewbit.compress_` and `fewbit.nn.Linear`, to the package fewbit."""

    def on_package(self, *, pkg, **_):
        """Add the public names to the package that was read."""
        if pkg.name != "fewbit":
            return
        for name, home in ast.literal_eval(str(pkg["_HOME"].value)).items():
            pkg.set_member(name, griffe.Alias(name, f"{home}.{name}", parent=pkg))
        for folder in (pkg["nn"], pkg["functional"]):
            # Some functions have the names of their files, so the objects themselves take the places of the files.
            files = [member for member in folder.members.values() if is_file(member)]
            for file in files:
                for name, member in list(file.members.items()):
                    if not name.startswith("_") and not member.is_alias and is_defined(member):
                        folder.set_member(name, member)


def is_file(member):
    """Return whether a member of a package is one of its files."""
    return not member.is_alias and member.is_module


def is_defined(member):
    """Return whether a member of a file is a class or a function."""
    return member.is_class or member.is_function
