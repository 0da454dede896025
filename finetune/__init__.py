"""finetune: LoRA fine-tuning on the card you own, with a memory forecast you can trust."""

__version__ = "0.1.0"
