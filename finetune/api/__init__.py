"""The library behind `import finetune`."""
