"""A sweep is planned first, drops arms that fall behind, and ends the same however often it was killed."""

import itertools
import os

import optuna
import pytest
from optuna.trial import Trial

import finetune.sweep as sweep_module
from finetune import requirements
from finetune.cli.app import cli
from finetune.errors import CommandError, DoesNotFit, FinetuneError, PackagesError
from finetune.events import Step, read_events
from finetune.files import write_json
from finetune.recipe import load_recipe
from finetune.run import prepare as prepare_module
from finetune.run.state import process_record, read_state
from finetune.sweep import JOURNAL, create_sweep, open_sweep, storage_in, train_arms

RECIPE = (
    "max_steps=8", "save_steps=2", "eval_steps=2", "effective_batch_size=2", "per_device_train_batch_size=2", "lora_r=4",
    "lora_alpha=8", "dataset.max_rows=40", "dataset.test_split_size=16", "sample_answers=0",
)  # fmt: skip
RATES = {"learning_rate": [1e-6, 1e-4, 1e-3, 4e-3]}


def new_sweep(path, *overrides, swept=RATES):
    def recipe_of(values):
        changes = [*RECIPE, f"output_dir={path}", *overrides, *(f"{name}={value}" for name, value in values.items())]
        return load_recipe("tiny-cpu", changes)

    return create_sweep(recipe_of, swept)


#: Trainings of the sweep, by their number, and after how many of their steps they are killed; 2 is just before a checkpoint.
KILLS = [{2: 2}, pytest.param({0: 1, 2: 2, 4: 1}, marks=pytest.mark.exhaustive)]


def drive_to_the_end(path, train, monkeypatch, kills):
    """Drive to the end; `kills`: trainings that are killed after a step, and the driving process ends with them."""
    numbers = itertools.count()

    def start(run):
        number = next(numbers)

        def killed_after_a_step():
            from finetune.run.callbacks import RunCallback

            original, steps = RunCallback.on_log, itertools.count(1)

            def on_log(self, args, state, control, logs=None, **named):
                original(self, args, state, control, logs, **named)
                if "loss" in logs and next(steps) == kills[number]:
                    os.kill(os.getpid(), 9)

            RunCallback.on_log = on_log

        train(run, killed_after_a_step if number in kills else None)

    monkeypatch.setattr(sweep_module.control, "start", start)
    monkeypatch.setattr(sweep_module.control, "resume", start)
    stops = 0
    while not open_sweep(path).is_finished:
        try:
            train_arms(open_sweep(path), lambda _: None)
        except FinetuneError:
            stops += 1
    return stops


def outcome(sweep):
    return sorted((str(result.values), result.dropped_at, tuple(result.curve)) for result in sweep.results())


@pytest.mark.slow
@pytest.mark.parametrize("kills", KILLS)
def test_a_sweep_that_was_killed_ends_as_one_in_one_go(tmp_path, train, monkeypatch, kills):
    whole, killed = new_sweep(tmp_path / "whole"), new_sweep(tmp_path / "killed")
    assert drive_to_the_end(whole.path, train, monkeypatch, {}) == 0
    assert drive_to_the_end(killed.path, train, monkeypatch, kills) == len(kills)
    assert outcome(killed) == outcome(whole)
    winner, *_, last = killed.results()
    assert winner.state == "finished" and "wins with a held-out loss of" in killed.sentence()
    assert last.values == {"learning_rate": 1e-6} and last.dropped_at == 4
    steps = [event.step for event in read_events(killed.run_of(killed.study.trials[0]).events) if isinstance(event, Step)]
    assert sorted(set(steps)) == list(range(1, 9))


@pytest.mark.slow
def test_an_arm_that_falls_behind_is_stopped_with_a_checkpoint(tmp_path, train, monkeypatch):
    sweep = new_sweep(tmp_path / "sweep", "max_steps=60", "eval_steps=30")
    *first, last = (Trial(sweep.study, arm._trial_id) for arm in sweep.study.trials)
    for trial in first:
        trial.report(0.001, 30)
        sweep.study.tell(trial, 0.001)
    monkeypatch.setattr(sweep_module, "_POLL_S", 0.01)
    monkeypatch.setattr(
        sweep_module.control, "start", lambda run: write_json(run.process, {"worker": process_record(train.start(run))})
    )
    log = []
    train_arms(open_sweep(sweep.path), log.append)
    state = read_state(sweep.run_of(last))
    assert state.state == "paused" and 30 <= state.step < 60 and "dropped at step 30" in log[-1]
    assert open_sweep(sweep.path).results()[-1].dropped_at == 30


@pytest.mark.slow
def test_an_arm_that_does_not_fit_is_named_and_has_no_run(tmp_path, monkeypatch):
    original = prepare_module.prepare

    def prepare(recipe, **named):
        if recipe.lora_r == 64:
            raise DoesNotFit("it needs 30 GB of 24 GB")
        return original(recipe, **named)

    monkeypatch.setattr(prepare_module, "prepare", prepare)
    sweep = new_sweep(tmp_path / "sweep", swept={"lora_r": [4, 8, 64]})
    assert sweep.as_json()["left_out"] == [{"values": {"lora_r": 64}, "reason": "it needs 30 GB of 24 GB"}]
    assert sorted(path.name for path in sweep.path.iterdir() if path.is_dir()) == ["sweep-1", "sweep-2"]


def test_a_journal_that_ends_in_half_a_line_is_read_and_a_damaged_one_is_an_error(tmp_path):
    study = optuna.create_study(storage=storage_in(tmp_path), study_name="sweep")
    for fact, value in {"steps": 8, "arms": 0}.items():
        study.set_user_attr(fact, value)
    journal = tmp_path / JOURNAL
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 4, "wor')
    assert open_sweep(tmp_path).study.user_attrs["steps"] == 8
    other_facts = [whole.replace(b"steps", b"stops"), whole.replace(b'"arms":0', b'"arms":2')]
    assert whole not in other_facts
    for damaged in (b"", b"\0" * 100 + b"\n" + whole, whole[20:], b"[]\n", *other_facts):
        journal.write_bytes(damaged)
        with pytest.raises(CommandError, match="is damaged"):
            open_sweep(tmp_path)


def test_without_optuna_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr(requirements.metadata, "requires", lambda _: ['no-such-optuna>=4.3; extra == "sweep"'])
    with pytest.raises(PackagesError, match=r"(?s)finetune sweep needs no-such-optuna.*pip install 'no-such-optuna>=4.3'"):
        cli(["sweep", "tiny-cpu"], standalone_mode=False)
