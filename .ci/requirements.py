"""Print requirements that pyproject.toml names, one a line: of building fewbit ("build"), of fewbit itself ("fewbit"), of extras."""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))


def requirements(name):
    if name == "build":
        return PROJECT["build-system"]["requires"]
    if name == "fewbit":
        return PROJECT["project"]["dependencies"]
    found = []
    for requirement in PROJECT["project"]["optional-dependencies"][name]:
        extras = re.fullmatch(r"fewbit\[(.*)\]", requirement)
        if extras:
            for extra in extras[1].split(","):
                found += requirements(extra)
        else:
            found.append(requirement)
    return found


for name in sys.argv[1:]:
    print(*requirements(name), sep="\n")
