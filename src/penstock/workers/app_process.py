"""How does an app of a deployment run in a process of its own?

`python -m penstock.workers.app_process` is started for each, with a description in its environment.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import os
import signal
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from penstock.core.errors import ConfigError
from penstock.workers.apps import App, AppContext
from penstock.workers.router import Router

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

__all__ = ["AppTask", "load_app_class"]

#: The environment variable with the description.
_DESCRIPTION: Final = "PENSTOCK_APP_TASK"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppTask:
    """The description of an app for its process."""

    name: str
    #: The file with the app's class.
    path: str
    #: Files that it imports by their names.
    modules: tuple[str, ...] = ()
    #: Where the streams are.
    directory: str
    deployment: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[int, str] = field(default_factory=dict)
    queue_size: int | None = None

    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-m", "penstock.workers.app_process")

    def environment(self) -> dict[str, str]:
        return {_DESCRIPTION: json.dumps(asdict(self))}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        values: dict[str, Any] = json.loads(environment[_DESCRIPTION])
        values["modules"] = tuple(values["modules"])
        values["devices"] = {int(key): value for key, value in values["devices"].items()}
        return cls(**values)

    def run(self) -> None:
        """Run the app until SIGTERM or SIGINT."""
        for module in map(Path, self.modules):
            if module.stem in sys.modules:
                raise ConfigError(str(module), None, None, "Python has a module of that name")
            _load(module, module.stem)
        context = AppContext(
            name=self.name,
            deployment=self.deployment,
            params=self.params,
            devices=self.devices,
            queue_size=self.queue_size,
        )
        app = load_app_class(Path(self.path))(context)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: app.stop())
        app.run(Router(self.directory))


def load_app_class(path: Path) -> type[App]:
    """Return the one subclass of `App` that a file defines.

    :raises ConfigError: the file is missing, or does not define exactly one.
    """
    if not path.is_file():
        raise ConfigError(str(path), None, None, "there is no such file")
    # Under a name that is not one of Python's own modules, whatever the file is called.
    module = _load(path, f"penstock_app_{path.stem}")
    found = [
        each
        for _, each in inspect.getmembers(module, inspect.isclass)
        if issubclass(each, App) and each.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(each.__name__ for each in found) or "none"
        reason = f"should define one subclass of penstock.workers.apps.App; it has: {names}"
        raise ConfigError(str(path), None, None, reason)
    return found[0]


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(str(path), None, None, "is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    AppTask.of(os.environ).run()
