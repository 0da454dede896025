"""No generated file is trained on with a meaningful column, field or split that is unread and unnamed."""

import json
import random

import pytest
from generated_data import column_cases, field_cases, split_cases
from small_data import advised, recipe

from finetune.data import read_examples
from finetune.errors import DataError


def wrong(case, write):
    """What is wrong about how a case is read; nothing if it is stopped by name with advice that works, or rightly trained."""
    path = write("rows.jsonl", case.rows)
    try:
        split = read_examples(recipe(path).dataset).train
    except DataError as error:
        problem = "\n".join(error.problems)
        if case.unread not in problem:
            return f"{case.name}: is stopped, and the column isn't named: {problem}"
        for settings in advised(error.fix):
            rows = read_examples(recipe(path, **settings).dataset).train
            if len(rows.examples) != len(case.rows):
                return f"{case.name}: {settings} refuses rows: {rows.refused[:1]}"
        return ""
    names = [name.removeprefix("messages[].") for name in split.unused_columns]
    if case.unread not in names:
        return f"{case.name}: is trained on, and the column isn't named"
    return f"{case.name}: is trained on without asking" if case.meaningful else ""


def trained_by_mistake(names, folder):
    """Files of a folder that are trained on though their names say that they aren't for training."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) + "\n")
    try:
        examples = read_examples(recipe(str(folder)).dataset).train.examples
    except DataError as error:
        return [] if error.fix else ["no fix"]
    return [example.text for example in examples if "train" not in example.text.lower() and example.text != "more.jsonl"]


def check(columns, fields, splits, write, tmp_path):
    problems = [problem for case in (*columns, *fields) if (problem := wrong(case, write))]
    problems += [name for n, names in enumerate(splits) for name in trained_by_mistake(names, tmp_path / str(n))]
    assert not problems, "\n".join(problems[:40])


def test_a_sample_of_generated_files_is_asked_about_or_read_rightly(write, tmp_path):
    generator = random.Random(7)
    samples = (generator.sample(cases(7), 60) for cases in (column_cases, field_cases, split_cases))
    check(*samples, write, tmp_path)


@pytest.mark.slow
def test_2000_generated_files_are_asked_about_or_read_rightly(write, tmp_path):
    columns, fields, splits = column_cases(1), field_cases(1), split_cases(1)
    assert len(columns) + len(fields) + len(splits) > 2_000
    check(columns, fields, splits, write, tmp_path)
