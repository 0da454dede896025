"""Imports of libraries without the work at import that a dry run does not need."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from finetune.compat.bitsandbytes import import_without_compiler
from finetune.compat.patch_registry import PrivateName, replaced

_SCAN = "transformers.utils.import_utils.create_import_structure_from_path"

#: Read in transformers 5.23.0 and TRL 1.16.0.
PRIVATE_NAMES = (
    PrivateName(_SCAN, "patch",
                "transformers reads the files of all models at its import, and again at that of transformers.models",
                "transformers.utils.import_utils.define_import_structure", "module_path",
                needs="a process that has not imported transformers.models"),
    PrivateName("trl.trainer.utils.add_fused_lm_head", "private call",
                "its module imports pandas and datasets for two annotations"),
)  # fmt: skip
_ANNOTATIONS = {"pandas": "DataFrame", "datasets": "IterableDataset"}


def import_libraries() -> None:
    """Import bitsandbytes without torch's compiler, and transformers' models in one scan; before anything else does."""
    import_without_compiler()
    import_models_in_one_scan()


def import_models_in_one_scan() -> None:
    """Import transformers.models with the list of files that `import transformers` has made: 0.25 s of each cold start.

    The list is cached by path: a folder's, when transformers is imported, and its `__init__.py`'s, which has the same list.
    """
    if "transformers.models" in sys.modules:
        return
    from transformers.utils.import_utils import create_import_structure_from_path as scan

    with replaced(_SCAN, lambda path: scan(Path(path).parent if Path(path).is_file() else path)):
        importlib.import_module("transformers.models")


def fused_lm_head() -> Any:
    """TRL's `add_fused_lm_head`, without pandas and datasets where nothing has imported them: 0.3 s of each cold start."""
    import transformers  # noqa: F401  # these look for the packages themselves
    import trl.kernels.chunked_logprob
    import trl.trainer.model_config  # noqa: F401

    try:
        with _classes_for_annotations():
            from trl.trainer.utils import add_fused_lm_head
    except (ImportError, AttributeError):  # another version of TRL uses more of them at its import
        from trl.trainer.utils import add_fused_lm_head
    return add_fused_lm_head


class _Deferred:
    """Stands for a class of a package that is imported when the class is used."""

    def __init__(self, module: str, name: str) -> None:
        self._names = module, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded(), name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._loaded()(*arguments, **named)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._loaded())

    def _loaded(self) -> Any:
        module, name = self._names
        return getattr(importlib.import_module(module), name)


@contextmanager
def _classes_for_annotations() -> Iterator[None]:
    """Inside, packages that are not imported yet have one class each, which imports them when it is used."""
    absent = [name for name in _ANNOTATIONS if name not in sys.modules and importlib.util.find_spec(name)]
    sys.modules.update({name: _placeholder(name) for name in absent})
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def _placeholder(name: str) -> ModuleType:
    """A module with one class; its other attributes are the package's, once it is no longer in the package's place."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)

    def loaded(attribute: str) -> Any:
        if sys.modules.get(name) is module:
            raise AttributeError(f"{name}.{attribute} is used at import")
        return getattr(importlib.import_module(name), attribute)

    setattr(module, _ANNOTATIONS[name], _Deferred(name, _ANNOTATIONS[name]))
    module.__getattr__ = loaded  # type: ignore[method-assign]
    return module
