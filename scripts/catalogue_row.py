"""Makes or refreshes a row of the offline catalogue of models, finetune/model/configurations.json.

    python scripts/catalogue_row.py Qwen/Qwen3-8B path/to/config.json --parameters 8.19 --source hub
    python scripts/catalogue_row.py org/name smollm3 --parameters 3.08 --source transformers
    python scripts/catalogue_row.py --renew               # every row whose only source is transformers
    python scripts/catalogue_row.py --check               # only says which of these rows would change

A model type in place of a config.json stands for the defaults of its configuration class. `--parameters` are the published
billions of the language model; the row is refused if the modules that transformers builds have another number. A row of the
same id is replaced, except for `also` and `pretrained`, which are written by hand.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

CATALOGUE = Path(__file__).resolve().parents[1] / "finetune" / "model" / "configurations.json"
#: Most that the modules' number of parameters may differ from the published one, as in the tests.
MOST_DIFFERENCE = 0.015
WIDTH = 126
TODAY = datetime.date.today().isoformat()
#: Fields of config.json that change neither the modules nor their sizes.
_LEFT_OUT = re.compile(
    r"_token_ids?$|_token_index$|^(id2label|label2id|architectures|auto_map|transformers_version|_name_or_path|use_cache)$"
    r"|dtype|initializer|dropout|_eps$|epsilon|^rope_|layer_rope_theta|hidden_act|^(hidden|mamba|mlp)_(hidden_)?act|activation|^output_|return_dict"
    r"|problem_type|chunk_size_feed_forward|is_encoder_decoder|pretraining_tp|router_aux|router_jitter|time_step|mtp_|nextn"
    r"|^num_logits_to_keep$|rescale|residual_in|^(vision|audio)_config$|^quantization_config$|partial_rotary|swiglu_limit"
    r"|logit_softcap|^language_model_only$|tie_encoder|is_decoder|cross_attention|pruned_heads|use_mamba_kernels"
)


def row_values(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config.json that planning needs; without lists that the class makes itself; a null window is kept."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    def needed(values: dict[str, Any]) -> dict[str, Any]:
        fields = {k: v for k, v in values.items() if k == "sliding_window" or (v is not None and not _LEFT_OUT.search(k))}
        fields = {name: needed(value) if name == "text_config" else value for name, value in fields.items()}
        config_class = CONFIG_MAPPING[values["model_type"]] if values.get("model_type") in CONFIG_MAPPING else None
        for name in [name for name, value in fields.items() if isinstance(value, list) and config_class]:
            shorter = {key: value for key, value in fields.items() if key not in (name, "model_type")}
            if getattr(config_class.from_dict(shorter), name, None) == fields[name]:
                del fields[name]
        return fields

    return needed(config)


def default_config(model_type: str) -> dict[str, Any]:
    """Return the default values of a configuration class of transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))


def check_parameters(name: str, config: dict[str, Any], billions: float) -> None:
    """Raises SystemExit when the modules have another number of parameters than the published one."""
    from finetune.planner.shape import shape_of
    from finetune.recipe import recipe_from

    counted = shape_of(config, recipe_from({"model_name_or_path": name, "dataset": "d"})).parameters / 1e9
    if abs(counted / billions - 1) > MOST_DIFFERENCE:
        raise SystemExit(f"{name}: the modules have {counted:.4g} billion parameters, not {billions:g}. Check --parameters")


def row_text(name: str, row: dict[str, Any]) -> str:
    """The row as lines of the file, broken between values."""
    spaceless = re.sub(r'"[^"]*"', lambda quoted: quoted[0].replace(" ", "\0"), f"{json.dumps(name)}: {json.dumps(row)}")
    lines = textwrap.wrap(
        spaceless, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\0", " ")


def with_row(text: str, name: str, row: dict[str, Any]) -> str:
    """Return the file's text with this row, in place of the row of the same id or at the end."""
    head, opening, body = text.partition(' "models": {\n')
    rows = re.split(r",\n(?=  \")", body.removesuffix("\n }\n}\n"))
    new = row_text(name, row)
    index = next((index for index, old in enumerate(rows) if old.startswith(f"  {json.dumps(name)}:")), None)
    rows = [*rows, new] if index is None else [*rows[:index], new, *rows[index + 1 :]]
    changed = head + opening + ",\n".join(rows) + "\n }\n}\n"
    if json.loads(changed)["models"][name] != row:
        raise SystemExit(f"{name}: the row can't be written into {CATALOGUE.name}. Check the file's layout")
    return changed


def renewed(text: str) -> str:
    """Return the file's text with transformers' current defaults in rows without another source; prints the differences."""
    for name, row in json.loads(text)["models"].items():
        if row.get("source") == "transformers":
            defaults = default_config(row["model_type"])
            fields = sorted(row.keys() & defaults.keys() - {"max_position_embeddings"})  # a checkpoint's is often longer
            values = {field: defaults[field] for field in fields if defaults[field] not in (None, row[field])}
            print(name, values or "has the defaults")
            text = with_row(text, name, row | values | {"date": TODAY}) if values else text
    return text


def main() -> int:
    """Make one row, or renew rows."""
    text = CATALOGUE.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--check"]:
        return renewed(text) != text
    if sys.argv[1:] == ["--renew"]:
        return not CATALOGUE.write_text(renewed(text), encoding="utf-8")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("config")
    parser.add_argument("--parameters", type=float, required=True)
    parser.add_argument("--source", required=True)
    options = parser.parse_args()
    path, old = Path(options.config), json.loads(text)["models"].get(options.name, {})
    values = row_values(json.loads(path.read_text(encoding="utf-8")) if path.is_file() else default_config(options.config))
    check_parameters(options.name, values, options.parameters)
    by_hand = {field: old[field] for field in ("pretrained", "also") if field in old}
    row = {"parameters": options.parameters, **values, **by_hand, "source": options.source, "date": TODAY}
    return not CATALOGUE.write_text(with_row(text, options.name, row), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
