"""Makes or refreshes a row of the offline catalogue of models, finetune/model/configurations.json.

    python scripts/catalogue_row.py Qwen/Qwen3-8B path/to/config.json --parameters 8.19 --source hub
    python scripts/catalogue_row.py org/name --defaults smollm3 --parameters 3.08 --source transformers --also org/name-Base

`--defaults` takes the values from the configuration class of the installed transformers. `--parameters` are the published
billions of the language model; the row is refused when the modules that transformers builds from it have another number.
`--source` is a key of `sources` in the file. A row of the same id is replaced; `--print` writes nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any

CATALOGUE = Path(__file__).resolve().parents[1] / "finetune" / "model" / "configurations.json"
#: Most that the modules' number of parameters may differ from the published one, as in the tests.
MOST_DIFFERENCE = 0.015
WIDTH = 126
#: Fields of config.json that change neither the modules nor their sizes.
_LEFT_OUT = re.compile(
    r"_token_ids?$|_token_index$|^(id2label|label2id|architectures|auto_map|transformers_version|_name_or_path|use_cache)$"
    r"|dtype|initializer|dropout|_eps$|epsilon|^rope_|layer_rope_theta|hidden_act|^(hidden|mamba|mlp)_(hidden_)?act|activation|^output_|return_dict"
    r"|problem_type|chunk_size_feed_forward|is_encoder_decoder|pretraining_tp|router_aux|router_jitter|time_step|mtp_|nextn"
    r"|^num_logits_to_keep$|rescale|residual_in|^(vision|audio)_config$|^quantization_config$|partial_rotary|swiglu_limit"
    r"|logit_softcap|^language_model_only$|tie_encoder|is_decoder|cross_attention|pruned_heads|use_mamba_kernels"
)


def row_values(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config.json that planning needs; lists of layers that the class makes itself are left out."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    def needed(values: dict[str, Any]) -> dict[str, Any]:
        fields = {name: value for name, value in values.items() if value is not None and not _LEFT_OUT.search(name)}
        fields = {name: needed(value) if name == "text_config" else value for name, value in fields.items()}
        config_class = CONFIG_MAPPING[values["model_type"]] if values.get("model_type") in CONFIG_MAPPING else None
        for name in [name for name, value in fields.items() if isinstance(value, list) and config_class]:
            shorter = {key: value for key, value in fields.items() if key not in (name, "model_type")}
            if getattr(config_class.from_dict(shorter), name, None) == fields[name]:
                del fields[name]
        return fields

    return needed(config)


def default_config(model_type: str) -> dict[str, Any]:
    """The values of a configuration class of transformers, without what it does not compute with."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))


def check_parameters(name: str, config: dict[str, Any], billions: float) -> float:
    """The modules' number of parameters, in billions. Raises SystemExit when it is not the published one."""
    from finetune.planner.shape import shape_of
    from finetune.recipe import recipe_from

    counted = shape_of(config, recipe_from({"model_name_or_path": name, "dataset": "d"})).parameters / 1e9
    if abs(counted / billions - 1) > MOST_DIFFERENCE:
        raise SystemExit(f"{name}: the modules have {counted:.4g} billion parameters, published are {billions:g}; no row made")
    return counted


def row_text(name: str, row: dict[str, Any]) -> str:
    """The row as lines of the file, broken between values."""
    lines, indent = [], "  "
    line = indent
    for token in re.findall(r'"(?:[^"\\]|\\.)*"[:,}\]]*|[^\s"]+', f"{json.dumps(name)}: {json.dumps(row)}"):
        if len(line) + len(token) + 1 > WIDTH and line.strip():
            lines, line = [*lines, line], "    "
        opened = line[-1:] in "[{ " or not line.strip()
        line += token if opened else f" {token}"
    return "\n".join([*lines, line])


def with_row(text: str, name: str, row: dict[str, Any]) -> str:
    """The file's text with this row in place of the one of that id, or at its end."""
    head, opening, body = text.partition(' "models": {\n')
    rows = re.split(r",\n(?=  \")", body.removesuffix("\n }\n}\n"))
    new = row_text(name, row)
    index = next((index for index, old in enumerate(rows) if old.startswith(f"  {json.dumps(name)}:")), None)
    rows = [*rows, new] if index is None else [*rows[:index], new, *rows[index + 1 :]]
    changed = head + opening + ",\n".join(rows) + "\n }\n}\n"
    if json.loads(changed)["models"][name] != row:
        raise SystemExit(f"{name}: the row can't be written into {CATALOGUE.name}")
    return changed


def main() -> None:
    """Make one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="hub id")
    parser.add_argument("config", nargs="?", type=Path, help="its config.json")
    parser.add_argument("--defaults", metavar="MODEL_TYPE")
    parser.add_argument("--parameters", type=float, required=True, metavar="BILLIONS")
    parser.add_argument("--source", required=True)
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="when the values were read; today")
    parser.add_argument("--also", nargs="*", default=[], help="other ids with the same values")
    parser.add_argument("--pretrained", action="store_true", help="there is no chat model of this size")
    parser.add_argument("--print", action="store_true", dest="only_print")
    options = parser.parse_args()
    if (options.config is None) == (options.defaults is None):
        parser.error("give a config.json or --defaults MODEL_TYPE")
    text = CATALOGUE.read_text(encoding="utf-8")
    if unknown := set(options.source.split(", ")) - set(json.loads(text)["sources"]):
        parser.error(f"--source {', '.join(sorted(unknown))} is no key of sources in {CATALOGUE.name}")
    if options.config:
        values = row_values(json.loads(options.config.read_text(encoding="utf-8")))
    else:
        values = row_values(default_config(options.defaults))
    counted = check_parameters(options.name, values, options.parameters)
    also = {"also": options.also} if options.also else {}
    pretrained = {"pretrained": True} if options.pretrained else {}
    row = {"parameters": options.parameters, **values, **pretrained, **also, "source": options.source, "date": options.date}
    if options.only_print:
        print(row_text(options.name, row))
    else:
        CATALOGUE.write_text(with_row(text, options.name, row), encoding="utf-8")
    print(f"{options.name}: {counted:.4g} billion parameters counted, {options.parameters:g} published", file=sys.stderr)


if __name__ == "__main__":
    main()
