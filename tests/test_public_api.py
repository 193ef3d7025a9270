"""The public names and signatures, frozen. Growth of the surface is a decision: change tests/public_api.txt with it.

Rewrite the file with ``python -m tests.test_public_api``.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import hapi

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def surface() -> str:
    lines: list[str] = []
    modules: list[tuple[str, ModuleType]] = [("hapi", hapi)]
    modules += [(f"hapi.{name}", getattr(hapi, name)) for name in ("callbacks", "datasets", "distributed", "metrics")]
    for prefix, module in modules:
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if inspect.ismodule(value) or name == "__version__":
                lines.append(f"{prefix}.{name}")
            elif inspect.isclass(value):
                lines.append(f"class {prefix}.{name}{_signature(value)}")
                lines += [f"    {line}" for line in _members(value)]
            else:
                lines.append(f"{prefix}.{name}{_signature(value)}")
    return "\n".join(lines) + "\n"


def _members(cls: type) -> list[str]:
    out = []
    for name, value in sorted(vars(cls).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            out.append(f"{name}: property")
        elif callable(value) or isinstance(value, (staticmethod, classmethod)):
            out.append(f"{name}{_signature(getattr(cls, name))}")
    return out


def _signature(value: object) -> str:
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    # Names, order, kinds and defaults are the promise; annotations may become more precise.
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def test_the_public_surface_is_the_one_on_file() -> None:
    assert surface() == SNAPSHOT.read_text(), (
        "the public API changed; if that is meant: python -m tests.test_public_api"
    )


def test_everything_public_is_documented() -> None:
    for prefix, module in (("hapi", hapi), ("hapi.callbacks", hapi.callbacks), ("hapi.metrics", hapi.metrics)):
        for name in module.__all__:
            value = getattr(module, name)
            if name != "__version__":
                assert inspect.getdoc(value), f"{prefix}.{name} has no docstring"


if __name__ == "__main__":
    SNAPSHOT.write_text(surface())
