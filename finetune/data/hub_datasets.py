"""Read hub datasets through `datasets`: formats that are also read locally, never a dataset's code."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from finetune import hub
from finetune.data.readers import Row, drop_nulls
from finetune.data.report import Refused, first_line, printable
from finetune.errors import DataError

#: Allowed readers of `datasets`, out of some thirty.
_ALLOWED = ("json", "csv", "parquet")


def read_hub(name: str, config: str | None, split: str, revision: str | None) -> Iterator[Row | Refused]:
    """Read the rows of one split, numbered from 1. Raise DataError."""
    file = f"{name}:{split}"
    for number, row in enumerate(_load(name, config, split, revision), 1):
        yield Row(file, number, {key: drop_nulls(value) for key, value in row.items()})


def _load(name: str, config: str | None, split: str, revision: str | None) -> Any:
    from datasets import load_dataset_builder
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    hub.is_reachable()
    try:
        builder = load_dataset_builder(name, config, revision=revision)
        kind = type(builder).__module__.removeprefix("datasets.packaged_modules.").split(".")[0]
        if kind not in _ALLOWED:
            raise DataError(
                f"{name}: is a dataset of kind {printable(kind)}, which is not supported",
                f"Supported kinds: {', '.join(_ALLOWED)}.",
            )
        builder.download_and_prepare()
        return _undecoded(builder.as_dataset(split=split))
    except DatasetNotFoundError as error:
        raise DataError(
            f"{name}: there is no such file, bundled dataset or dataset on the hub ({first_line(error)})",
            "Check the spelling; for a private or gated dataset run  hf auth login",
        ) from None
    except ConnectionError as error:
        raise DataError(
            f"{name}: is not a local file, and the hub can't be reached: {first_line(error)}",
            "Check the path or the network. For a dataset downloaded earlier set  HF_HUB_OFFLINE=1",
        ) from None
    except (DatasetsError, OSError, ValueError) as error:
        raise DataError(f"{name}: can't be loaded from the hub: {first_line(error)}", _fix(str(error))) from None


def _undecoded(dataset: Any) -> Any:
    from datasets import Image

    features = copy.deepcopy(dataset.features)
    pictures = [feature for feature in _leaves(features) if isinstance(feature, Image)]
    for feature in pictures:
        # images are checked before anything is decoded
        feature.decode = False
    return dataset.cast(features) if pictures else dataset


def _leaves(feature: Any) -> Iterator[Any]:
    if isinstance(feature, dict):
        feature = list(feature.values())
    elif hasattr(feature, "feature"):
        feature = [feature.feature]
    if isinstance(feature, list):
        for inner in feature:
            yield from _leaves(inner)
    else:
        yield feature


def _fix(message: str) -> str:
    if "split" in message:
        return "Name a split with dataset.split, for example  dataset.split=train"
    if "onfig" in message:
        return "Name a configuration with dataset.name."
    return "Look at the dataset's page on the hub, or download its files and give their path."
