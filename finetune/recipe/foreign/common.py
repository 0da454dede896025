"""Rules of keys that several tools have, each with its reason."""

from __future__ import annotations

from finetune.recipe.foreign.rules import Ignore, Refuse

MEMORY = Ignore("does not change what is learnt: the plan chooses what fits the GPU")
KERNELS = Ignore("kernels do not change what is learnt: the plan chooses the GPU's fastest")
EVERY_STEP = Ignore("every step is logged")
STEPS = Ignore("the plan chooses how often; set eval_steps or save_steps")
TRACKERS = Ignore("set report_to to log to wandb, tensorboard or trackio")
UPLOAD = Ignore("nothing is uploaded: `finetune merge` writes the model")
GPUS = Ignore("for several GPUs: set launch.num_processes and launch.strategy")
PROCESS = Ignore("concerns the other tool's own process")
DATASET_CACHE = Ignore("tokenised rows are cached by finetune")
GENERATION = Ignore("for generation, not for training")
PREFERENCE = Ignore("for preference training, which this is not")
NOT_TRAINED = Refuse("this is not trained by finetune")
REMOTE_CODE = Ignore("models that transformers knows need no code of the hub; else set it here with model_revision")
OTHER_ADAPTER = Refuse("in a recipe it is adapter: FOLDER, without the rank and layers, which it has")
WHOLE_MODULES = Refuse("whole modules are not trained beside adapters")
FROM_CHECKPOINT = Refuse("a new run starts from the beginning; `finetune resume RUN` continues", ("auto",))
NEW_TOKENS = Refuse("in a recipe it is new_tokens=[..], whose rows alone are trained", lifted_by="new_tokens")
OTHER_METHOD = Ignore("of a method that this configuration doesn't use")
SECRET = Refuse("secrets don't belong in a file: `hf auth login`, or set HF_TOKEN")
