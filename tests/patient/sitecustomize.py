"""Every Python process that finds this directory on its path is patient: each module of the product that `patience`
names gets those constants as soon as it has been imported."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from patience import ELSEWHERE  # type: ignore[import-not-found]


class Patient(MetaPathFinder):
    @staticmethod
    def find_spec(name: str, path: object, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in ELSEWHERE else None  # type: ignore[arg-type]
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            vars(module).update(ELSEWHERE[name])

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Patient)  # type: ignore[arg-type]
